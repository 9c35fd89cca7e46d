"""From measured acceptance and costs to a choice. Pure Python; every formula is in docs/planning.md.

Acceptance is kept per prompt, so that a bootstrap over prompts shows how far other prompts may differ. Costs are those
of whole rounds as they really ran, by the width of the target's pass; times are in seconds.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import accumulate, zip_longest
from operator import mul
from statistics import median, quantiles
from typing import Any

from slipstream.measure.timing import Beat
from slipstream.theory import expected_tokens, longest_delay, remote_round_cost, tokens_per_round

LEVEL, REPLICATES = 0.95, 1000


@dataclass
class AcceptanceCounts:
    """Counts of accepted tokens over the rounds of one prompt.

    Entry i - 1 of `tested` counts the rounds that had room for i tokens and kept i - 1, of `kept` those of them that
    kept i; a drafter that offers fewer tokens counts as refused there. `flow_tested` and `flow_kept` count the part of
    them that came after a round that kept all it asked for. `beta` is summed over `positions` tokens.
    """

    tested: list[int]
    kept: list[int]
    beta: float = 0.0
    positions: int = 0
    flow_tested: list[int] = field(default_factory=list)
    flow_kept: list[int] = field(default_factory=list)
    flowing: bool = False  # whether the previous round kept its whole draft

    @staticmethod
    def blank(most: int) -> AcceptanceCounts:
        return AcceptanceCounts([0] * most, [0] * most, 0.0, 0, [0] * most, [0] * most)

    def add(self, room: int, accepted: int) -> None:
        for place in range(min(room, accepted + 1)):
            kept = place < accepted
            self.tested[place] += 1
            self.kept[place] += kept
            self.flow_tested[place] += self.flowing
            self.flow_kept[place] += self.flowing and kept
        self.flowing = 0 < room == accepted


@dataclass(frozen=True)
class Survival:
    """S_i = chance that at least i drafted tokens stand, i = 1..gamma, in two states of the text.

    `pause` holds after a round that refused a token (and at the start), `flow` after one that kept all it asked for.
    Easy stretches of text make the second larger. How often a round begins in flow depends on gamma, so a figure pooled
    over gammas fits none of them.
    """

    pause: tuple[float, ...]
    flow: tuple[float, ...]

    def mixed(self, gamma: int) -> list[float]:
        """Return S_1..S_gamma of an endless text decoded with gamma, with the stationary share of rounds in flow."""
        pause, flow = self.upto(gamma)
        into, leaving = pause[-1], 1 - flow[-1]
        share = into / (into + leaving) if into + leaving > 0 else 0.0
        return [min(1.0, (1 - share) * p + share * f) for p, f in zip(pause, flow, strict=True)]

    def upto(self, gamma: int) -> tuple[list[float], list[float]]:
        """Return `pause` and `flow`, cut or filled with zeros to exactly gamma entries."""
        pause, flow = ([*chances, *[0.0] * gamma][:gamma] for chances in (self.pause, self.flow))
        return pause, flow


def survival(tallies: Sequence[AcceptanceCounts]) -> list[float]:
    """Return S_i pooled over prompts and states: prod_{j<=i} kept_j / tested_j.

    That is the product-limit estimate, so rounds that were given less room count as far as they went. No independence
    of positions is assumed.
    """
    return list(accumulate(_shares(tallies), mul))


def states(tallies: Sequence[AcceptanceCounts]) -> Survival:
    """Estimate S_i in each of the two states of the text.

    Each share is drawn to the pooled one with the weight of a single round, so a rare state's estimate stays near it.
    """
    pooled = _shares(tallies)
    tested, kept = (_total(tallies, name) for name in ("tested", "kept"))
    flow_tested, flow_kept = (_total(tallies, f"flow_{name}") for name in ("tested", "kept"))
    flow = [(flow_kept[i] + pooled[i]) / (flow_tested[i] + 1) for i in range(len(pooled))]
    pause = [(kept[i] - flow_kept[i] + pooled[i]) / (tested[i] - flow_tested[i] + 1) for i in range(len(pooled))]
    return Survival(tuple(accumulate(pause, mul)), tuple(accumulate(flow, mul)))


def _shares(tallies: Sequence[AcceptanceCounts]) -> list[float]:
    pairs = zip(_total(tallies, "kept"), _total(tallies, "tested"), strict=True)
    return [kept / tested if tested else 0.0 for kept, tested in pairs]


def _total(tallies: Sequence[AcceptanceCounts], name: str) -> list[int]:
    size = max((len(tally.tested) for tally in tallies), default=0)
    counts = [getattr(tally, name) for tally in tallies]
    return [sum(column) for column in zip_longest(*counts, [0] * size, fillvalue=0)]


def emitting(survives: Survival, gamma: int, length: int, cost: Callable[[int], float]) -> tuple[float, float]:
    """Return the expected rounds and seconds for `length` tokens, when each round drafts up to gamma.

    Renewal equation: R(n) = 1 + sum_k P(k tokens kept) R(n - k - 1), R(0) = 0, in both states, and the same with
    `cost(drafted)` in place of 1. The last rounds have room for n - 1 drafted tokens only, as in decoding.
    """
    laws = [[1.0, *chances] for chances in survives.upto(gamma)]
    expected: list[list[tuple[float, float]]] = [[(0.0, 0.0)], [(0.0, 0.0)]]
    for left in range(1, length + 1):
        room = min(gamma, left - 1)
        price = cost(room)
        for chances, known in zip(laws, expected, strict=True):
            calls, seconds = 1.0, price
            for k in range(room + 1):
                chance = chances[k] - chances[k + 1] if k < room else chances[k]
                more = expected[k == room][left - k - 1]
                calls, seconds = calls + chance * more[0], seconds + chance * more[1]
            known.append((calls, seconds))
    return expected[0][length]


@dataclass(frozen=True)
class PlanCosts:
    """The measured rounds of one drafter at one number of rows, and those of plain decoding.

    `lengths` are the drafts it made when it was asked for the most; `startup` is the drafter's one-time cost of a new
    row (its prefill), beyond an ordinary round. With a `delay`, seconds there and back, the drafter is to run on
    another machine; the measured one ran here.
    """

    rows: int
    plain: tuple[Beat, ...]
    speculative: tuple[Beat, ...]
    lengths: tuple[int, ...]
    startup: float = 0.0
    delay: float | None = None

    @cached_property
    def by_width(self) -> Mapping[int, list[Beat]]:
        """The speculative rounds by width of the target's pass, without those that prefill the draft."""
        groups: dict[int, list[Beat]] = {}
        for beat in self.speculative:
            if not beat.new:
                groups.setdefault(beat.width, []).append(beat)
        return dict(sorted(groups.items()))

    @cached_property
    def step(self) -> float:
        return median(beat.seconds for beat in self.plain)

    @cached_property
    def source(self) -> float:
        """The median seconds in which the target reads the source of a row; 0 if there are none."""
        return median([beat.sources / beat.new for beat in self.plain if beat.new] or [0.0])

    @cached_property
    def single(self) -> float:
        """T(1): the median seconds of the target's pass over one token per row."""
        return median(beat.target for beat in self.plain)

    def round(self, gamma: int) -> float:
        """Return the expected seconds of a round that asks for gamma tokens; the widest row decides the width."""
        return self._expected(self.widths(gamma), "seconds")

    def lasting(self, gamma: int, kept: Survival, asked: int | None = None) -> float:
        """Return the expected seconds of a round: `round`, or with a delay those with a draft on another machine.

        A draft made ahead is right if all tokens and the bonus were guessed, that one with the chance of a first token.
        `asked` is the gamma far from a text's end, if `gamma` is smaller near it.
        """
        if self.delay is None or not gamma:
            return self.round(gamma)
        chances, drafting = kept.mixed(asked or gamma), self.draft(gamma)
        rest = max(self.round(gamma) - drafting, 1e-9)
        times, ready = (drafting / gamma, self.delay), chances[0] * chances[-1]
        return remote_round_cost(gamma, *times, ready, lambda rows: rest, self.draft(1))

    def target(self, gamma: int) -> float:
        return self._expected(self.widths(gamma), "target")

    def draft(self, gamma: int) -> float:
        return self._expected(self.widths(gamma), "draft")

    def widths(self, gamma: int) -> dict[int, float]:
        """Return width -> its chance, when every row drafts the lesser of gamma and what the drafter offers."""
        sizes = sorted(self.lengths)

        def within(length: int) -> float:
            return 1.0 if length >= gamma else (bisect_right(sizes, length) / len(sizes)) ** self.rows

        chances = {length + 1: within(length) - within(length - 1) for length in range(gamma + 1)}
        return {width: chance for width, chance in chances.items() if chance > 0}

    @cached_property
    def _medians(self) -> dict[str, dict[int, float]]:
        return {
            part: {width: median(getattr(beat, part) for beat in beats) for width, beats in self.by_width.items()}
            for part in ("seconds", "target", "draft")
        }

    def _expected(self, chances: Mapping[int, float], part: str) -> float:
        return sum(chance * between(self._medians[part], width) for width, chance in chances.items())

    def resampled(self, rng: random.Random) -> PlanCosts:
        """Return a bootstrap sample: rounds drawn with replacement, among those of the same width."""
        again = [beat for beats in self.by_width.values() for beat in rng.choices(beats, k=len(beats))]
        plain = tuple(rng.choices(self.plain, k=len(self.plain)))
        return replace(self, plain=plain, speculative=tuple(again))


