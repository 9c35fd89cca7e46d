"""Estimators of alpha with confidence intervals, and the bootstrap of ratios."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.theory import check_share


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure, its standard error, and its confidence interval from `low` to `high` at the given `level`."""

    value: float
    error: float
    low: float
    high: float
    level: float


def alpha_from_betas(betas: Sequence[float], level: float = 0.95) -> Estimate:
    """Estimate alpha as the mean of beta (Corollary 3.6), with Wilson's interval for trials of the same variance.

    Unbiased on prefixes chosen beforehand. Over positions tested in rounds it is below the text's alpha by order
    1/rounds, and more if acceptance comes in runs: the token after a full acceptance (bonus) is never tested.
    Assumes independent betas, else use `bootstrap_ratio`. Raises ValueError for fewer than 2, or one outside [0, 1].
    """
    if len(betas) < 2:
        raise ValueError(f"{len(betas)} betas were given: a standard error needs at least 2.")
    mean = math.fsum(check_share("beta", value) for value in betas) / len(betas)
    variance = statistics.variance(betas)
    size = len(betas) * (mean * (1 - mean) / variance if variance else 1.0)
    return Estimate(mean, math.sqrt(variance / len(betas)), *_wilson(mean, size, level), level)


def alpha_from_counts(accepted: int, tested: int, level: float = 0.95) -> Estimate:
    """Estimate alpha as accepted / TESTED tokens, with Wilson's interval; tokens after a refusal were not tested.

    Unbiased for a fixed number of tests; over rounds biased as `alpha_from_rounds`. accepted / DRAFTED would estimate
    (E(tokens) - 1) / gamma, below alpha if gamma > 1. Raises ValueError unless 0 <= accepted <= tested and tested >= 1.
    """
    if not 0 <= accepted <= tested or tested < 1:
        raise ValueError(f"{accepted} accepted of {tested} tested: tested must be at least 1, accepted from 0 to that.")
    value = accepted / tested
    return Estimate(value, math.sqrt(value * (1 - value) / tested), *_wilson(value, tested, level), level)


def alpha_from_rounds(accepted: Sequence[int], gammas: Sequence[int], level: float = 0.95) -> Estimate:
    """Estimate alpha by maximum likelihood of the capped geometric (section 3.1) from the tokens kept per round.

    A round adds n log(alpha), and log(1 - alpha) if n < gamma, so the maximum is accepted / (accepted + refused). Error
    from Fisher's information tested / (alpha (1 - alpha)), interval by likelihood ratio. Unbiased if every gamma is 1,
    otherwise short by Cov(estimate, tested) / E(tested): about alpha (1 - alpha) / rounds for large gamma. Assumes
    i.i.d. betas, else use `bootstrap_ratio`. Gammas may vary; a round cut by an accepted EOS has gamma = accepted.
    Raises ValueError for unequal lengths, a round outside 0 <= accepted <= gamma, or if nothing was tested.
    """
    if len(accepted) != len(gammas):
        raise ValueError(f"{len(accepted)} rounds and {len(gammas)} gammas were given: give one per round.")
    for kept, gamma in zip(accepted, gammas, strict=True):
        if not 0 <= kept <= gamma:
            raise ValueError(f"{kept} accepted of gamma={gamma} is not possible: it must be from 0 to gamma.")
    wins, losses = sum(accepted), sum(kept < gamma for kept, gamma in zip(accepted, gammas, strict=True))
    if wins + losses == 0:
        raise ValueError(f"{len(accepted)} rounds without a tested token say nothing: at least one must draft.")
    value = wins / (wins + losses)
    error = math.sqrt(value * (1 - value) / (wins + losses))
    return Estimate(value, error, *_likelihood_ratio(wins, losses, level), level)


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
    _normal_quantile(level)
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


def _normal_quantile(level: float) -> float:
    if not 0 < level < 1:
        raise ValueError(f"level={level} is not possible: it must lie strictly between 0 and 1.")
    return statistics.NormalDist().inv_cdf((1 + level) / 2)


def _wilson(mean: float, size: float, level: float) -> tuple[float, float]:
    """Return Wilson's score interval for a share of `size` independent trials."""
    z = _normal_quantile(level)
    weight = z * z / size
    centre = (mean + weight / 2) / (1 + weight)
    half = math.sqrt(weight * (mean * (1 - mean) + weight / 4)) / (1 + weight)
    return min(mean, max(0.0, centre - half)), max(mean, min(1.0, centre + half))  # against rounding at the ends


def _likelihood_ratio(wins: int, losses: int, level: float) -> tuple[float, float]:
    """Return the interval of alphas whose log likelihood is within z^2 / 2 of the maximum."""
    drop = _normal_quantile(level) ** 2 / 2
    value = wins / (wins + losses)

    def outside(alpha: float) -> bool:
        gap = wins * math.log(value / alpha) if wins else 0.0
        return gap + (losses * math.log((1 - value) / (1 - alpha)) if losses else 0.0) > drop

    def edge(beyond: float) -> float:
        inside = value
        for _ in range(60):
            middle = (inside + beyond) / 2
            inside, beyond = (inside, middle) if outside(middle) else (middle, beyond)
        return inside

    return edge(0.0) if wins else 0.0, edge(1.0) if losses else 1.0
