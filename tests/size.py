"""Counts how large the project is; `make size` prints the table, and `test_house` holds its ceilings."""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "slipstream"

# What `make size` may print at most. A change that lowers a figure lowers its ceiling in the same commit.
CEILINGS = {
    "lines in src/slipstream": 45_230,
    "lines of tests": 39_259,
    "files that name a sampling option (min_p)": 5,
    "files that name a loading option (encoder_dtype)": 7,
    "words in README": 900,
    "words in docs/": 24_666,
    "class names that mean several things": 0,
    "private helpers called once, in percent of functions": 10,
    "rooms": 22,
    "arrows between rooms": 106,
}


@cache
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


@cache
def nodes(source: str) -> list[ast.AST]:
    return list(ast.walk(parsed(source)))


def lines(*folders: Path) -> int:
    """Return the number of lines of code files in these folders."""
    files = (path for folder in folders for kind in ("*.py", "*.cpp", "*.h") for path in folder.rglob(kind))
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)


def words(*files: Path) -> int:
    return sum(len(path.read_text(encoding="utf-8").split()) for path in files)


def naming(word: str) -> int:
    """Return the number of source files in which this name stands."""
    return sum(bool(re.search(rf"\b{word}\b", path.read_text(encoding="utf-8"))) for path in SOURCE.rglob("*.py"))


def shared_names(sources: list[str]) -> list[str]:
    trees = map(nodes, sources)
    found = Counter(name for tree in trees for name in {node.name for node in tree if isinstance(node, ast.ClassDef)})
    return sorted(name for name, modules in found.items() if modules > 1)


def helpers(source: str) -> tuple[int, int]:
    """Return how many functions a module has, and how many private ones its code names just once."""
    named, functions = Counter[str](), list[str]()
    for node in nodes(source):
        if isinstance(node, ast.Name | ast.Attribute):
            named[node.id if isinstance(node, ast.Name) else node.attr] += 1
        elif isinstance(node, ast.FunctionDef):
            functions.append(node.name)
    return len(functions), sum(named[name] == 1 and re.match(r"_[a-z]", name) is not None for name in functions)


def arrows(package: Path = SOURCE) -> set[tuple[str, str]]:
    """Return the pairs of rooms (what lies directly below `package`) of which the first imports the second."""
    found = set()
    for path in package.rglob("*.py"):
        room = path.relative_to(package).parts[0].removesuffix(".py")
        for node in nodes(path.read_text(encoding="utf-8")):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("slipstream."):
                found.add((room, str(node.module).split(".")[1]))
    return {(one, other) for one, other in found if one != other}


def measured() -> dict[str, int]:
    sources = [path.read_text(encoding="utf-8") for path in sorted(SOURCE.rglob("*.py"))]
    functions, once = (sum(column) for column in zip(*map(helpers, sources), strict=True))
    between = arrows()
    figures = (
        lines(SOURCE),
        lines(ROOT / "tests", ROOT / "reproduction" / "tests"),
        naming("min_p"),
        naming("encoder_dtype"),
        words(ROOT / "README.md"),
        words(*(ROOT / "docs").rglob("*.md")),
        len(shared_names(sources)),
        round(100 * once / functions),
        len({room for arrow in between for room in arrow}),
        len(between),
    )
    return dict(zip(CEILINGS, figures, strict=True))


if __name__ == "__main__":
    for name, figure in measured().items():
        print(f"{name:52} {figure:7,d} of at most {CEILINGS[name]:7,d}")
