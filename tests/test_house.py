"""The house rules as tests: who may import whom, how long things may be, what is public.

Every rule is a function from source text to a list of faults, so that the same function runs on the package,
where it must find nothing, and on a few wrong lines, where it must find something.
"""

from __future__ import annotations

import ast
import io
import os
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from itertools import chain
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "slipstream"

# A file imports strictly lower levels. `room.*` holds for a folder and all its files; where files of one
# folder need each other, they get lines of their own, ordered by tenths ("server.app": 5.1).
LEVELS: dict[str, float] = {
    "version": 0,
    "stats": 0,
    "text": 0,
    "prompts": 0,
    "files": 0,
    "jsontext": 0,
    "values": 0,
    "planfile": 0.1,
    "answers": 0.1,
    "tensorfiles": 0.1,
    "documents": 0,
    "branches": 0.2,
    "laws": 0.2,
    "sources": 0.2,
    "records": 0.5,
    "theory": 0,
    "sampling": 1,
    "acceptance": 1,
    "trees": 1.1,
    "learned": 0.8,
    "controllers": 1,
    "cache": 1,
    "processes": 1,
    "explain": 1,
    "rules": 1.5,
    "tracing": 1,
    "execution": 1.5,
    "fused": 1.6,
    "encoding": 1.6,
    "kernel": 0.9,
    "merging": 0.95,
    "activations": 0.95,
    "attention": 0.95,
    "packing": 1,
    "sight": 1,
    "seq2seq": 1.9,
    "support": 1.9,
    "loadfaults": 1.95,
    "models": 2,
    "decoding": 2,
    "drafters.vocabulary": 2.6,
    "drafters.reading": 2.7,
    "drafters.retokenized": 2.8,
    "drafters.copies": 2.7,
    "drafters.nearest": 2.7,
    "drafters.embedding": 2.8,
    "drafters.memory": 2.8,
    "drafters.corpus": 2.8,
    "drafters.*": 3,
    "drafters.datastore": 3.1,
    "drafters.chain": 3.1,  # a draft that is drafted
    "drafters.choice": 3.1,
    "exits": 3.2,
    "teach": 3.2,
    "beam": 3,
    "distill": 3,
    "drafting": 3.5,  # what users write for a draft -> a drafter
    "offers": 3.7,  # which drafts a target can use
    "tasks": 3.9,  # what an encoder-decoder is asked to do
    "requests": 3.95,  # what users pass to a call
    "engine": 4,
    "check": 5.9,
    "check.watch": 5.1,
    "check.plain": 5.2,
    "check.samples": 5.2,
    "check.parts": 5.3,
    "check.*": 5,
    "plan": 5.1,
    "plan.figures": 5.1,
    "plan.exports": 5.1,
    "plan.predict": 5.1,
    "plan.measure": 5.2,
    "plan.run": 5.3,
    "plan.plot": 5.4,
    "bench": 5.09,
    "bench.records": 5.01,
    "bench.peers": 5.02,
    "bench.race": 5.02,
    "bench.contenders": 5.03,
    "bench.machine": 5.04,
    "bench.*": 5.05,
    "generate_batch": 4.7,
    "generate_cache": 4.7,
    "generate_call": 4.8,
    "hook": 5,  # the custom_generate hook of transformers
    "server.*": 5,
    "paper": 6,
    "paper.published": 6,
    "paper.corpora": 6,
    "paper.writing": 6,
    "paper.walks": 6,
    "paper.report": 6,
    "paper.standins": 6,
    "paper.training": 6.1,
    "paper.families": 6.2,
    "paper.ideal": 6.1,
    "paper.draw": 6.1,
    "paper.page": 6.1,
    "paper.subjects": 6.1,
    "paper.trails": 6.2,
    "paper.speeds": 6.2,
    "paper.traces": 6.2,
    "paper.quality": 6.3,
    "paper.lab": 6.4,
    "paper.tables": 6.5,
    "paper.figures": 6.6,
    "paper.catalogue": 6.7,
    "cluster": 6,
    "cli.app": 7,
    "cli.options": 7,
    "cli.*": 7.1,  # a file per command
    "cli": 7.2,
    "__init__": 7,
    "__main__": 8,
}

