"""The house rules as tests: who may import whom, how long things may be, what is public.

Every rule is a function from source text to a list of faults, so that the same function runs on the package,
where it must find nothing, and on a few wrong lines, where it must find something.
"""

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
from graphlib import TopologicalSorter
from importlib import import_module, metadata
from pathlib import Path
from types import ModuleType

import pytest

import size
from bounds import pins, requirements

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "slipstream"

# A package imports packages of lower levels only; inside a package no file imports, through others, itself.
LEVELS: dict[str, int] = {
    "version": 0,
    "files": 0,
    "theory": 0,
    "core": 1,
    "text": 1,
    "cache": 2,
    "kernels": 2,
    "execution": 3,
    "models": 4,
    "decoding": 4,
    "drafters": 5,
    "processes": 5,
    "engine": 6,
    "training": 7,
    "measure": 7,
    "bench": 8,
    "check": 8,
    "plan": 8,
    "serve": 8,
    "cli": 10,
    "__init__": 10,
    "__main__": 11,
    "reproduction": 12,
}

PURE = {"theory", "text.jsontext", "core.values", "core.options", "engine.plan_file", "plan.from_figures"}
PURE |= {"plan.predict"}
"""Files without any third party."""
ANYWHERE = ("*",)
THIRD_PARTIES: dict[str, tuple[str, ...]] = {
    "torch": ANYWHERE,
    "numpy": ANYWHERE,
    "safetensors": ("files", "models.loading.faults", "models.loading.dropped_tensors"),
    "transformers": (
        "models.*",
        "engine.defaults",
        "engine.transformers_hook.*",
        "execution.names",
        "execution.passes",
        "execution.backends",
        "execution.cuda_graphs",
        "execution.backends",
        "kernels.packing",
        "kernels.attention",
        "decoding.sampling",
        "decoding.grammar",
        "bench.peers",
        "serve.response_format",
        "check.families",
        "training.*",
        "reproduction.standins.*",
        "reproduction.baselines.exits",
    ),
    "datasets": ("text.documents",),
    "typer": ("cli", "cli.*", "reproduction.cli"),
    "rich": ("cli", "cli.*", "engine.explain", "reproduction.runs.timelines"),
    "matplotlib": ("reproduction.pages.draw",),
    "tokenizers": ("models.loading.gguf_tokenizer", "reproduction.standins.models"),
    "sacrebleu": ("reproduction.runs.bleu", "reproduction.runs.quality"),
    "fastapi": ("serve.*",),
    "llguidance": ("decoding.grammar",),
    "starlette": ("serve.*",),
    "pydantic": ("serve.*",),
    "uvicorn": ("serve.server",),
    "prometheus_client": ("serve.metrics", "serve.routes.models"),
    "httpx": ("serve.batch.run", "serve.chats"),
    "pyarrow": ("serve.batch.lines", "serve.batch.journal"),
    "ray": ("serve.batch.run", "serve.cluster.*"),
    "soundfile": ("engine.sounds",),
    "gguf": ("models.loading.gguf", "models.loading.gguf_file"),
    "peft": ("models.loading.adapters",),
    "huggingface_hub": ("models.loading.gguf_file",),
    "PIL": ("engine.media", "serve.pictures"),
}

MODULE_LINES, FUNCTION_LINES, PARAMETERS = 400, 50, 7
# The heart stays readable at one glance.
HEART = {"decoding.speculate": {"play_round": 25}, "decoding.generate": {"rounds": 20}}
# Public faces whose many keyword settings are the user's own.
MANY_PARAMETERS = ("engine.load.load", "engine.engine.Engine.*", "cli.*", "reproduction.cli.*")

# Our machines' folders and anybody's home; written so that this line does not match itself.
MACHINE_PATHS = re.compile(rb"(?<![\w.~-])/(?:work|root|(?:home|Users)/\w+|opt/(?:wheels|pypi)[\w-]*)/")

IMPORTERS = ("__import__", "import_module")
Import = tuple[int, str, tuple[str, ...]]  # line, dotted path from the top, names taken from it


