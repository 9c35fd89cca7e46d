"""Handling Ctrl-C and SIGTERM: in a whole command, and for as long as a block runs."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

ENDING = (signal.SIGINT, signal.SIGTERM)
"""The signals that end a process: Ctrl-C, and what batch systems and containers send."""

INTERRUPTED = 130  # the exit code after one of them
IMPORTING = "<frozen importlib._bootstrap>"
SHOW_CURSOR = "\r\x1b[2K\x1b[?25h"  # and clear the line


def end_commands() -> None:
    """Let signals of `ENDING` end this command, unless something else handles them already."""
    for kind in ENDING:
        if signal.getsignal(kind) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(kind, _end)


def _end(_: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt; while a module is imported, end the process in one line.
    Libraries drop an exception that comes while they are imported, or go on with half of a module."""
    while frame and frame.f_code.co_filename != IMPORTING:
        frame = frame.f_back
    if not frame:
        raise KeyboardInterrupt
    with suppress(Exception):  # whatever state the streams are in
        sys.stdout.flush()
        print(f"{SHOW_CURSOR if sys.stderr.isatty() else ''}slipstream: interrupted.", file=sys.stderr, flush=True)
    os._exit(INTERRUPTED)


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