PURE = {
    "theory",
    "files",
    "jsontext",
    "values",
    "answers",
    "planfile",
    "plan.figures",
    "plan.predict",
}  # rooms without any third party
ANYWHERE = ("*",)
THIRD_PARTIES: dict[str, tuple[str, ...]] = {
    "torch": ANYWHERE,
    "numpy": ANYWHERE,
    "safetensors": ("tensorfiles", "loadfaults"),
    "transformers": (
        "models",
        "loadfaults",
        "seq2seq",
        "support",
        "tasks",
        "execution",
        "packing",
        "attention",
        "sampling",
        "generate_batch",
        "generate_cache",
        "generate_call",
        "hook",
        "bench.peers",
        "distill",
        "drafters.early_exit",
        "drafters.heads",
        "paper.standins",
        "paper.training",
        "paper.families",
    ),
    "sentence_transformers": ("drafters.embedding",),
    "faiss": ("drafters.nearest",),
    "datasets": ("documents",),
    "typer": ("cli", "cli.*"),
    "rich": ("cli", "cli.*", "explain", "paper.traces"),
    "matplotlib": ("plan.plot", "bench.plot", "paper.draw"),
    "tokenizers": ("paper.standins",),
    "sacrebleu": ("paper.quality",),
}

MODULE_LINES, FUNCTION_LINES, PARAMETERS = 400, 50, 7
# The heart stays readable at one glance.
HEART = {"decoding": {"play_round": 25, "rounds": 20}}
# Public faces whose many keyword settings are the user's own.
MANY_PARAMETERS = ("engine.load", "engine.Engine.*", "cli.*")

# Our machines' folders and anybody's home; written so that this line does not match itself.
MACHINE_PATHS = re.compile(rb"(?<![\w.~-])/(?:work|root|(?:home|Users)/\w+|opt/(?:wheels|pypi)[\w-]*)/")

IMPORTERS = ("__import__", "import_module", "importlib.import_module")
Import = tuple[int, str, tuple[str, ...]]  # line, dotted path from the top, names taken from it


def modules(package: Path = PACKAGE) -> dict[str, Path]:
    """Every module of the package by its name without `slipstream.`; the root is `__init__`."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name or "__init__"] = path
    return found


MODULES = modules()
every_module = pytest.mark.parametrize("room", MODULES)


def read(room: str) -> str:
    """The source of one module."""
    return MODULES[room].read_text(encoding="utf-8")


# --- levels and third parties ---------------------------------------------------------------------


def level(room: str) -> float | None:
    """The level of a module: its own line in the table, else its folder's, else None."""
    return LEVELS.get(room, LEVELS.get(room.split(".")[0] + ".*"))


