"""Controllers choose how many tokens to draft next: `Fixed`, `Planned`, and `Adaptive` by what it measures.

Settings are immutable; the state is passed in and out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from math import inf
from operator import mul
from types import MappingProxyType
from typing import Any, NamedTuple, cast

from slipstream.core.protocols import Controller
from slipstream.core.request import Row
from slipstream.core.round import Round, believable
from slipstream.core.values import OptionError, is_whole

FAST, SLOW = 0.94, 0.99  # how much counts keep per round: of what holds now (a row, the load), and of what lasts
WEIGHT = 6.0  # the number of tests as which what is known of all positions, or all rows, counts for a single one
ENOUGH = 3  # measurements after which a time is known: the first ones of a shape are slow
STALL = 2.0  # a time counts as at most so many times the usual one, and at least its inverse: machines stall
CREDIT = 12.0  # plain rounds that drafts may lose before they gain: a few tries, and reading the texts of a batch


class RoundKind(NamedTuple):
    """A kind of rounds with similar costs: their number of rows (the next power of two), and whether any is sampled."""

    size: int
    sampled: bool

    @staticmethod
    def of(rows: Sequence[Row]) -> RoundKind:
        return RoundKind(1 << (len(rows) - 1).bit_length(), not all(row.request.sampler.greedy for row in rows))


@dataclass(frozen=True, slots=True)
class Chances:
    """The chances that positions of a draft pass a test that all before them have passed, from counts that fade."""

    passed: tuple[float, ...] = ()
    tested: tuple[float, ...] = ()

    def at(self, most: int) -> list[float]:
        """Return the chances at positions 1 to `most`, each drawn to the mean of all (Laplace's rule of succession)."""
        mean = (sum(self.passed) + 1) / (sum(self.tested) + 2)
        known = zip(self.passed, self.tested, strict=True)
        found = [(passed + WEIGHT * mean) / (tested + WEIGHT) for passed, tested in known]
        return (found + [mean] * (most - len(found)))[:most]

    def learn(self, drafts: Sequence[tuple[int, int]]) -> Chances:
        """Return the chances after a round, of whose drafts each had so many positions, of which so many passed."""
        grow = [0.0] * (max((depth for depth, _ in drafts), default=0) - len(self.tested))
        passed, tested = ([SLOW * count for count in counts] + grow for counts in (self.passed, self.tested))
        for depth, stood in drafts:
            for position in range(min(depth, stood + 1)):
                passed[position] += position < stood
                tested[position] += 1
        return Chances(tuple(passed), tuple(tested))


@dataclass(frozen=True, slots=True)
class Time:
    """A usual time: the least of the first ones (to record a shape's program takes long), which later ones move."""

    count: int = 0
    level: float = inf

    def learn(self, seconds: float) -> Time:
        count = self.count + 1
        if count <= ENOUGH:
            return Time(count, min(self.level, seconds))
        return Time(count, self.level + (limited(seconds, self.level) - self.level) * max(1 / count, 1 - SLOW))


def limited(seconds: float, usual: float) -> float:
    return min(STALL * usual, max(usual / STALL, seconds))


@dataclass(frozen=True, slots=True)
class Learned:
    """The state of `Adaptive`: times, acceptance, and the account of what drafts have lost and gained.

    Times are divided by the `load` of the machine when they were measured, so that a gamma does not look slow because
    the machine was busy then: `times` of "draft" by the kind of the rows that draft, and of the "rest" of a round by
    the kind of all, each by the depth of the longest draft. `stands` are the chances that drafted tokens stand,
    `drafted` those that a drafter has so many, for greedy and for sampled rounds. `rows` has how many tokens more of a
    row stood, and in how many tests; `read` how much of its text the draft has read, `reading` the time and the tokens
    of that. `credit` is the time that may be lost, `wait` the one until the next attempt; `since` counts the rounds
    that drafted since a plain one.
    """

    times: Mapping[tuple[str, RoundKind], Mapping[int, Time]] = field(default_factory=dict)
    stands: Mapping[bool, Chances] = field(default_factory=dict)
    drafted: Mapping[bool, Chances] = field(default_factory=dict)
    rows: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    read: Mapping[int, int] = field(default_factory=dict)
    reading: tuple[float, float] = (0.0, 0.0)
    load: float = 1.0
    credit: float | None = None
    wait: float = 0.0
    since: int = 0

    def known(self, part: str, kind: RoundKind) -> dict[int, float]:
        times = self.times.get((part, kind), {})
        return {depth: time.level for depth, time in times.items() if time.count >= ENOUGH}

    def costs(self, kind: RoundKind, drafting: RoundKind, most: int) -> list[float]:
        """Return the times of rounds by depth, up to `most` or twice the greatest that is known.

        What more rows than ever drafted will cost is taken from fewer. In the target's pass the first depth that was
        never reached counts as free, so that it is tried: costs may rise in steps.
        """
        rest, drafts = self.known("rest", kind), self.known("draft", drafting)
        while not drafts and drafting.size > 1:
            drafting = RoundKind(drafting.size // 2, drafting.sampled)
            drafts = self.known("draft", drafting)
        depths = range(1 + min(most, max(1, 2 * max(rest))))
        return [_at(rest, depth, free=1) + _at({0: 0.0, **drafts}, depth, free=0) for depth in depths]

    def tested(self, sampled: bool) -> bool:
        return sum(self.stands.get(sampled, Chances()).tested) >= WEIGHT

    def to_read(self, row: Row) -> float:
        seconds, tokens = self.reading
        return (len(row.tokens) - self.read.get(row.index, 0)) * seconds / max(1.0, tokens)


def _at(known: Mapping[int, float], depth: int, free: int) -> float:
    """Return a time between known ones, or beyond them by their mean slope, without that of `free` tokens."""
    if depth in known:
        return known[depth]
    left, right = max(other for other in known if other < depth), min(known, key=lambda other: (other < depth, other))
    if right > depth:
        return known[left] + (known[right] - known[left]) * (depth - left) / (right - left)
    slope = max(0.0, known[left] - known[0]) / max(1, left)
    return known[left] + slope * (depth - left - free)


@dataclass(frozen=True)
class Adaptive:
    """Chooses the gamma with the most expected tokens per second by Theorem 3.8 with measured acceptance and times.

    A round emits 1 + s_1 + ... + s_gamma tokens per row, where s_i is the chance that i drafted tokens stand, and takes
    as long as such rounds took with as many rows. Where that is no faster than plain rounds, these are played, and one
    row drafts now and then: an attempt that fails is followed by so much plain time that what it lost is `budget` of
    it. All that drafts lose and gain, reading texts included, is kept in an account, which gets `budget` of the time of
    every round: nothing is drafted that could overdraw it. By these estimates decoding takes at most 1 + `budget` times
    as long as plain decoding, and `CREDIT` plain rounds. After 1 / `budget` rounds that draft, a plain one is measured.

    The choice depends on the past alone, so that the distribution of texts is the target's, but also on the clock: a
    sampled text of a seed may differ between runs. Raises ValueError for a `most` below 1, and another `budget`.
    """

    most: int = 8
    budget: float = 0.01

    def __post_init__(self) -> None:
        if self.most < 1 or not 0 < self.budget < 1:
            given = f"most={self.most}, budget={self.budget} is not possible"
            raise ValueError(f"{given}: draft 1 token or more, and give a share of the time above 0 and below 1.")

    def init(self) -> Learned:
        return Learned()

    def resume(self, state: Learned) -> Learned:
        """Return the state for new rows: what was learned about times and acceptance, and the account."""
        return replace(state, rows={}, read={})

    def gammas(self, state: Learned, rows: Sequence[Row]) -> list[int]:
        kind, nothing = RoundKind.of(rows), [0] * len(rows)
        plain = state.known("rest", kind).get(0)
        if plain is None or state.since * self.budget >= 1:
            return nothing
        credit = CREDIT * plain if state.credit is None else state.credit
        drafting = affordable = self._affordable(state, rows, credit - plain, kind.sampled)
        outlook = _Outlook.of(state, rows, drafting, self.most)
        best = outlook.best(1 + self.budget)
        worth = [row for row in drafting if outlook.pays(row, best, state.to_read(row))]
        if best and len(worth) < len(drafting):
            drafting, outlook = worth, _Outlook.of(state, rows, worth, self.most)
            best = outlook.best(1 + self.budget)
        if not best:
            if state.wait > 0:
                return nothing
            drafting, outlook = affordable, _Outlook.of(state, rows, affordable, self.most)
            best = outlook.best(0.0)
        if outlook.seconds[best] - plain + sum(map(state.to_read, drafting)) > credit:
            return nothing
        return [best if row in drafting else 0 for row in rows]

    def _affordable(self, state: Learned, rows: Sequence[Row], credit: float, sampled: bool) -> list[Row]:
        """Return the rows whose texts the draft can read within the credit, or one; one while little was tested."""
        ordered = sorted(rows, key=state.to_read)
        costs = zip(ordered, accumulate(map(state.to_read, ordered)), strict=True)
        found = [row for row, cost in costs if cost <= max(0.0, credit)] if state.tested(sampled) else []
        return found or ordered[:1]

    def update(self, state: Learned, round: Round) -> Learned:
        drafting = [row for row, gamma in zip(round.rows, round.gammas, strict=True) if gamma]
        draft, total = round.seconds["draft"], sum(round.seconds.values())
        # Also while a row does not draft: what it has shown is the less true the longer ago it was.
        rows = {index: (FAST * n, FAST * tests) for index, (n, tests) in state.rows.items()}
        learned = _acceptance(state, round, rows) if drafting else {}
        if draft >= 0 and believable(total) and believable(total - draft - round.reading):
            learned |= self._times(state, round, drafting)
        read = {**state.read, **{row.index: len(row.tokens) for row in drafting}}
        for ended in [row.index for row in round.rows if row.finish_reason]:
            rows.pop(ended, None)
            read.pop(ended, None)
        return replace(state, read=read, rows=rows, **learned)

    def _times(self, state: Learned, round: Round, drafting: Sequence[Row]) -> dict[str, Any]:
        """Return what a round's times change in the state, and in the account."""
        kind, depth = RoundKind.of(round.rows), max(round.draft.depths)
        drafts = zip(round.rows, round.tokens, round.gammas, strict=True)
        unread = sum(len(row.tokens) - len(new) - state.read.get(row.index, 0) for row, new, gamma in drafts if gamma)
        who, draft = RoundKind.of(drafting) if drafting else kind, round.seconds["draft"]
        parts = {("rest", kind): sum(round.seconds.values()) - draft - round.reading}
        parts |= {("draft", who): draft} if drafting else {}
        known = [time for part in parts if (time := state.times.get(part, {}).get(depth)) and time.count >= ENOUGH]
        usual, took, load, times = sum(time.level for time in known), sum(parts.values()), state.load, dict(state.times)
        if depth or not drafting:  # a drafter that found nothing has made neither a draft nor a plain round
            if len(known) == len(parts) and usual:
                load *= (limited(took / load, usual) / usual) ** (1 - FAST)
            for part, seconds in parts.items():
                before = times.get(part, {})
                times[part] = {**before, depth: before.get(depth, Time()).learn(seconds / load)}
        reading = state.reading
        if unread or round.reading:
            reading = SLOW * reading[0] + round.reading / load, SLOW * reading[1] + unread
        since = state.since + 1 if drafting else 0
        learned: dict[str, Any] = {"times": times, "load": load, "reading": reading, "since": since}
        now = replace(state, times=times)
        if (plain := now.known("rest", kind).get(0)) is None:
            return learned
        took = min(took / load, STALL * now.costs(kind, who, depth)[-1])
        lost = took + unread * reading[0] / max(1.0, reading[1]) - plain * sum(map(len, round.tokens)) / len(round.rows)
        credit = CREDIT * plain if state.credit is None else state.credit
        credit += self.budget * took - (lost if drafting else 0.0)
        stood = sum(round.accepted) == sum(round.gammas) or not state.tested(kind.sampled)  # few tests show nothing
        wait = state.wait - took if not drafting else 0.0 if stood else max(0.0, lost / self.budget)
        return learned | {"credit": max(-CREDIT * plain, credit), "wait": wait}


def _acceptance(state: Learned, round: Round, rows: dict[int, tuple[float, float]]) -> dict[str, Any]:
    """Return what a round's drafts change in the state, and count in `rows` what stood of them.
    The last draft of a row that ended may have been cut, and does not count."""
    sampled, drafts = RoundKind.of(round.rows).sampled, list[tuple[int, int]]()
    known, longest = state.stands.get(sampled, Chances()), state.drafted.get(sampled, Chances())
    chances = known.at(max(round.gammas))
    for row, gamma, stood in zip(round.rows, round.gammas, round.accepted, strict=True):
        if gamma and not row.finish_reason:
            surplus, tests = rows.get(row.index, (0.0, 0.0))
            tested = min(gamma, stood + 1)
            rows[row.index] = surplus + stood - sum(chances[:tested]), tests + tested
            drafts.append((gamma, stood))
    offered = longest.learn([(max(round.gammas), max(round.draft.depths))])
    return {"stands": {**state.stands, sampled: known.learn(drafts)}, "drafted": {**state.drafted, sampled: offered}}


class _Outlook(NamedTuple):
    """The expected seconds and tokens of the next round, by gamma."""

    seconds: list[float]
    tokens: list[float]

    @staticmethod
    def of(state: Learned, rows: Sequence[Row], drafting: Sequence[Row], most: int) -> _Outlook:
        kind = RoundKind.of(rows)
        costs = state.costs(kind, RoundKind(RoundKind.of(drafting or rows).size, kind.sampled), most)
        chances = state.stands.get(kind.sampled, Chances()).at(len(costs) - 1)
        deep = accumulate(state.drafted.get(kind.sampled, Chances()).at(len(costs) - 1), mul)
        steps = (share * (more - less) for share, (less, more) in zip(deep, pairwise(costs), strict=True))
        tokens = [0.0] * len(chances)
        for row in drafting:
            surplus, tests = state.rows.get(row.index, (0.0, 0.0))
            shift = surplus / (tests + WEIGHT)
            survival = accumulate((min(1.0, max(0.0, chance + shift)) for chance in chances), mul)
            tokens = [sum(pair) for pair in zip(tokens, survival, strict=True)]
        return _Outlook([*accumulate(steps, initial=costs[0])], [*accumulate(tokens, initial=float(len(rows)))])

    def speed(self, gamma: int) -> float:
        return self.tokens[gamma] / self.seconds[gamma]

    def best(self, margin: float) -> int:
        """Return the fastest gamma above 0, or 0 if it is not `margin` times as fast as plain rounds."""
        best = max(range(1, len(self.seconds)), key=self.speed)
        return best if self.speed(best) > margin * self.speed(0) else 0

    def pays(self, row: Row, gamma: int, reading: float) -> bool:
        return reading <= row.room * (1 / self.speed(0) - 1 / self.speed(gamma))


@dataclass(frozen=True)
class Fixed(Controller):
    """Chooses the same gamma in every round; 0 is plain decoding. Raises ValueError if it is negative."""

    tokens: int

    def __post_init__(self) -> None:
        if self.tokens < 0:
            raise OptionError(f"gamma={self.tokens} is not possible: it must be 0 (plain decoding) or more.")

    @property
    def most(self) -> int:
        return self.tokens

    def gammas(self, state: None, rows: Sequence[Row]) -> list[int]:
        return [self.tokens] * len(rows)


@dataclass(frozen=True)
class Planned(Controller):
    """Chooses the gamma that a plan gives for the number of rows that run together; 0 is plain decoding.

    Between two planned numbers the gamma of the greater one applies, which is the more cautious: verifying gamma + 1
    tokens costs more with more rows. Above the greatest its gamma applies too. Raises ValueError for an empty plan, a
    negative gamma, and a number of rows below 1.

    >>> Planned({1: 5, 8: 2})  # 5 tokens alone, 2 tokens for each of 2 to 8 and more rows  # doctest: +SKIP
    """

    by_rows: Mapping[int, int]

    def __post_init__(self) -> None:
        if not self.by_rows or min(self.by_rows) < 1 or min(self.by_rows.values()) < 0:
            raise ValueError(
                f"the plan {dict(self.by_rows)} is not possible: give a gamma of 0 (plain decoding) or more for each "
                "number of rows, from 1 on."
            )
        object.__setattr__(self, "by_rows", MappingProxyType(dict(sorted(self.by_rows.items()))))

    @property
    def most(self) -> int:
        return max(self.by_rows.values())

    def gammas(self, state: None, rows: Sequence[Row]) -> list[int]:
        sizes = list(self.by_rows)
        size = sizes[min(bisect_left(sizes, len(rows)), len(sizes) - 1)]
        return [self.by_rows[size]] * len(rows)


def controller(gamma: int | str | Controller, most: int | None = None) -> Controller:
    """Convert a user's gamma to a controller: a number, "auto", or a controller as it is; `most` limits "auto"."""
    if gamma == "auto":
        return Adaptive() if most is None else Adaptive(most)
    if is_whole(gamma):
        return Fixed(int(cast("int", gamma)))
    if isinstance(gamma, int | str) or not callable(getattr(gamma, "gammas", None)):
        raise OptionError(f'gamma={gamma!r} is not possible: give a number of tokens, "auto" or a controller.')
    return gamma
