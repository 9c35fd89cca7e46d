"""The bootstrap of ratios against the delta method, and its coverage in simulated texts."""

import math
import random
from collections.abc import Callable

import pytest

from reproduction import statistics
from slipstream import theory

Rounds = list[tuple[float, float]]


def texts(rng: random.Random) -> list[Rounds]:
    """(accepted, tested) of the 8 rounds of each of 40 texts, gamma = 4; each text is easy or hard."""
    found = []
    for _ in range(40):
        alpha = rng.choice((0.3, 0.9))
        kept = [next((n for n in range(4) if rng.random() >= alpha), 4) for _ in range(8)]
        found.append([(float(n), float(min(n + 1, 4))) for n in kept])
    return found


def requests(rng: random.Random) -> Rounds:
    """The sums of each text."""
    return [(sum(a for a, _ in rounds), sum(t for _, t in rounds)) for rounds in texts(rng)]


def covered(units: Callable[[random.Random], Rounds], truth: float) -> float:
    """How often 200 intervals hold the truth."""
    made = (statistics.bootstrap_ratio(units(random.Random(seed)), replicates=200) for seed in range(200))
    return sum(each.low <= truth <= each.high for each in made) / 200


def test_dependent_rounds_are_drawn_as_whole_texts() -> None:
    """Rounds of one text are alike: whole texts drawn anew cover, single rounds (the control) do not.

    Of 200 intervals that cover with chance 0.925 (40 texts are few), fewer than 0.865 do with chance 0.001.
    """
    accepted = sum(theory.tokens_per_round(alpha, 4) - 1 for alpha in (0.3, 0.9))
    truth = accepted / sum(theory.tokens_per_round(alpha, 3) for alpha in (0.3, 0.9))
    assert 0.865 <= covered(requests, truth) <= 0.99
    assert covered(lambda rng: [round for rounds in texts(rng) for round in rounds], truth) < 0.8


def test_bootstrap() -> None:
    units = requests(random.Random(7))
    estimate = statistics.bootstrap_ratio(units)
    ratio, size = sum(a for a, _ in units) / sum(t for _, t in units), sum(t for _, t in units)
    assert estimate.value == ratio  # pooled, not the mean of ratios
    delta = math.sqrt(sum((a - ratio * t) ** 2 for a, t in units)) / size  # the delta method
    assert estimate.error == pytest.approx(delta, rel=0.15)
    assert estimate.low < ratio < estimate.high
    assert estimate.high - estimate.low == pytest.approx(2 * 1.96 * delta, rel=0.2)
    assert statistics.bootstrap_ratio(units) == estimate != statistics.bootstrap_ratio(units, seed=1)
    mirrored = statistics.bootstrap_ratio([(t - a, t) for a, t in units])
    assert (1 - mirrored.high, 1 - mirrored.low) == pytest.approx((estimate.low, estimate.high))
    half = statistics.bootstrap_ratio(units, level=0.5)
    assert half.high - half.low == pytest.approx(2 * 0.6745 * delta, rel=0.2)
    assert statistics.bootstrap_ratio([(0.25, 0.5)] * 2, replicates=100) == statistics.Estimate(0.5, 0, 0.5, 0.5, 0.95)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: statistics.bootstrap_ratio([(1, 2)]), "1 units"),
        (lambda: statistics.bootstrap_ratio([(1, 2), (1, 2)], replicates=99), "99 replicates"),
        (lambda: statistics.bootstrap_ratio([(1, 2), (0, 0)]), "positive denominator"),
        (lambda: statistics.bootstrap_ratio([(1, 2), (math.nan, 1)]), "positive denominator"),
        (lambda: statistics.bootstrap_ratio([(1, 2), (1, math.inf)]), "positive denominator"),
        (lambda: statistics.bootstrap_ratio([(1, 2), (1, 2)], level=95), "level=95"),
    ],
)
def test_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
