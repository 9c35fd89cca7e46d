"""Thresholds that keep a risk, by Learn-then-Test (arXiv 2110.01052), as CALM calibrates its exits (section 3.3 there).

Over the draw of the texts that it is calibrated on, the chance that the risk of the chosen threshold is above the
`most` that was allowed is at most `failure`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence


def calibrated(
    thresholds: Sequence[float], losses: Callable[[float], Sequence[float]], most: float, failure: float = 0.05
) -> float | None:
    """The lowest threshold whose mean loss is shown to be at most `most`; None if not even the first is.

    The thresholds are tested in their order, the safest first, and the first that cannot be shown to keep the risk ends
    it (fixed sequence testing). `losses`: of a threshold, a loss from 0 to 1 of every text.
    """
    chosen = None
    for threshold in thresholds:
        if p_value(losses(threshold), most) > failure:
            break
        chosen = threshold
    return chosen


def p_value(losses: Sequence[float], most: float) -> float:
    """The Hoeffding-Bentkus p-value of "the mean loss is above `most`" for independent losses from 0 to 1."""
    count, mean = len(losses), sum(losses) / len(losses)
    hoeffding = math.exp(-count * _divergence(min(mean, most), most))
    bentkus = math.e * _at_most(math.ceil(round(count * mean, 9)), count, most)
    return min(1.0, hoeffding, bentkus)


def _divergence(a: float, b: float) -> float:
    """The relative entropy of two coins."""
    terms = ((a, b), (1 - a, 1 - b))
    return sum(x * math.log(x / y) for x, y in terms if x > 0)


def _at_most(most: int, count: int, chance: float) -> float:
    """The chance of at most so many successes among `count`."""
    return sum(math.comb(count, k) * chance**k * (1 - chance) ** (count - k) for k in range(most + 1))
