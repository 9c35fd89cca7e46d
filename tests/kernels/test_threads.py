"""Threads that OpenMP keeps: given back by whoever is done computing, so that other threads' may wait actively."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import slipstream
from slipstream.kernels.threads import release_threads

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads are counted as Linux lists them")


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    """Computations that are shared by two threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
    release_threads()


def threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def compute() -> None:
    torch.randn(1 << 20).exp().sum()


def test_threads_of_the_caller_end_and_come_again() -> None:
    release_threads()
    before = threads()
    compute()
    assert threads() > before
    release_threads()
    assert threads() == before
    release_threads()  # nothing is left, nothing happens
    compute()
    assert threads() > before


@pytest.mark.slow
def test_threads_end_beside_the_openmp_of_other_packages() -> None:
    """What is loaded after torch lies before it in memory."""
    pytest.importorskip("sklearn")
    script = """
import torch, sklearn.cluster
from pathlib import Path
from slipstream.kernels.threads import LOADED, release_threads
assert len(set(word for word in LOADED.read_text().split() if "libgomp" in word)) > 1, "nothing to choose from"
torch.set_num_threads(2)
torch.randn(1 << 20).exp().sum()
before = len(list(Path("/proc/self/task").iterdir()))
release_threads()
assert len(list(Path("/proc/self/task").iterdir())) < before
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_call_that_ended_keeps_no_threads() -> None:
    engine = slipstream.load(dtype="float32")
    engine.generate("def f(x):", max_new_tokens=2)
    before = threads()
    compute()
    assert threads() > before
    engine.generate("def f(x):", max_new_tokens=2)
    assert threads() == before