def imports(room: str, source: str, is_package: bool = False) -> Iterator[Import]:
    """Every import of a module, also inside functions, under TYPE_CHECKING and by `import_module("...")`."""
    here = ["slipstream", *([] if room == "__init__" else room.split("."))]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            up = node.level - (is_package or room == "__init__")
            base = here[: len(here) - up] if node.level else []
            path = ".".join([*base, *([node.module] if node.module else [])])
            yield node.lineno, path, tuple(alias.name for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in IMPORTERS:
            yield from ((node.lineno, str(a.value), ()) for a in node.args[:1] if isinstance(a, ast.Constant))


def rooms_reached(path: str, names: tuple[str, ...], known: set[str]) -> set[str]:
    """What `from slipstream.path import names` reaches: submodules among the names, else the path."""
    room = path.removeprefix("slipstream.")
    return {f"{room}.{name}" if f"{room}.{name}" in known else room for name in names} or {room}


def level_faults(room: str, source: str, known: set[str], is_package: bool = False) -> list[str]:
    """Imports of the package root, of a room that does not exist, or of a level not strictly lower."""
    own = level(room)
    if own is None:
        return [f"{room} has no level: give it a line in LEVELS"]
    faults = []
    for line, path, names in imports(room, source, is_package):
        if path == "slipstream":
            faults.append(f"{room}:{line} imports the package root: name the module")
        elif path.startswith("slipstream."):
            for other in sorted(rooms_reached(path, names, known)):
                theirs = level(other) if other in known else None
                if theirs is None:
                    faults.append(f"{room}:{line} imports {other}, which does not exist or has no level")
                elif theirs >= own:
                    faults.append(f"{room} (level {own}):{line} imports {other} (level {theirs})")
    return faults


def third_party_faults(room: str, source: str) -> list[str]:
    """Third parties this room may not know, and those the package does not declare."""
    faults = []
    for line, path, _ in imports(room, source):
        party = path.split(".")[0]
        if party == "slipstream" or party in sys.stdlib_module_names:
            continue
        if party not in THIRD_PARTIES:
            faults.append(f"{room}:{line} imports {party}, which THIRD_PARTIES does not list")
        elif room in PURE or not any(fnmatch(room, pattern) for pattern in THIRD_PARTIES[party]):
            faults.append(f"{room}:{line} imports {party}, which belongs to {THIRD_PARTIES[party]}")
    return faults


def test_every_folder_is_a_package() -> None:
    """A folder without `__init__.py` would be missing from the wheel."""
    folders = {path.parent for path in MODULES.values()} - {PACKAGE}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


@every_module
def test_imports_go_down(room: str) -> None:
    is_package = MODULES[room].name == "__init__.py"
    assert level_faults(room, read(room), set(MODULES), is_package) == []


@every_module
def test_third_parties_keep_to_their_rooms(room: str) -> None:
    assert third_party_faults(room, read(room)) == []


KNOWN = {"records", "sampling", "cache", "models", "decoding", "engine", "cli", "drafters", "drafters.ngram"}


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("surprise", "import math"),  # not in the table
        ("sampling", "from slipstream.engine import Engine"),  # upwards
        ("sampling", "import slipstream.cache as cache"),  # sideways
        ("sampling", "def f():\n    from slipstream.models import load"),  # inside a function
        ("records", "if TYPE_CHECKING:\n    from slipstream.records import Law"),  # no exemption for types
        ("sampling", "from .decoding import rounds"),  # relative
        ("drafters.ngram", "from ..cli import main"),
        ("drafters.other", "from slipstream.drafters import ngram"),  # siblings of one level
        ("models", "from slipstream.drafters import ngram"),
        ("engine", "import slipstream"),  # the root
        ("engine", "from slipstream import models"),
        ("engine", "from . import models"),
        ("engine", "import_module('slipstream.cli')"),
        ("engine", "importlib.import_module('slipstream.cli')"),
        ("engine", "from slipstream.gone import thing"),  # no such room
    ],
)
def test_import_checker_catches(room: str, source: str) -> None:
    assert len(level_faults(room, source, KNOWN)) == 1


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("engine", "from slipstream.drafters import ngram\nfrom .models import load\nimport math"),
        ("drafters", "from ..records import Law"),
        ("drafters.ngram", "from ..records import Law"),
        ("__init__", "from .engine import Engine"),
    ],
)
def test_import_checker_lets_pass(room: str, source: str) -> None:
    assert level_faults(room, source, KNOWN, is_package=room == "drafters") == []


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("theory", "import torch"),
        ("theory", "def f():\n    import numpy.random"),
        ("decoding", "from transformers import AutoModel"),
        ("drafters.ngram", "import transformers.cache_utils"),
        ("engine", "import typer"),
        ("bench", "from rich.table import Table"),
        ("models", "import tokenizers"),
        ("models", "import huggingface_hub"),  # comes along with transformers, but is not declared
    ],
)
def test_third_party_checker_catches(room: str, source: str) -> None:
    assert len(third_party_faults(room, source)) == 1


def test_third_party_checker_lets_pass() -> None:
    good = "import math, torch.nn\nfrom transformers import AutoModel"
    assert third_party_faults("drafters.heads", good) == []
    assert third_party_faults("paper.families", good) == []


def json_faults(room: str, source: str) -> list[str]:
    """Uses of `json.dump` and `json.dumps`, which write NaN and Infinity that no other reader of JSON takes."""
    names = [
        (node.lineno, node.attr if isinstance(node, ast.Attribute) else alias)
        for node in ast.walk(ast.parse(source))
        for alias in (
            [a.name for a in node.names] if isinstance(node, ast.ImportFrom) and node.module == "json" else [""]
        )
        if isinstance(node, ast.ImportFrom | ast.Attribute)
    ]
    return [f"{room}:{line} uses {name}: use json_text" for line, name in names if name in ("dump", "dumps")]


@every_module
def test_json_is_written_in_one_place(room: str) -> None:
    assert room == "jsontext" or json_faults(room, read(room)) == []


@pytest.mark.parametrize(
    "source", ["import json\njson.dumps(1)", "import json as j\nj.dump(1, f)", "from json import dumps"]
)
def test_json_checker_catches(source: str) -> None:
    assert len(json_faults("engine", source)) == 1


DISTRIBUTIONS = {"faiss": "faiss-cpu", "sentence_transformers": "sentence-transformers"}
"""Where a package is published under another name than it is imported by."""


