"""The prompts on which the embedded pair is measured: functions of Python's standard library, in place of lm1b."""

import ast
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path

HELD_OUT = (
    *("calendar.py", "csv.py", "fnmatch.py", "fractions.py", "graphlib.py", "heapq.py", "json/encoder.py"),
    *("queue.py", "sched.py", "shlex.py", "tempfile.py", "textwrap.py"),
)
"""The modules that the pair was not trained on, according to its model card."""

LONGEST = 1000  # characters of a prompt: a few hundred tokens


def library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def prompts() -> list[str]:
    """Return the beginnings of the held-out modules' functions: header and docstring. Raises ValueError without any."""
    found = [text for name in HELD_OUT for text in _beginnings(library() / name)]
    if not found:
        raise ValueError(f"{library()} holds no sources of Python's standard library, which the pair is measured on.")
    return found


def _beginnings(file: Path) -> Iterator[str]:
    if not file.is_file():
        return
    source = file.read_text(encoding="utf-8")
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
            text = textwrap.dedent("".join(lines[node.lineno - 1 : node.body[0].end_lineno]))
            if len(text) <= LONGEST:
                yield text


def texts(most: int = 4_000_000) -> Iterator[str]:
    """Yield modules that the pair was trained on, about `most` characters, to count n-grams in."""
    held_out = {library() / name for name in HELD_OUT}
    size = 0
    for file in sorted(library().glob("*.py")) + sorted(library().glob("*/*.py")):
        if file in held_out or {"test", "tests", "site-packages", "dist-packages", "idle_test"} & set(file.parts):
            continue
        text = file.read_text(encoding="utf-8", errors="replace")
        size += len(text)
        if size > most:
            return
        yield text
