"""Races: everybody runs once in every lap, in an order that rotates, and is compared with others of the same lap."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median
from typing import TypeVar

Runner = TypeVar("Runner")
Lap = TypeVar("Lap")
Outcome = TypeVar("Outcome")

Spread = dict[str, float]
"""`median`, `min` and `max` over the laps."""


def race(
    runners: Sequence[Runner], laps: Iterable[Lap], run: Callable[[Runner, Lap], Outcome]
) -> Iterator[list[Outcome]]:
    """Run everybody once per lap -> the outcomes of each whole lap, in the order of `runners`.

    Whoever is first in a lap is last in the next, so that a drift of the machine favours nobody; garbage is collected
    before each run, so that nobody pays for another's.
    """
    for number, lap in enumerate(laps):
        outcomes: dict[int, Outcome] = {}
        first = number % max(1, len(runners))
        for place in [*range(first, len(runners)), *range(first)]:
            gc.collect()
            outcomes[place] = run(runners[place], lap)
        yield [outcomes[place] for place in range(len(runners))]


def ratios(speeds: Sequence[float], baseline: Sequence[float]) -> list[float]:
    """Speeds over the baseline's, each within its lap."""
    return [speed / base for speed, base in zip(speeds, baseline, strict=True)]


def spread(values: Sequence[float]) -> Spread:
    """Median, smallest and largest."""
    return {"median": median(values), "min": min(values), "max": max(values)}
