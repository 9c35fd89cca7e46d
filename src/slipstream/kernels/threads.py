"""The threads that OpenMP keeps for every thread that computes."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

SOFT = 1  # omp_pause_soft of OpenMP 5.0: threads end, settings stay
LOADED = Path("/proc/self/maps")


def release_threads() -> None:
    """End the threads that GNU's OpenMP keeps for the calling thread.

    Its next computation starts them again (in some 50 microseconds). Every thread that computes has helper threads of
    its own. As soon as all of them are more than the processor has cores, none waits actively any more, and all
    computations take about twice as long. So a thread that has finished computing releases its helpers. Nothing happens
    where another OpenMP is in use.
    """
    for pause in _pauses():
        pause(SOFT)


@cache
def _pauses() -> tuple[Callable[[int], int], ...]:
    """Return `omp_pause_resource_all` of every GNU OpenMP that is loaded: torch has one, and other packages, as
    scikit-learn and sentencepiece, bring their own."""
    if not LOADED.exists():
        return ()
    libraries = sorted(set(re.findall(r"/\S*libgomp\S*\.so\S*", LOADED.read_text())))
    functions = (getattr(ctypes.CDLL(library), "omp_pause_resource_all", None) for library in libraries)
    return tuple(pause for pause in functions if pause)