def declared() -> set[str]:
    """The third parties that pyproject.toml names, extras included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [project["dependencies"], *project["optional-dependencies"].values()]
    names = {re.split(r"[<>=!~\[; ]", line)[0] for line in chain(*requirements)}
    return names - {project["name"]}  # an extra may be part of another


def test_third_parties_are_declared_and_pinned() -> None:
    pinned = set(re.findall(r"^([\w.-]+)==[\w.]+$", (ROOT / "constraints.txt").read_text(), re.M))
    assert {DISTRIBUTIONS.get(party, party) for party in THIRD_PARTIES} <= declared()
    assert declared() <= pinned


# --- sizes ----------------------------------------------------------------------------------------


SILENT = {getattr(tokenize, name) for name in ("COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER")}


def code_lines(source: str) -> set[int]:
    """Numbers of the lines that hold code: neither blank, nor only a comment, nor docstring."""
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in SILENT:
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if ast.get_docstring(node) is not None:
            first = node.body[0]
            code.difference_update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return code


def functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function below a node with its dotted name, nested ones too."""
    for child in ast.iter_child_nodes(node):
        name = prefix
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{prefix}.{child.name}"
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield name, child
        yield from functions(child, name)


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """How many parameters a caller sees: keyword-only and starred ones count, `self` and `cls` do not."""
    every = function.args
    named = [*every.posonlyargs, *every.args, *every.kwonlyargs]
    bound = bool(named) and named[0].arg in ("self", "cls")
    return len(named) - bound + (every.vararg is not None) + (every.kwarg is not None)


def size_faults(room: str, source: str) -> list[str]:
    """Modules and functions that are too long, and functions that ask for too much."""
    faults = []
    if (length := len(source.splitlines())) >= MODULE_LINES:
        faults.append(f"{room} has {length} lines, under {MODULE_LINES} are allowed")
    code, heart = code_lines(source), dict(HEART.get(room, {}))
    for name, node in functions(ast.parse(source), room):
        limit = min(FUNCTION_LINES, heart.pop(node.name, FUNCTION_LINES))
        span = len(code & set(range(node.lineno, (node.end_lineno or node.lineno) + 1)))
        if span > limit:
            faults.append(f"{name} has {span} code lines, {limit} are allowed")
        public_face = any(fnmatch(name, pattern) for pattern in MANY_PARAMETERS)
        if (count := parameters(node)) > PARAMETERS and not public_face:
            faults.append(f"{name} has {count} parameters, {PARAMETERS} are allowed, then a record")
    return faults + [f"{room}.{name} is missing: its size is a rule of the house" for name in heart]


@every_module
def test_sizes(room: str) -> None:
    assert size_faults(room, read(room)) == []


def lines(count: int, name: str = "f") -> str:
    """A function of exactly `count` code lines, padded with what must not count."""
    body = ["    x = 1"] * (count - 1)
    return "\n".join([f"def {name}():", '    """Doc', '    string."""', "", "    # why", *body, ""])


ROUND, ROUNDS = lines(25, "play_round"), lines(20, "rounds")


@pytest.mark.parametrize(
    ("room", "source", "faults"),
    [
        ("engine", "\n" * 399, 0),
        ("engine", "\n" * 400, 1),
        ("engine", lines(50), 0),
        ("engine", lines(51), 1),
        ("engine", "class A:\n    async def f(self, a, b, c, d, *, e, f, g): ...", 0),
        ("engine", "class A:\n    async def f(self, a, b, c, d, *, e, f, g, h): ...", 1),
        ("engine", "def f(a, b, c, d, e, f, g, **rest): ...", 1),
        ("engine", "class Engine:\n    def generate(self, a, b, c, d, e, f, g, h): ...", 0),
        ("bench", "if True:\n    def f(a):\n        def g(a, b, c, d, e, f, g, h): ...", 1),
        ("decoding", ROUND + ROUNDS, 0),
        ("decoding", lines(26, "play_round") + ROUNDS, 1),
        ("decoding", ROUND + lines(21, "rounds"), 1),
        ("decoding", ROUND, 1),
    ],
)
def test_size_checker_catches(room: str, source: str, faults: int) -> None:
    assert len(size_faults(room, source)) == faults


# --- the public face ------------------------------------------------------------------------------


def face_faults(module: ModuleType) -> list[str]:
    """`__all__` must be sorted and equal to what can be imported, the modules of the house aside."""
    names: list[str] = module.__all__
    visible = {
        name for name in dir(module) if not name.startswith("_") and not isinstance(getattr(module, name), ModuleType)
    }
    faults = [] if names == sorted(names) else [f"__all__ is not sorted: {names}"]
    return faults + [f"{name} is public in one place only" for name in sorted(visible ^ set(names))]


