"""Memory that a training keeps: what is freed is not given back to the system, and not cleared again."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
import torch
from slipstream.training.memory import keep_freed_memory

if sys.argv[1] == "kept" and not keep_freed_memory():
    print("impossible")
    raise SystemExit
for count in (10, 20):  # after the first ones, all pages are there
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(count):
        torch.ones(1 << 24)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def pages_cleared(how: str) -> int:
    """The pages that the system gives a process which makes a tensor of 64 MiB twenty times."""
    found = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True).stdout
    if found.strip() == "impossible":
        pytest.skip("this C library has no mallopt")
    return int(found)


def test_pages_are_kept() -> None:
    """Without it all are cleared anew: the control."""
    assert pages_cleared("kept") < 2000 and pages_cleared("returned") > 20_000
