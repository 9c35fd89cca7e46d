"""Scripts in several processes, with what torchrun tells them, but without the seconds that torchrun itself takes."""

import os
import random
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
SECONDS = 120
"""By then everything that a test starts has ended, or something waits for ever."""


def free_port() -> int:
    """A port that nobody listens at, below those that systems give to whoever asks for any."""
    while True:
        with suppress(OSError), socket.create_server(("127.0.0.1", random.randrange(10_000, 32_000))) as listener:
            return int(listener.getsockname()[1])


def start(*command: str, size: int = 2, **more: str) -> list[subprocess.Popen[str]]:
    """Start python with these arguments as every rank of a job of `size` -> the processes."""
    paths = os.pathsep.join([str(TESTS.parent / "src"), str(TESTS), os.environ.get("PYTHONPATH", "")])
    job = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **job, "PYTHONPATH": paths, "HF_HUB_DISABLE_PROGRESS_BARS": "1", **more}
    places = [{**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return [subprocess.Popen([sys.executable, *command], env=each, text=True, **pipes) for each in places]


def ended(processes: list[subprocess.Popen[str]], seconds: float = SECONDS) -> list[tuple[int, str, str]]:
    """Wait for processes -> the exit code, the output and the errors of each. Raises TimeoutExpired, and ends them."""
    found = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=seconds)
            found.append((process.returncode, out, err))
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return found