def import_without(source: str, *absent: str) -> subprocess.CompletedProcess[str]:
    """Run source in a fresh interpreter where some packages cannot be imported."""
    block = f"import sys; sys.modules.update(dict.fromkeys({absent!r}))\n"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", block + source]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


has_face = pytest.mark.skipif("__init__" not in MODULES, reason="slipstream has no __init__ yet")


@has_face
def test_public_names() -> None:
    import slipstream

    assert face_faults(slipstream) == []


def test_public_names_checker_catches() -> None:
    module = ModuleType("face")
    module.__dict__.update(__all__=["b", "a", "gone"], a=1, b=2, extra=3, os=os)
    assert len(face_faults(module)) == 3
    module.__dict__.update(__all__=["a", "b", "extra"])
    assert face_faults(module) == []


@has_face
def test_core_needs_no_command_line() -> None:
    run = import_without("import slipstream", "typer", "rich")
    assert run.returncode == 0, run.stderr


def test_import_without_catches() -> None:
    assert "ModuleNotFoundError" in import_without("import rich", "typer", "rich").stderr


# --- the repository -------------------------------------------------------------------------------


@cache
def repository_files() -> tuple[Path, ...]:
    """What git tracks or would add; without git, every file outside hidden and built folders."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
        paths = [ROOT / name for name in names if name]
    except (OSError, subprocess.CalledProcessError):
        skipped = re.compile(r"\.(?!ci$|gitignore$).*|build|dist|__pycache__|.*\.egg-info")
        paths = [p for p in ROOT.rglob("*") if not any(map(skipped.fullmatch, p.relative_to(ROOT).parts))]
    return tuple(sorted(path for path in paths if path.is_file()))


def machine_paths(content: bytes) -> list[str]:
    """Absolute paths of somebody's machine in a file."""
    return [match.group().decode() for match in MACHINE_PATHS.finditer(content)]


def test_no_file_mentions_a_machine() -> None:
    found = {path.relative_to(ROOT): machine_paths(path.read_bytes()) for path in repository_files()}
    assert {path: paths for path, paths in found.items() if paths} == {}
    assert Path(__file__).resolve() in [path.resolve() for path in repository_files()]


@pytest.mark.parametrize("start", ["/work", "cd /root", "'/home/ada", "(/Users/ada", "/opt/wheels", "/opt/pypi-x"])
def test_machine_path_checker_catches(start: str) -> None:
    path = f"{start}/x".encode()  # joined here, so that this file stays clean
    assert len(machine_paths(path)) == 1
    assert machine_paths(b"https://example.org" + path[path.index(b"/") :]) == []


def make_commands(text: str) -> set[str]:
    """Targets of the `make` commands in a text's code, fenced or inline, not in its prose."""
    fenced = "\n".join(re.findall(r"^```.*?\n(.*?)^```", text, re.M | re.S))
    return {*re.findall(r"^(?:\$ )?make ([a-z]+)", fenced, re.M), *re.findall(r"`make ([a-z]+)`", text)}


def make_targets(makefile: str) -> set[str]:
    """The commands a Makefile offers."""
    return set(re.findall(r"^([a-z]+):", makefile, re.M))


def test_documented_commands_exist() -> None:
    targets = make_targets((ROOT / "Makefile").read_text())
    assert {"demo", "test"} <= targets
    for page in (path for path in repository_files() if path.suffix == ".md"):
        assert make_commands(page.read_text(encoding="utf-8")) <= targets, page


@pytest.mark.skipif(not (ROOT / "README.md").exists(), reason="there is no README yet")
def test_readme_shows_the_two_commands() -> None:
    assert {"demo", "test"} <= make_commands((ROOT / "README.md").read_text(encoding="utf-8"))


def test_command_checker_catches() -> None:
    text = "We make sure.\n```sh\n$ make magic\nmake demo\n```\nand `make test`."
    assert make_commands(text) == {"magic", "demo", "test"}
    assert make_commands(text) - make_targets("demo: x ## y\n\trun\ntest:\n") == {"magic"}


# ---- benchmarks -------------------------------------------------------------------------------------------------


def test_benchmarks_can_be_started() -> None:
    """Their folder comes first on the path then: no file there may be called as a module that a library looks for."""
    names = sorted(file.stem for file in (ROOT / "benchmarks").glob("*.py"))
    code = "import importlib, sys; sys.path.insert(0, sys.argv[1]); [importlib.import_module(n) for n in sys.argv[2:]]"
    started = subprocess.run(
        [sys.executable, "-c", code, str(ROOT / "benchmarks"), *names], capture_output=True, text=True
    )
    assert started.returncode == 0, started.stderr
