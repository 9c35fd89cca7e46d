"""Handling Ctrl-C and SIGTERM for as long as a block runs."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

ENDING = (signal.SIGINT, signal.SIGTERM)
"""The signals that end a process: Ctrl-C, and what batch systems and containers send."""


@contextmanager
def handling(handler: Callable[..., Any] | signal.Handlers, *kinds: signal.Signals) -> Iterator[None]:
    """Handle signals of these kinds by `handler` inside the block; a thread other than the main one handles none."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {kind: signal.signal(kind, handler) for kind in kinds}
    try:
        yield
    finally:
        for kind, usual in before.items():
            signal.signal(kind, usual)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM within the block; they are delivered at its end, unless it raised an error."""
    came: list[tuple[int, FrameType | None]] = []
    with handling(lambda *each: came.append(each), *ENDING):
        yield
    for number, frame in came:
        usual = signal.getsignal(number)
        if callable(usual):
            usual(number, frame)
        elif usual == signal.SIG_DFL:
            signal.raise_signal(number)