def between(measured: Mapping[int, float], width: int) -> float:
    """Return the cost of a width; if it was not measured, interpolate its neighbours, or take the nearest one's."""
    if width in measured:
        return measured[width]
    below = max((known for known in measured if known < width), default=None)
    above = min((known for known in measured if known > width), default=None)
    if below is None or above is None:
        return measured[above if below is None else below]  # type: ignore[index]
    share = (width - below) / (above - below)
    return measured[below] + share * (measured[above] - measured[below])


@dataclass(frozen=True)
class SpeedPrediction:
    """A prediction of the speed at one gamma.

    `iid` is Equation 1 with the mean alpha; `tokens` is 1 + sum S_i, for endless texts; `tokens_per_call` is for texts
    of the planned length. `curve` is T(gamma + 1) / T(1), `c` the time of drafting a token over T(1), and `round` the
    time of a round over that of a plain step. `long` is tokens / round; `factor` is for the planned length, the draft's
    prefill and the reading of sources included, and lies between `low` and `high` with chance 0.95.
    """

    gamma: int
    iid: float
    tokens: float
    tokens_per_call: float
    curve: float
    c: float
    round: float
    long: float
    factor: float
    low: float = 0.0
    high: float = 0.0


@dataclass(frozen=True)
class Outlook:
    """One drafter at one number of rows: its acceptance, its costs, and a prediction for every gamma.
    Speculation is recommended only if even the low end of the best gamma's interval is above 1."""

    rows: int
    alpha: float
    alphas: tuple[float, ...]  # per prompt, sorted
    survival: tuple[float, ...]
    costs: PlanCosts
    predictions: tuple[SpeedPrediction, ...]
    longest_delay: float | None = None  # seconds at which a draft elsewhere stops being a gain

    @property
    def best(self) -> SpeedPrediction:
        return max(self.predictions, key=lambda each: each.factor)

    @property
    def worth(self) -> bool:
        return self.best.low > 1

    @property
    def gamma(self) -> int:
        return self.best.gamma if self.worth else 0

    def as_dict(self) -> dict[str, Any]:
        costs, milliseconds = self.costs, dict[str, Any]()
        for width, beats in {0: costs.plain, **costs.by_width}.items():
            phases = {name: spread([1000 * getattr(beat, name) for beat in beats]) for name in PHASES}
            milliseconds["plain" if not width else str(width)] = {"rounds": len(beats), **phases}
        once = {"startup": costs.startup, "source": costs.source, "longest_delay": self.longest_delay}
        found = {"rows": self.rows, "alpha": self.alpha, "alpha_by_prompt": spread(self.alphas)}
        found |= {"best": self.best.gamma, "survival": list(self.survival), "speculate": self.worth}
        found |= {"milliseconds_by_width": milliseconds}
        found |= {f"{name}_milliseconds": 1000 * seconds for name, seconds in once.items() if seconds is not None}
        return {**found, "predictions": [asdict(each) for each in self.predictions]}


