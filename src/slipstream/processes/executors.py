"""Executors, which call f at many states in parallel if it is not a batched function."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass

from torch import Tensor

from slipstream.core.values import whole_number
from slipstream.processes.laws import Laws
from slipstream.processes.rounds import Kernel


@dataclass(frozen=True, slots=True)
class Pooled:
    """A kernel that calls f for parts of the states in the workers of a pool of threads or processes.

    Threads help if f waits or releases Python's lock (torch, numpy, a simulator that is another program); for processes
    f must be picklable. The caller closes the pool. Raises ValueError for workers below 1.
    """

    kernel: Kernel
    pool: Executor
    workers: int

    def __post_init__(self) -> None:
        whole_number("workers", self.workers, 1)

    def __call__(self, states: Tensor, times: Tensor) -> Laws:
        parts = min(self.workers, len(states))
        laws = list(self.pool.map(self.kernel, states.tensor_split(parts), times.tensor_split(parts)))
        return laws[0].join(laws[1:])
