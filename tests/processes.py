"""Commands as processes of their own that start at once: forked from one that has imported what they need."""

import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Mapping
from multiprocessing.reduction import DupFd
from typing import Any

INPUT, OUTPUT, ERRORS = range(3)  # the numbers of the standard streams

forks = multiprocessing.get_context("forkserver")
forks.set_forkserver_preload(["slipstream.cli.serve", "slipstream.serve.server", "slipstream.engine.load"])


class Command:
    """`slipstream ARGUMENTS` as a process with its own stderr, in the terms of `subprocess.Popen`.

    `streams` are files for its standard streams, by their numbers; `first` is called before the command.
    """

    def __init__(
        self, *arguments: str, streams: Mapping[int, int] | None = None, first: Callable[[], object] = bool
    ) -> None:
        reading, writing = os.pipe()
        files = {number: DupFd(file) for number, file in {ERRORS: writing, **(streams or {})}.items()}
        self._process = forks.Process(target=_run, args=(arguments, files, first), daemon=True)
        self._process.start()
        os.close(writing)
        self.stderr = os.fdopen(reading, encoding="utf-8")

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.is_alive()

    def send_signal(self, kind: signal.Signals) -> None:
        os.kill(self.pid, kind)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended -> its exit code. Raises TimeoutError."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutError(f"process {self.pid} still runs after {timeout} s")
        return self._process.exitcode


def _run(arguments: tuple[str, ...], files: dict[int, Any], first: Callable[[], object]) -> None:
    from slipstream.cli import main

    gc.freeze()  # what the server of forks has imported needs no look
    os.setsid()
    for number, file in files.items():
        os.dup2(file.detach(), number)
    if INPUT in files:
        sys.stdin = os.fdopen(INPUT, encoding="utf-8", closefd=False)
    sys.stdout = os.fdopen(OUTPUT, "w", buffering=1, encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(ERRORS, "w", buffering=1, encoding="utf-8", closefd=False)
    sys.argv = ["slipstream", *arguments]
    first()
    main()