PHASES = ("draft", "target", "rest", "seconds")


def spread(values: Sequence[float]) -> dict[str, float]:
    if len(values) < 2:
        return dict.fromkeys(("median", "quartile_1", "quartile_3"), values[0] if values else 0.0)
    first, middle, third = quantiles(values, n=4, method="inclusive")
    return {"median": middle, "quartile_1": first, "quartile_3": third}


def predict(
    tallies: Sequence[AcceptanceCounts],
    costs: PlanCosts,
    gammas: Sequence[int],
    length: float,
    seed: int = 0,
    replicates: int = REPLICATES,
) -> Outlook:
    """Predict from acceptance per prompt and costs -> the speed at every gamma, for texts of `length` tokens."""
    if len(tallies) < 2 or not costs.by_width or not costs.plain:
        raise ValueError(f"{len(tallies)} prompts with {len(costs.by_width)} kinds of rounds: a plan needs 2 prompts.")
    positions = sum(tally.positions for tally in tallies)
    alpha = sum(tally.beta for tally in tallies) / positions if positions else 0.0
    kept = states(tallies)
    points = [_point(gamma, alpha, kept, costs, round(length)) for gamma in gammas]
    sources = costs.rows * costs.source  # they take the same time with a draft
    reading = sources / (length * costs.step + sources)
    alphas = sorted(tally.beta / tally.positions for tally in tallies if tally.positions)
    # Percentiles over resampled prompts and rounds; texts' ends count as in the point.
    rng, factors, predictions = random.Random(seed), list[list[float]](), list[SpeedPrediction]()
    for _ in range(replicates):
        again, sample = states(rng.choices(tallies, k=len(tallies))), costs.resampled(rng)
        factors.append([_long(point.gamma, again, sample) * point.factor / point.long for point in points])
    tail = int(replicates * (1 - LEVEL) / 2)
    for point, column in zip(points, zip(*factors, strict=True), strict=True):
        ranked = sorted(column)
        speeds = (point.factor, ranked[tail], ranked[-1 - tail])
        factor, low, high = (1 / (reading + (1 - reading) / speed) for speed in speeds)  # Amdahl's law
        predictions.append(replace(point, factor=factor, low=low, high=high))
    limit = None
    if costs.delay is not None:
        limit = longest_delay(lambda away: max(_long(each, kept, replace(costs, delay=away)) for each in gammas))
    return Outlook(costs.rows, alpha, tuple(alphas), tuple(survival(tallies)), costs, tuple(predictions), limit)


def _point(gamma: int, alpha: float, kept: Survival, costs: PlanCosts, length: int) -> SpeedPrediction:
    alone = costs.rows == 1  # in a batch, a row that nears its end does not make the round narrower
    rounds = [costs.lasting(drafted if alone else gamma, kept, gamma) for drafted in range(gamma + 1)]
    calls, seconds = emitting(kept, gamma, length, rounds.__getitem__)
    tokens, times = expected_tokens(kept.mixed(gamma)), costs.lasting(gamma, kept) / costs.step
    return SpeedPrediction(
        gamma,
        tokens_per_round(alpha, gamma),
        tokens,
        length / calls,
        costs.target(gamma) / costs.single,
        costs.draft(gamma) / gamma / costs.single,
        times,
        tokens / times,
        length * costs.step / (seconds + costs.rows * costs.startup),
    )


def _long(gamma: int, kept: Survival, costs: PlanCosts) -> float:
    return expected_tokens(kept.mixed(gamma)) * costs.step / costs.lasting(gamma, kept)
