"""Calibrates thresholds to a risk by Learn-then-Test (arXiv 2110.01052), as CALM does for exits (section 3.3 there).

Over the draw of the calibration texts, the chance that the risk of the chosen threshold is above the allowed `most` is
at most `failure`.
"""

import math
from collections.abc import Callable, Sequence


def calibrated(
    thresholds: Sequence[float], losses: Callable[[float], Sequence[float]], most: float, failure: float = 0.05
) -> float | None:
    """Return the lowest threshold whose mean loss is shown to be at most `most`; None if the first one is not.

    The thresholds are tested in order, the safest first, and testing ends at the first that is not shown to keep the
    risk (fixed sequence testing). `losses(threshold)` returns a loss from 0 to 1 for every text.
    """
    chosen = None
    for threshold in thresholds:
        if p_value(losses(threshold), most) > failure:
            break
        chosen = threshold
    return chosen


def p_value(losses: Sequence[float], most: float) -> float:
    """Return the Hoeffding-Bentkus p-value of "the mean loss is above `most`" for independent losses from 0 to 1."""
    count, mean = len(losses), sum(losses) / len(losses)
    hoeffding = math.exp(-count * _divergence(min(mean, most), most))
    bentkus = math.e * _at_most(math.ceil(round(count * mean, 9)), count, most)
    return min(1.0, hoeffding, bentkus)


def _divergence(a: float, b: float) -> float:
    """Return the relative entropy of two Bernoulli distributions with the chances a and b."""
    terms = ((a, b), (1 - a, 1 - b))
    return sum(x * math.log(x / y) for x, y in terms if x > 0)


def _at_most(most: int, count: int, chance: float) -> float:
    """Return the probability of at most `most` successes in `count` trials of probability `chance`."""
    return sum(math.comb(count, k) * chance**k * (1 - chance) ** (count - k) for k in range(most + 1))
