"""Commands as processes of their own that start at once: forked from one that has imported what they need."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from multiprocessing.reduction import DupFd
from typing import Any

ERRORS = 2  # the number of stderr

forks = multiprocessing.get_context("forkserver")
forks.set_forkserver_preload(["slipstream.cli.serve", "slipstream.serve.server", "slipstream.engine.load"])


class Command:
    """`slipstream ARGUMENTS` as a process with its own stderr, in the terms of `subprocess.Popen`."""

    def __init__(self, *arguments: str) -> None:
        reading, writing = os.pipe()
        self._process = forks.Process(target=_run, args=(arguments, DupFd(writing)), daemon=True)
        self._process.start()
        os.close(writing)
        self.stderr = os.fdopen(reading, encoding="utf-8")

    @property
    def pid(self) -> int:
        """The number of the process."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._process.is_alive()

    def send_signal(self, kind: signal.Signals) -> None:
        """Send it a signal."""
        os.kill(self.pid, kind)

    def terminate(self) -> None:
        """Tell it to end."""
        self._process.terminate()

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended -> its exit code. Raises TimeoutError."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutError(f"process {self.pid} still runs after {timeout} s")
        return self._process.exitcode


def _run(arguments: tuple[str, ...], errors: Any) -> None:
    from slipstream.cli import main

    os.dup2(errors.detach(), ERRORS)
    sys.stderr = os.fdopen(ERRORS, "w", buffering=1, encoding="utf-8", closefd=False)
    sys.argv = ["slipstream", *arguments]
    main()
