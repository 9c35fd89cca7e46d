"""Answers as JSON lines, each written as soon as it is finished."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, TextIO

from slipstream.text.jsontext import json_text


@dataclass
class Answers:
    """A stream of JSON lines, one per prompt, in the order in which they finish."""

    stream: TextIO
    written: set[int] = field(default_factory=set)

    def write(self, index: int, answer: dict[str, Any]) -> None:
        line = json_text({"index": index, **answer}, ensure_ascii=False)
        with _uninterrupted():
            self.stream.write(f"{line}\n")
            self.stream.flush()
            self.written.add(index)


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
