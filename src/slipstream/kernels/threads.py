"""How many threads compute together, and the threads that OpenMP keeps for every thread that computes."""

import ctypes
import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from itertools import product
from pathlib import Path

import torch

from slipstream.core.values import whole_number

MOST = 64  # threads that anyone may ask for, however few processors there are
SOFT = 1  # omp_pause_soft of OpenMP 5.0: threads end, settings stay
LOADED = Path("/proc/self/maps")
CHOSEN = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""The variables by which users choose the number of threads before torch is loaded."""

CONTROLLERS = {"cgroup": "cpu", "cgroup2": ""}
"""The name under which a process's control group is listed, by the type of the file system that shows its quota."""


def use_threads(threads: int | None = None) -> None:
    """Let torch compute with `threads` threads; without a number, with no more than this process has cores for.

    Torch's number is a setting of the process, and follows the affinity, but no quota. It is lowered once, when this is
    first called; then, and where a variable of `CHOSEN` is set, the user has the last word. Raises ValueError for a
    number that is not possible.
    """
    _lower_threads()
    if threads is not None:
        torch.set_num_threads(whole_number("threads", threads, 1, max(MOST, os.cpu_count() or 1)))


@cache
def _lower_threads() -> None:
    cores = cores_for_us()
    if torch.get_num_threads() > cores and not any(name in os.environ for name in CHOSEN):
        torch.set_num_threads(cores)


def cores_for_us(root: Path = Path("/")) -> int:
    """Return how many cores this process may keep busy, at least 1: those of its affinity, and what its quota allows.

    The quota is the smallest one of its control group and of those around it, in the files under `root`; 1.5 cores
    count as 2, and 1.4 as 1.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.floor(min([cores, *_quotas(root)]) + 0.5))


def _quotas(root: Path) -> Iterator[float]:
    """Yield the quotas, in cores, of this process's control groups of versions 1 and 2 and of those around them."""
    try:
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
        groups = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
    except OSError:  # not Linux
        return
    paths = {name: Path(path) for _, names, path in groups for name in names.split(",")}
    for mount in mounts:
        place, _, (kind, *about) = (part.split() for part in mount.partition(" - "))
        path = paths.get(CONTROLLERS[kind]) if kind in CONTROLLERS else None
        if path is None or (kind == "cgroup" and "cpu" not in about[-1].split(",")):
            continue
        shown, folder = place[3], root / place[4].lstrip("/")  # a container may see only its own part of the tree
        own = path.relative_to(shown) if path.is_relative_to(shown) else Path()
        # The files of both versions, in every group of the tree.
        for group, names in product((own, *own.parents), (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"))):
            with suppress(OSError):
                quota, period = " ".join((folder / group / name).read_text() for name in names).split()
                if quota not in ("max", "-1"):
                    yield int(quota) / int(period)


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
