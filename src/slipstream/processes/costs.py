"""Measures the cost of f and f' on this machine; the paper's model then gives the best gamma and the speed-up."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.core.draws import Purpose
from slipstream.core.stats import Stats
from slipstream.core.values import whole_number
from slipstream.processes.numbers import Numbers
from slipstream.processes.runs import Kernel
from slipstream.theory import best_gamma_by_position, expected_tokens, round_cost


@dataclass(frozen=True, slots=True)
class Costs:
    """Measured costs of f and f': `seconds` is the time of f at one state; `curve[k]`, its time at k + 1 states of a
    chain, and `c`, the time of a drafted step, are in units of it."""

    seconds: float
    c: float
    curve: tuple[float, ...]

    def verify(self, rows: int) -> float:
        return self.curve[rows - 1]

    def factor(self, stats: Stats, gamma: int) -> float:
        """Return the speed of rounds of gamma over plain simulation, by Theorem 3.8 with measured acceptance.

        Other costs of a round, such as its tests, are not counted. Raises ValueError if gamma was not measured,
        here or in `stats`.
        """
        kept = _kept(stats, gamma)
        if gamma >= len(self.curve):
            raise ValueError(f"gamma={gamma} was not measured: the curve goes up to {len(self.curve) - 1}.")
        return expected_tokens(kept) / round_cost(gamma, self.c, self.verify)

    def best_gamma(self, stats: Stats) -> int:
        """Return the fastest gamma up to the largest that was measured, here and in `stats`; 0: do not speculate."""
        most = min(len(self.curve) - 1, len(stats.drafted_by_position))
        return best_gamma_by_position(_kept(stats, most), self.c, self.verify)


def measure(target: Kernel, draft: Kernel, states: Tensor, most: int, repeats: int = 5) -> Costs:
    """Measure the costs of ONE chain, at up to `most` + 1 of `states` (n, *state): medians of `repeats` calls.
    The time of a step, of f or f', is that of a call and its draw. Raises ValueError for too few states or repeats."""
    whole_number("most", most, 1)
    whole_number("repeats", repeats, 1)
    if len(states) <= most:
        raise ValueError(f"{len(states)} states are too few: f is to be measured at up to {most + 1} at once.")
    seconds = [_seconds(target, states[: rows + 1], repeats) for rows in range(most + 1)]
    c = _seconds(draft, states[:1], repeats) / seconds[0]
    return Costs(seconds[0], c, tuple(each / seconds[0] for each in seconds))


def _seconds(kernel: Kernel, states: Tensor, repeats: int) -> float:
    times, seconds = torch.zeros(len(states), dtype=torch.long), list[float]()
    numbers = Numbers.of(0, Purpose.DRAFT, times, times, times)
    kernel(states, times)  # the first call may compile or allocate for later ones
    for _ in range(repeats):
        start = time.perf_counter()
        kernel(states, times).sample(numbers)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _kept(stats: Stats, gamma: int) -> Sequence[float]:
    kept = stats.acceptance_by_position
    if gamma > len(kept):
        raise ValueError(f"gamma={gamma} was not tried: the statistics are of rounds of {len(kept)} at most.")
    return kept[:gamma]