def modules(package: Path = PACKAGE) -> dict[str, Path]:
    """Every module of the package by its name without `slipstream.`; the root is `__init__`."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name or "__init__"] = path
    return found


BESIDE = {f"reproduction.{name}": path for name, path in modules(ROOT / "reproduction").items() if "tests" not in name}
MODULES = modules() | {name.removesuffix(".__init__"): path for name, path in BESIDE.items()}
"""Those of the package, and of the reproduction that stands beside it and on top of it."""


def read(room: str) -> str:
    return MODULES[room].read_text(encoding="utf-8")


# --- levels and third parties ---------------------------------------------------------------------


def level(room: str) -> int | None:
    """The level of a module: that of its package or, at the top, its own."""
    return LEVELS.get(room.split(".")[0])


@cache
def imports(room: str, source: str, is_package: bool = False) -> list[Import]:
    """Every import of a module, also inside functions, under TYPE_CHECKING and by `import_module("...")`."""
    found = list[Import]()
    here = ["slipstream", *([] if room == "__init__" else room.split("."))]
    for node in size.nodes(source):
        if isinstance(node, ast.Import):
            found += ((node.lineno, alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            up = node.level - (is_package or room == "__init__")
            base = here[: len(here) - up] if node.level else []
            path = ".".join([*base, *([node.module] if node.module else [])])
            found.append((node.lineno, path, tuple(alias.name for alias in node.names)))
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", None)) in IMPORTERS:
            found += ((node.lineno, str(a.value), ()) for a in node.args[:1] if isinstance(a, ast.Constant))
    return found


def rooms_reached(path: str, names: tuple[str, ...], known: set[str]) -> set[str]:
    """What `from slipstream.path import names` reaches: submodules among the names, else the path."""
    room = path.removeprefix("slipstream.")
    return {f"{room}.{name}" if f"{room}.{name}" in known else room for name in names} or {room}


def rooms_imported(room: str, source: str, known: set[str], is_package: bool = False) -> Iterator[tuple[int, str]]:
    """The modules of the house that a module imports, with the line; the package root is `__init__`."""
    for line, path, names in imports(room, source, is_package):
        if path == "slipstream":
            yield line, "__init__"
        elif path.startswith(("slipstream.", "reproduction.")):
            yield from ((line, other) for other in sorted(rooms_reached(path, names, known)))


def level_faults(room: str, source: str, known: set[str], is_package: bool = False) -> list[str]:
    """Imports of the package root, of a module that does not exist, or of a package that is not strictly lower."""
    own = level(room)
    if own is None:
        return [f"{room} has no level: give its package a line in LEVELS"]
    faults = []
    for line, other in rooms_imported(room, source, known, is_package):
        if other == "__init__":
            faults.append(f"{room}:{line} imports the package root: name the module")
        elif other not in known or level(other) is None:
            faults.append(f"{room}:{line} imports {other}, which does not exist or has no level")
        elif other.split(".")[0] != room.split(".")[0] and level(other) >= own:  # type: ignore[operator]
            faults.append(f"{room} (level {own}):{line} imports {other} (level {level(other)})")
    return faults


def third_party_faults(room: str, source: str) -> list[str]:
    """Third parties this room may not know, and those the package does not declare."""
    faults = []
    for line, path, _ in imports(room, source):
        party = path.split(".")[0]
        if party in ("slipstream", "reproduction") or party in sys.stdlib_module_names:
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


def test_imports_go_down() -> None:
    def faults(room: str) -> list[str]:
        return level_faults(room, read(room), set(MODULES), MODULES[room].name == "__init__.py")

    assert [fault for room in MODULES for fault in faults(room)] == []


def test_no_import_comes_back() -> None:
    """Inside a package files are layered too, although no table says how."""
    arrows = {
        room: {other for _, other in rooms_imported(room, read(room), set(MODULES), path.name == "__init__.py")}
        for room, path in MODULES.items()
    }
    TopologicalSorter(arrows).prepare()  # raises an error that names the circle


def test_the_top_of_the_house_can_be_read_at_a_glance() -> None:
    unread = {"__pycache__", "py.typed"}  # the marker of PEP 561 is an empty file
    shown = [entry.name for entry in PACKAGE.iterdir() if entry.name not in unread]
    assert len(shown) <= 25, sorted(shown)


def test_third_parties_keep_to_their_rooms() -> None:
    assert [fault for room in MODULES for fault in third_party_faults(room, read(room))] == []


KNOWN = {"core.draft", "cache.rows", "models", "models.causal", "decoding.speculate", "engine.load", "cli"}
KNOWN |= {"drafters", "drafters.ngram"}


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("surprise.room", "import math"),  # not in the table
        ("decoding.sampling", "from slipstream.engine.load import load"),  # upwards
        ("models.causal", "import slipstream.decoding.speculate as speculate"),  # sideways
        ("core.law", "def f():\n    from slipstream.models.causal import load"),  # inside a function
        ("core.law", "if TYPE_CHECKING:\n    from slipstream.models.causal import Law"),  # no exemption for types
        ("core.law", "from ..decoding.speculate import play_round"),  # relative
        ("drafters.ngram", "from ..cli import main"),
        ("models.causal", "from slipstream.drafters import ngram"),
        ("engine.load", "import slipstream"),  # the root
        ("engine.load", "from slipstream import models"),
        ("engine.load", "from .. import models"),
        ("engine.load", "import_module('slipstream.cli')"),
        ("engine.load", "importlib.import_module('slipstream.cli')"),
        ("engine.load", "from slipstream.gone import thing"),  # no such room
    ],
)
def test_import_checker_catches(room: str, source: str) -> None:
    assert len(level_faults(room, source, KNOWN)) == 1


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("engine.load", "from slipstream.drafters import ngram\nfrom ..models.causal import load\nimport math"),
        ("drafters", "from ..core.draft import Law"),
        ("drafters.other", "from slipstream.drafters import ngram"),  # within a package the circles decide
        ("drafters.ngram", "from ..core.draft import Law"),
        ("__init__", "from .engine.load import load"),
    ],
)
def test_import_checker_lets_pass(room: str, source: str) -> None:
    assert level_faults(room, source, KNOWN, is_package=room == "drafters") == []


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("theory", "import torch"),
        ("theory", "def f():\n    import numpy.random"),
        ("decoding.speculate", "from transformers import AutoModel"),
        ("drafters.ngram", "import transformers.cache_utils"),
        ("engine.load", "import typer"),
        ("bench.race", "from rich.table import Table"),
        ("models.causal", "import tokenizers"),
        ("models.causal", "import huggingface_hub"),
    ],
)
def test_third_party_checker_catches(room: str, source: str) -> None:
    assert len(third_party_faults(room, source)) == 1


def test_third_party_checker_lets_pass() -> None:
    good = "import math, torch.nn\nfrom transformers import AutoModel"
    assert third_party_faults("models.causal", good) == []
    assert third_party_faults("reproduction.standins.build", good) == []


DISTRIBUTIONS = {"prometheus_client": "prometheus-client", "PIL": "pillow"}
"""Where a package is published under another name than it is imported by."""


def declared() -> set[str]:
    """The third parties that pyproject.toml names, extras included."""
    return {re.split(r"[<>=!~\[; ]", line)[0] for line in requirements((ROOT / "pyproject.toml").read_text())}


def test_third_parties_are_declared_and_pinned() -> None:
    pinned = set(re.findall(r"^([\w.-]+)==[\w.]+$", (ROOT / "constraints.txt").read_text(), re.M))
    assert {DISTRIBUTIONS.get(party, party) for party in THIRD_PARTIES} <= declared()
    assert declared() <= pinned


def test_what_users_install_has_lower_bounds() -> None:
    """Which `make test-oldest` tries; the tools of tests and wheels may be as new as they like."""
    pyproject = (ROOT / "pyproject.toml").read_text()
    project = tomllib.loads(pyproject)["project"]
    tools = {*project["optional-dependencies"]["test"], *project["optional-dependencies"]["wheel"]}
    bounded = {line.partition("==")[0] for line in pins(pyproject)}
    assert {re.split(r"[<>=!~\[; ]", line)[0] for line in requirements(pyproject) if line not in tools} <= bounded


def test_bounds_are_read_as_they_are_written() -> None:
    text = '[project]\nname = "x"\ndependencies = ["a>=2", "b"]\n[project.optional-dependencies]\n'
    text += 'more = ["c[d,e]>=1.2,<3", "x[other]", "a-b>=0.1rc1"]'
    assert pins(text) == ["a-b==0.1rc1", "a==2", "c==1.2"] and "b" in requirements(text)


def naming_faults(file: str, source: str) -> list[str]:
    """Uses of a name that some versions of transformers, or some models, have for a cache."""
    names = {"past_key_values", "cache_params"}
    if not any(name in source for name in names):  # most files, which need not be parsed
        return []
    spoken = (
        (node, name)
        for node in size.nodes(source)
        for name in (getattr(node, field, None) for field in ("id", "attr", "arg", "value"))
        if isinstance(name, str) and name in names
    )
    return [f"{file}:{node.lineno} says {name}: ask slipstream.execution.names" for node, name in spoken]  # type: ignore[attr-defined]


def test_one_module_knows_how_caches_are_called() -> None:
    """In the package, and in tests, recipes and benchmarks, which run with as many versions."""
    knowing = {"names.py", "test_names.py", Path(__file__).name}
    others = [path for path in repository_files() if path.suffix == ".py" and path.name not in knowing]
    assert [fault for path in others for fault in naming_faults(path.name, path.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize("source", ["f(past_key_values=1)", "out.past_key_values", "x['cache_params']"])
def test_naming_checker_catches(source: str) -> None:
    assert len(naming_faults("causal.py", source)) == 1
    assert naming_faults("causal.py", "f(**{CACHE: 1}); 'its past_key_values cannot'") == []


# --- sizes ----------------------------------------------------------------------------------------


SILENT = {getattr(tokenize, name) for name in ("COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER")}


def code_lines(source: str) -> set[int]:
    """Numbers of the lines that hold code: neither blank, nor only a comment, nor docstring."""
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in SILENT:
            code.update(range(token.start[0], token.end[0] + 1))
    for node in size.nodes(source):
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
    for name, node in functions(size.parsed(source), room):
        limit = min(FUNCTION_LINES, heart.pop(node.name, FUNCTION_LINES))
        span = len(code & set(range(node.lineno, (node.end_lineno or node.lineno) + 1)))
        if span > limit:
            faults.append(f"{name} has {span} code lines, {limit} are allowed")
        public_face = any(fnmatch(name, pattern) for pattern in MANY_PARAMETERS)
        if (count := parameters(node)) > PARAMETERS and not public_face:
            faults.append(f"{name} has {count} parameters, {PARAMETERS} are allowed, then a record")
    return faults + [f"{room}.{name} is missing: its size is a rule of the house" for name in heart]


def test_sizes() -> None:
    assert [fault for room in MODULES for fault in size_faults(room, read(room))] == []


def lines(count: int, name: str = "f") -> str:
    """A function of exactly `count` code lines, padded with what must not count."""
    body = ["    x = 1"] * (count - 1)
    return "\n".join([f"def {name}():", '    """Doc', '    string."""', "", "    # why", *body, ""])


ROUND = lines(25, "play_round")


def test_the_project_stays_within_its_size() -> None:
    assert {name: figure for name, figure in size.measured().items() if figure > size.CEILINGS[name]} == {}


def test_counters_catch() -> None:
    assert size.shared_names(["class A: ...", "class B: ...\nclass A: ..."]) == ["A"]
    assert size.shared_names(["class A: ...\nclass A: ..."]) == []  # one module's own business, which mypy looks after
    assert size.helpers("def _a(): ...\ndef _b(): ...\ndef c(): _a(), _b(), _b()\ndef __len__(): ...") == (4, 1)
    assert size.arrows() > {("cli", "engine"), ("engine", "core")}


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
        ("engine.engine", "class Engine:\n    def generate(self, a, b, c, d, e, f, g, h): ...", 0),
        ("bench", "if True:\n    def f(a):\n        def g(a, b, c, d, e, f, g, h): ...", 1),
        ("decoding.speculate", ROUND, 0),
        ("decoding.speculate", lines(26, "play_round"), 1),
        ("decoding.generate", lines(21, "rounds"), 1),
        ("decoding.generate", lines(5, "other"), 1),
    ],
)
def test_size_checker_catches(room: str, source: str, faults: int) -> None:
    assert len(size_faults(room, source)) == faults


# --- tests use public names ---------------------------------------------------------------------


# Private names of third parties that tests may use, since no public one shows the same.
OTHERS_PRIVATE = {
    "_attn_implementation",  # of transformers' configurations
    "_decomp",  # torch
    "_dynamo",  # torch
    *("_exit", "_run_exitfuncs"),  # os, atexit
    "_forward_pre_hooks",  # of torch's modules
    "_get_logits_processor",  # what transformers' generate calls
    "_prefill",  # what transformers' generate calls
    "_prepare_special_tokens",  # what transformers' generate calls
    "_update_model_kwargs_for_generation",  # what transformers' generate calls
}
BY_NAME = {"setattr", "delattr", "getattr", "hasattr", "object", "patch"}
"""Functions that take the name of an attribute as text: the built-in ones, monkeypatch's and unittest.mock's."""


def is_private(name: str) -> bool:
    """Whether a name has one leading underscore; the last part counts where it is dotted."""
    return re.fullmatch(r"_[^_].*", name.rsplit(".", 1)[-1]) is not None


def privacy_faults(source: str) -> list[str]:
    """Uses of private names that belong to others: imported, as attributes, and by their names in text."""
    faults = []
    for node in size.nodes(source):
        names = list[str]()
        if isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute) and not (
            isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        ):
            names = [node.attr]
        elif isinstance(node, ast.Call) and (
            getattr(node.func, "attr", None) in BY_NAME or getattr(node.func, "id", None) in BY_NAME
        ):
            texts = (arg.value for arg in node.args if isinstance(arg, ast.Constant))
            names = [text for text in texts if isinstance(text, str)]
        line = getattr(node, "lineno", 0)
        faults += [f"line {line}: {name}" for name in names if is_private(name) and name not in OTHERS_PRIVATE]
    return faults


def lacking(source: str) -> list[str]:
    """The names that a script imports from modules of ours that do not have them."""
    imports = [node for node in size.nodes(source) if isinstance(node, ast.ImportFrom)]
    ours = [(str(node.module), one.name) for node in imports for one in node.names if "slipstream" in str(node.module)]
    known = {f"slipstream.{module}" for module in MODULES}
    return [f"{m}.{n}" for m, n in ours if f"{m}.{n}" not in known and not hasattr(import_module(m), n)]


def test_scripts_import_what_there_is() -> None:
    """Those that no test starts, too."""
    files = [
        path for folder in ("benchmarks", "examples", "packaging", "recipes") for path in (ROOT / folder).rglob("*.py")
    ]
    assert len(files) > 40
    assert [fault for path in files for fault in lacking(path.read_text(encoding="utf-8"))] == []
    assert lacking("from slipstream.files import atomic_write, gone") == ["slipstream.files.gone"]


def test_tests_use_public_names() -> None:
    found = {path.name: privacy_faults(path.read_text(encoding="utf-8")) for path in (ROOT / "tests").rglob("*.py")}
    assert {name: faults for name, faults in found.items() if faults} == {}
    assert "test_house.py" in found


@pytest.mark.parametrize(
    ("source", "faults"),
    [
        ("lookup._texts", 1),
        ("one.drafter._graphs.clear()", 1),
        ("from slipstream.decoding.speculate import _emit, play_round", 1),
        ("monkeypatch.setattr(teacher, '_save', None)", 1),
        ("monkeypatch.setattr('slipstream.files._open', None)", 1),
        ("patch.object(rows, '_slots', 2)", 1),
        ("getattr(one, '_two')", 1),
        ("self._own, cls._own", 0),
        ("os._exit(0)", 0),
        ("Path.__init__(one), one.public, say('_word')", 0),
        ("monkeypatch.setattr(teacher, 'save', '_value', raising=True)", 1),
    ],
)
def test_privacy_checker_catches(source: str, faults: int) -> None:
    assert len(privacy_faults(source)) == faults


# --- the public face ------------------------------------------------------------------------------


def face_faults(module: ModuleType) -> list[str]:
    """`__all__` must be sorted and equal to what can be imported, the modules of the house aside."""
    names: list[str] = module.__all__
    public = (name for name in dir(module) if not name.startswith("_"))
    visible = {name for name in public if not isinstance(getattr(module, name), ModuleType)}
    faults = [] if names == sorted(names) else [f"__all__ is not sorted: {names}"]
    return faults + [f"{name} is public in one place only" for name in sorted(visible ^ set(names))]


def import_without(source: str, *absent: str) -> subprocess.CompletedProcess[str]:
    """Run source in a fresh interpreter where some packages cannot be imported."""
    block = f"import gc, sys; gc.disable(); sys.modules.update(dict.fromkeys({absent!r}))\n"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", block + source]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_public_names() -> None:
    import slipstream

    assert face_faults(slipstream) == []


def test_public_names_checker_catches() -> None:
    module = ModuleType("face")
    module.__dict__.update(__all__=["b", "a", "gone"], a=1, b=2, extra=3, os=os)
    assert len(face_faults(module)) == 3
    module.__dict__.update(__all__=["a", "b", "extra"])
    assert face_faults(module) == []


SERVER = ("fastapi", "starlette", "uvicorn", "httpx", "prometheus_client", "multipart")
"""What the extra `serve` installs; pydantic comes with typer too."""


def test_the_core_needs_no_command_line_and_commands_need_no_package_of_an_extra() -> None:
    """What commands import, `batch` too, on a machine that has only what the project itself needs."""
    source = "import slipstream.engine.options, slipstream.serve.batch.direct, slipstream.serve.batch.journal"
    hub = {re.split(r"[^\w.-]", line)[0] for line in metadata.requires("huggingface_hub") or () if "extra" not in line}
    extras = [name for name in SERVER if name not in hub]  # httpx comes with the hub before it takes httpx2
    run = import_without(source, "typer", "rich", "PIL", "soundfile", "llguidance", *extras)
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
    return {*re.findall(r"^(?:\$ )?make ([a-z-]+)", fenced, re.M), *re.findall(r"`make ([a-z-]+)`", text)}


def make_targets(makefile: str) -> set[str]:
    """The commands a Makefile offers."""
    return set(re.findall(r"^([a-z-]+):", makefile, re.M))


def test_documented_commands_exist() -> None:
    targets = make_targets((ROOT / "Makefile").read_text())
    assert {"demo", "test"} <= targets
    for page in (path for path in repository_files() if path.suffix == ".md"):
        assert make_commands(page.read_text(encoding="utf-8")) <= targets, page


def test_readme_shows_the_two_commands() -> None:
    assert {"demo", "test"} <= make_commands((ROOT / "README.md").read_text(encoding="utf-8"))


def test_command_checker_catches() -> None:
    text = "We make sure.\n```sh\n$ make magic\nmake demo\n```\nand `make test`."
    assert make_commands(text) == {"magic", "demo", "test"}
    assert make_commands(text) - make_targets("demo: x ## y\n\trun\ntest:\n") == {"magic"}


# ---- benchmarks -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["benchmarks", "recipes"])
def test_programs_can_be_started(folder: str) -> None:
    """Their folder comes first on the path then: no file there may be called as a module that a library looks for."""
    names = sorted(file.stem for file in (ROOT / folder).glob("*.py"))
    code = "import importlib, sys; sys.path.insert(0, sys.argv[1]); [importlib.import_module(n) for n in sys.argv[2:]]"
    started = subprocess.run([sys.executable, "-c", code, str(ROOT / folder), *names], capture_output=True, text=True)
    assert started.returncode == 0, started.stderr
