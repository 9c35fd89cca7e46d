"""The processor's threads that OpenMP keeps for whoever computes."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

SOFT = 1  # omp_pause_soft of OpenMP 5.0: threads end, settings stay
LOADED = Path("/proc/self/maps")


def release_threads() -> None:
    """End the threads that GNU's OpenMP keeps for the calling thread; its next computation starts them anew (in some
    50 microseconds).

    Every thread that computes has helpers of its own, and as soon as all of them together are more than the processor
    has cores, none waits actively any more: whatever runs then takes about twice as long. So a thread that is done
    computing gives its helpers back. Nothing happens where another OpenMP is in use.
    """
    if pause := _pause():
        pause(SOFT)


@cache
def _pause() -> Callable[[int], int] | None:
    """`omp_pause_resource_all` of the library that torch has loaded."""
    if not LOADED.exists():
        return None
    found = re.search(r"/\S*libgomp\S*\.so\S*", LOADED.read_text())
    return getattr(ctypes.CDLL(found[0]), "omp_pause_resource_all", None) if found else None
