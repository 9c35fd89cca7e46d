"""The paper's formulas: tokens per round, walltime, operations, best and oracle gamma, from alpha, c and gamma.

Pure Python. Numbers of equations, theorems and sections are those of arXiv 2211.17192. p is the target's law and q the
draft's, each a sequence with one probability per token. Time is counted in target steps: one step is T(1), a run of
the target over one new token. A factor above 1 is a gain in time, one below 1 a saving in operations or reads.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from operator import mul

Probabilities = Sequence[float]

Curve = Callable[[int], float]
"""The measured cost of one target run: rows -> T(rows) / T(1), for rows = gamma + 1 scored at once."""

SUM_TOLERANCE = 1e-4  # a float32 softmax over a large vocabulary does not sum to one exactly
LIMIT = 256  # the largest gamma that is tried by default


def distance(p: Probabilities, q: Probabilities) -> float:
    """Return D_LK(p, q) = sum_x |p(x) - M(x)|, M = (p + q) / 2 (Definition 3.2): total variation, in [0, 1].

    Symmetric, 0 iff p = q, 1 iff the supports are disjoint (Corollary 3.4). Raises ValueError unless both are laws
    over one vocabulary.
    """
    _check_laws(p, q)
    return min(1.0, math.fsum(abs(x - y) for x, y in zip(p, q, strict=True)) / 2)


def beta(p: Probabilities, q: Probabilities) -> float:
    """Return beta = sum_x min(p(x), q(x)) = 1 - D_LK(p, q) (Theorem 3.5, Lemma 3.3): the chance that x ~ q is kept.
    Its mean over prefixes is alpha (Corollary 3.6). Raises ValueError unless both are laws over one vocabulary."""
    return lenient_beta(p, q, 1.0)


def lenient_beta(p: Probabilities, q: Probabilities, lenience: float) -> float:
    """Return alpha_l = sum_x min(p(x) / l, q(x)) at one prefix (section A.5): not lossless for l < 1.
    Raises ValueError unless 0 < l <= 1 and both are laws over one vocabulary."""
    _check_laws(p, q)
    if not 0 < lenience <= 1:
        raise ValueError(f"lenience={lenience} is not possible: it must be above 0 and at most 1 (lossless).")
    return min(1.0, math.fsum(min(x / lenience, y) for x, y in zip(p, q, strict=True)))


def tokens_per_round(alpha: float, gamma: float) -> float:
    """Return E(tokens) = (1 - alpha^(gamma+1)) / (1 - alpha) (Equation 1), correction or bonus included.

    It lies between 1 and gamma + 1, and is exact if the betas are independent with mean alpha. gamma = math.inf gives
    1 / (1 - alpha), the limit for a draft without cost (section 3.6). Raises ValueError unless 0 <= alpha <= 1 and
    gamma is a whole number or infinite.
    """
    check_share("alpha", alpha)
    if not (gamma == math.inf or (gamma >= 0 and gamma == int(gamma))):
        raise ValueError(f"gamma={gamma} is not possible: it must be a whole number from 0 up, or infinite.")
    if gamma <= 64:  # term by term: no cancellation near alpha = 1, and gamma = 0 gives exactly 1
        return math.fsum(alpha**power for power in range(int(gamma) + 1))
    if alpha in (0, 1):
        return gamma + 1.0 if alpha else 1.0
    return -math.expm1((gamma + 1) * math.log(alpha)) / (1 - alpha)


def survival(betas: Iterable[float]) -> list[float]:
    """Return the chances that at least i drafted tokens stand, i = 1..gamma: products of acceptance by position.

    `betas` are chances in [0, 1], each given that all positions before it were kept (Definition 3.1 without its
    i.i.d. assumption). Raises ValueError for one outside.
    """
    chances = list(betas)
    for chance in chances:
        check_share("beta", chance)
    return list(accumulate(chances, mul))


def expected_tokens(kept: Iterable[float]) -> float:
    """Return tokens per round, correction or bonus included: 1 + sum_i P(at least i drafted tokens stand).

    Needs no independence: `kept` is the output of `survival`, or the measured acceptance by position. alpha^i for
    i = 1..gamma gives Equation 1. Raises ValueError for a chance outside [0, 1].
    """
    return 1.0 + math.fsum(check_share("chance", chance) for chance in kept)


def flat(rows: int) -> float:
    """Return 1, as the paper assumes: a target run costs one step, however many rows it scores."""
    return 1.0


def round_cost(gamma: int, c: float, verify: Curve = flat) -> float:
    """Return a round's time in target steps: T(gamma+1)/T(1) + gamma c, as in Theorem 3.8 with a measured curve.

    c is the time of a draft step over T(1) (Definition 3.7). `verify(1)` is 1 by definition. Raises ValueError unless
    gamma is a whole number from 0 up, c >= 0, and the curve gives positive costs.
    """
    _check_gamma(gamma)
    _check_cost("c", c)
    if not 0 < (target := verify(gamma + 1)) < math.inf:
        raise ValueError(f"verify({gamma + 1})={target} is not possible: T(rows)/T(1) must be positive and finite.")
    return target + gamma * c


def walltime_factor(alpha: float, gamma: int, c: float, verify: Curve = flat) -> float:
    """Return the speed over plain decoding: (1 - alpha^(gamma+1)) / ((1 - alpha)(gamma c + 1)) (Theorem 3.8).

    With a measured curve, T(gamma+1)/T(1) replaces the 1 of the denominator. Long outputs and i.i.d. betas are
    assumed; without the latter use `expected_tokens(...) / round_cost(...)`. Raises ValueError as these two do.
    """
    return tokens_per_round(alpha, gamma) / round_cost(gamma, c, verify)


def remote_round_cost(
    gamma: int, c: float, delay: float, ready: float, verify: Curve = flat, single: float | None = None
) -> float:
    """Return a round's time, in target steps, if its draft is made on a machine with a round-trip delay of `delay`.

    While the target verifies, that machine continues as if all tokens stood: it guesses the bonus token and drafts
    gamma more, token by token, in (gamma + 1) `single`: the time of a draft step that is made alone, which may be more
    than that of one among gamma (None: c, the same). With chance `ready` the guess is right, and the target waits only
    for the part of that time that T(gamma+1)/T(1) + delay do not cover; otherwise gamma tokens are drafted again, after
    on average half a step to finish the step in progress, if one is. `delay` is in target steps, as all times are; with
    `ready` 0 no guess is ever right.
    Raises ValueError as `round_cost` does, and for a negative delay or a chance outside [0, 1].
    """
    check_share("ready", ready)
    target = round_cost(gamma, 0.0, verify) + (_check_cost("delay", delay) if gamma else 0.0)
    alone = _check_cost("c", c) if single is None else _check_cost("single", single)
    left = max(0.0, (gamma + 1) * alone - target) if gamma else 0.0
    anew = gamma * c + (alone / 2 if left else 0.0)
    return target + ready * min(left, anew) + (1 - ready) * anew


def remote_factor(alpha: float, gamma: int, c: float, delay: float, verify: Curve = flat) -> float:
    """Return `walltime_factor` for a draft with a round-trip delay of `delay` target steps: what it drafts ahead is
    right with chance alpha^(gamma+1), as gamma tokens and the bonus have to be. Raises ValueError as
    `remote_round_cost` does."""
    ready = check_share("alpha", alpha) ** (gamma + 1)
    return tokens_per_round(alpha, gamma) / remote_round_cost(gamma, c, delay, ready, verify)


def longest_delay(gain: Callable[[float], float]) -> float:
    """Return the delay at which a falling speed-up, `gain(delay)`, reaches 1; 0 if it never exceeds 1.
    Found by bisection, to one part in a million of the answer; the unit is that of `gain`."""
    if gain(0.0) <= 1:
        return 0.0
    low, high = 0.0, 1.0
    while gain(high) > 1 and high < 1e6:
        low, high = high, 2 * high
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if gain(middle) > 1 else (low, middle)
    return low


def operations_factor(alpha: float, gamma: int, c_hat: float) -> float:
    """Return operations over those of plain decoding: (1 - alpha)(gamma c_hat + gamma + 1) / (1 - alpha^(gamma+1)).

    Theorem 3.11. c_hat is a draft's operations per token over the target's (Definition 3.10). Raises ValueError
    unless 0 <= alpha <= 1, gamma is a whole number from 0 up, and c_hat >= 0.
    """
    _check_gamma(gamma)
    return (gamma * _check_cost("c_hat", c_hat) + gamma + 1) / tokens_per_round(alpha, gamma)


def guaranteed_factor(alpha: float, c: float) -> float:
    """Return the least factor of the best gamma: (1 + alpha) / (1 + c), its value at gamma = 1 (Corollary 3.9), or 1.

    It is above 1 where alpha > c: just there some gamma is faster than plain decoding. For a flat verify cost.
    Raises ValueError unless 0 <= alpha <= 1 and c >= 0.
    """
    return (1 + alpha) / (1 + c) if check_share("alpha", alpha) > _check_cost("c", c) else 1.0


def best_gamma(alpha: float, c: float, limit: int = LIMIT, verify: Curve = flat) -> int:
    """Return the gamma in 0..limit with the largest `walltime_factor` (section 3.5); 0 = do not speculate.

    Every gamma is tried, as a measured curve may have steps. Ties within 1e-12 go to the smaller. Raises ValueError
    unless 0 <= alpha <= 1, c >= 0, limit is a whole number from 0 up, and the curve gives positive costs.
    """
    check_share("alpha", alpha)
    _check_gamma(limit, "limit")
    return _argmax((alpha**i for i in range(1, limit + 1)), c, verify)


def best_gamma_by_position(kept: Sequence[float], c: float, verify: Curve = flat) -> int:
    """Return the best gamma without i.i.d. betas; kept[i-1] is the chance that at least i tokens stand.

    The greatest gamma tried is len(kept). Raises ValueError for a chance outside [0, 1], c < 0, or a curve that does
    not give positive costs.
    """
    return _argmax((check_share("chance", chance) for chance in kept), c, verify)


def _argmax(kept: Iterable[float], c: float, verify: Curve) -> int:
    """Return the gamma with the largest tokens per time, 0 if plain decoding is fastest.
    kept[i - 1] is the chance that at least i drafted tokens stand; ties go to the smaller gamma."""
    best, top, tokens = 0, 1.0, 1.0  # plain decoding
    _check_cost("c", c)
    for gamma, chance in enumerate(kept, 1):
        tokens += chance
        factor = tokens / round_cost(gamma, c, verify)
        if factor > top * (1 + 1e-12):  # a gain within rounding does not count
            best, top = gamma, factor
    return best


def oracle_factor(alpha: float, c: float) -> float:
    """Return the walltime factor if only tokens that are kept were drafted (section 3.5): 1 / (1 - alpha (1 - c)).

    It makes 1 / (1 - alpha) tokens, `tokens_per_round(alpha, inf)`, at a cost of 1 + c alpha / (1 - alpha) target
    steps: the target still runs once (footnote 4). At c >= 1 nothing is drafted. Raises ValueError unless
    0 <= alpha <= 1 and c >= 0.
    """
    lost = 1 - check_share("alpha", alpha) * (1 - min(1.0, _check_cost("c", c)))
    return 1 / lost if lost > 0 else math.inf


def oracle_gain(alpha: float, c: float, limit: int = LIMIT) -> float:
    """Return the gain of the oracle's gamma over the best fixed one (section 3.5), for a flat verify cost; 0.07 is 7 %.
    Raises ValueError unless 0 <= alpha <= 1, c >= 0, and limit is a whole number from 0 up."""
    return oracle_factor(alpha, c) / walltime_factor(alpha, best_gamma(alpha, c, limit), c) - 1


def _check_laws(p: Probabilities, q: Probabilities) -> None:
    if len(p) != len(q):
        raise ValueError(f"p has {len(p)} entries and q {len(q)}: both must cover the same vocabulary.")
    for name, law in (("p", p), ("q", q)):
        if not all(x >= 0 for x in law) or not abs(math.fsum(law) - 1) <= SUM_TOLERANCE:
            raise ValueError(f"{name} is no distribution: it must be >= 0 and sum to 1, not {math.fsum(law):g}.")


def check_share(name: str, value: float) -> float:
    if not 0 <= value <= 1:
        raise ValueError(f"{name}={value} is not possible: it must lie between 0 and 1.")
    return value


def _check_gamma(value: int, name: str = "gamma") -> None:
    if not (0 <= value < math.inf and value == int(value)):
        raise ValueError(f"{name}={value} is not possible: it must be a whole number from 0 up.")


def _check_cost(name: str, value: float) -> float:
    if not 0 <= value < math.inf:
        raise ValueError(f"{name}={value} is not possible: it must be 0 or more, and finite.")
    return value
