"""Functions in two processes, with what torchrun tells them, but without the seconds that torchrun itself takes."""

import atexit
import os
import random
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile

from transformers.utils.logging import disable_progress_bar

from processes import OUTPUT, Command

TESTS = Path(__file__).parent
SECONDS = 120  # by then everything that a test starts has ended, or something waits for ever


def free_port() -> int:
    """A port that nobody listens at, below those that systems give to whoever asks for any."""
    while True:
        with suppress(OSError), socket.create_server(("127.0.0.1", random.randrange(10_000, 32_000))) as listener:
            return int(listener.getsockname()[1])


def forked(work: Callable[[], object], *arguments: str) -> list[tuple[int, str, str]]:
    """Run a function as both ranks of a job, in forks of what has imported all -> exit code, output, errors of each."""
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    firsts, found = [partial(_as_rank, work, job | {"RANK": rank}) for rank in "01"], []
    with TemporaryFile("w+") as leading, TemporaryFile("w+") as following:
        outs = (leading, following)
        ranks = [Command(*arguments, streams={OUTPUT: out.fileno()}, first=firsts.pop(0)) for out in outs]
        for rank, out in zip(ranks, outs, strict=True):
            with rank.stderr:
                errors, code = rank.stderr.read(), rank.wait(SECONDS)
            out.seek(0)
            found.append((code, out.read(), errors))
    return found


def _as_rank(work: Callable[[], object], job: dict[str, str]) -> None:
    os.environ.update(job)
    disable_progress_bar()
    try:
        work()
    finally:
        atexit._run_exitfuncs()  # which python 3.11 leaves out in forks
    raise SystemExit(0)
