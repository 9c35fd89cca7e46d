"""Races: all contenders run once in every lap, in a rotating order, and are compared within the same lap."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median
from typing import TypeVar

Runner = TypeVar("Runner")
Lap = TypeVar("Lap")
Outcome = TypeVar("Outcome")

Spread = dict[str, float]
"""The `median`, `min` and `max` over the laps."""


def race(
    runners: Sequence[Runner], laps: Iterable[Lap], run: Callable[[Runner, Lap], Outcome]
) -> Iterator[list[Outcome]]:
    """Run all runners once per lap -> the outcomes of each whole lap, in the order of `runners`.

    The first runner of a lap is the last of the next, so that a drift of the machine favours none; garbage is collected
    before each run, so that no run pays for that of another.
    """
    for number, lap in enumerate(laps):
        outcomes: dict[int, Outcome] = {}
        first = number % max(1, len(runners))
        for place in [*range(first, len(runners)), *range(first)]:
            gc.collect()
            outcomes[place] = run(runners[place], lap)
        yield [outcomes[place] for place in range(len(runners))]


def ratios(speeds: Sequence[float], baseline: Sequence[float]) -> list[float]:
    """Return speeds divided by the baseline's, lap by lap."""
    return [speed / base for speed, base in zip(speeds, baseline, strict=True)]


def spread(values: Sequence[float]) -> Spread:
    """Return the median, the smallest and the largest value."""
    return {"median": median(values), "min": min(values), "max": max(values)}
