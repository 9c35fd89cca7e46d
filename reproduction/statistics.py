"""The bootstrap of ratios, with confidence intervals."""

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure, its standard error, and its confidence interval from `low` to `high` at the given `level`."""

    value: float
    error: float
    low: float
    high: float
    level: float


def bootstrap_ratio(
    pairs: Sequence[tuple[float, float]], level: float = 0.95, replicates: int = 1000, seed: int = 0
) -> Estimate:
    """Estimate sum / sum, with a percentile interval from whole units drawn with replacement.

    Values inside a unit may depend on each other. A unit is a round, or better a request, as rounds of one text are
    similar: (accepted, tested) or (sum of betas, tested) gives alpha, (emitted, target calls) tokens per round. Biased
    by order 1/units like every ratio, and the interval is a little narrow: 0.95 covers with 0.93 at 40 units. Raises
    ValueError for fewer than 2 units, a denominator that is not positive (leave those out), or fewer than 100
    replicates.
    """
    if not 0 < level < 1:
        raise ValueError(f"level={level} is not possible: it must lie strictly between 0 and 1.")
    if len(pairs) < 2 or replicates < 100:
        raise ValueError(f"{len(pairs)} units, {replicates} replicates: at least 2 and 100 are needed.")
    if not all(0 < below < math.inf and math.isfinite(above) for above, below in pairs):
        raise ValueError("A unit without a positive denominator was given: leave out rounds that tested nothing.")
    rng = random.Random(seed)
    ratios = sorted(_pooled(rng.choices(pairs, k=len(pairs))) for _ in range(replicates))
    tail = int(replicates * (1 - level) / 2)
    return Estimate(_pooled(pairs), statistics.stdev(ratios), ratios[tail], ratios[-1 - tail], level)


def _pooled(pairs: Sequence[tuple[float, float]]) -> float:
    return sum(above for above, _ in pairs) / sum(below for _, below in pairs)
