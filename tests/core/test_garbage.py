"""Freed memory: a training keeps it, and does not clear it again; what rests gives it back to the system."""

import gc
import platform
import resource
import threading
from collections.abc import Callable
from contextlib import nullcontext
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from processes import forks
from slipstream.core.garbage import keep_freed_memory, uncollected


def clear(keeps: bool, answer: Connection) -> None:
    """Tell how many pages the system gives this process for twenty tensors of 64 MiB; None if it cannot keep any."""
    if keeps and not keep_freed_memory():
        return answer.send(None)
    for count in (10, 20):  # after the first ones, all pages are there
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(count):
            torch.ones(1 << 24)
    answer.send(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)


def told(work: Callable[[bool, Connection], None], how: bool) -> int:
    """What another process tells of its work."""
    ours, theirs = forks.Pipe()
    process = forks.Process(target=work, args=(how, theirs))
    process.start()
    theirs.close()
    found = ours.recv()
    process.join()
    if found is None:
        pytest.skip("this C library has no mallopt")
    return int(found)


def test_pages_are_kept() -> None:
    """Without it all are cleared anew: the control."""
    assert told(clear, True) < 2000 and told(clear, False) > 20_000


def hold(gives: bool, answer: Connection) -> None:
    """Tell how many KiB of 64 MiB this process still has after another of its threads freed all but a little of it."""
    kept = list[bytearray]()

    def work() -> None:
        pieces = [bytearray(50_000) for _ in range(1300)]
        kept.append(pieces.pop())  # the last one, below which nothing is given back by itself

    before = resident()
    thread = threading.Thread(target=work)
    with uncollected() if gives else nullcontext():
        thread.start()
        thread.join()
    answer.send(resident() - before)


def resident() -> int:
    return int(Path("/proc/self/status").read_text().partition("VmRSS:")[2].split()[0])


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc gives memory back when it is asked to")
def test_freed_memory_is_given_back() -> None:
    """Without that it stays: the control."""
    assert told(hold, True) < 10_000 and told(hold, False) > 50_000


@pytest.mark.parametrize("collects", [True, False])
def test_nothing_is_collected_in_the_block_and_what_was_set_holds_behind_it(collects: bool) -> None:
    (gc.enable if collects else gc.disable)()
    try:
        with pytest.raises(ValueError, match="in the block"), uncollected():
            assert not gc.isenabled()
            raise ValueError("in the block")
        assert gc.isenabled() is collects
    finally:
        gc.enable()
