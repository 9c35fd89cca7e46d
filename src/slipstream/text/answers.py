"""Answers as JSON lines, each written as soon as it is finished, in files that a later run can resume."""

from __future__ import annotations

import hashlib
import json
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from slipstream.files import atomic_write
from slipstream.text.jsontext import json_text

FINISHED = ("stop", "length")
"""The finish reasons of complete answers, which a resumed run keeps."""


def digest(value: Any) -> str:
    """Return a hash of a value of JSON's types, as 16 hexadecimal digits."""
    text = json_text(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass
class Answers:
    """A stream of JSON lines, one per prompt, in the order in which they finish.

    `finished` are the indices of prompts that an earlier run has answered. `digests` (one per prompt, or none) go into
    the lines, so that a later run can check that its settings and prompts are the same.
    """

    stream: TextIO
    name: str = ""
    digests: Sequence[dict[str, str]] = ()
    finished: frozenset[int] = frozenset()
    written: set[int] = field(default_factory=set)

    def write(self, index: int, answer: dict[str, Any]) -> None:
        """Write the answer to a prompt, and flush. Raises ValueError if the file cannot be written."""
        more = {"digests": self.digests[index]} if self.digests else {}
        line = json_text({"index": index, **answer, **more}, ensure_ascii=False)
        try:
            with _uninterrupted():
                self.stream.write(f"{line}\n")
                self.stream.flush()
                self.written.add(index)
        except OSError as error:
            if not self.name:
                raise
            raise ValueError(
                f"cannot write {self.name}: {error.strerror or error}. --resume goes on with what it holds."
            ) from error


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM until the block ends: a line is written and counted, or neither."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    before = {kind: signal.signal(kind, lambda *each: came.append(each)) for kind in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)
        for number, frame in came:
            then = before[signal.Signals(number)]
            if callable(then):
                then(number, frame)
            elif then == signal.SIG_DFL:
                signal.raise_signal(number)


def open_answers(path: str, digests: Sequence[dict[str, str]], resume: bool, force: bool) -> Answers:
    """Open a file of answers, to write it from the start or, with `resume`, to continue after the finished ones.

    Raises ValueError if the file exists and neither `resume` nor `force` is given, if it cannot be written, and if it
    was made with other settings or prompts.
    """
    file, kept = Path(path), list[str]()
    try:
        if file.is_file() and not force:
            if not resume:
                raise ValueError(f"{path} exists: --resume goes on with it, --force replaces it.")
            kept = _finished(file, digests)
            with atomic_write(file) as part:
                part.write_text("".join(kept), encoding="utf-8")
        stream = open(file, "a" if kept else "w", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror or error}.") from error
    return Answers(stream, path, digests, frozenset(json.loads(line)["index"] for line in kept))


def _finished(file: Path, digests: Sequence[dict[str, str]]) -> list[str]:
    """Return the lines of finished answers, without failed or interrupted ones and an incomplete last line."""
    kept: dict[int, str] = {}
    for number, line in enumerate(file.read_bytes().split(b"\n")[:-1], 1):
        try:
            answer = json.loads(line)
            index, finished = answer["index"], answer.get("finish_reason") in FINISHED
            asked = answer["digests"] if finished else None
        except (ValueError, TypeError, KeyError, AttributeError):
            raise ValueError(f"{file}:{number} is no answer of an earlier run: name another file for --out.") from None
        if not finished:
            continue
        known = isinstance(index, int) and 0 <= index < len(digests)
        for part in ("settings", "prompt"):
            if not known or not isinstance(asked, dict) or asked.get(part) != digests[index][part]:
                other = "settings" if part == "settings" else "prompts"
                raise ValueError(f"{file}:{number} was made with other {other}: give the same, or another --out file.")
        kept.setdefault(index, line.decode() + "\n")
    return list(kept.values())
