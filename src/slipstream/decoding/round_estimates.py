"""Estimates that a controller makes from rounds: their times, and the acceptance. Immutable, pure Python."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from slipstream.core.request import Row
from slipstream.core.round import Round

ENOUGH = 2  # measured rounds of a kind and depth, after which its time counts as known
PLAINLY = 5  # the same for plain rounds of a batch
WINDOW = 9  # samples of a kind whose median is its first level, which follows later ones slowly
FOLLOW = 0.05  # how fast the level of a kind follows new measurements
DRIFT = 0.1  # how fast the estimate of the machine's load follows them
STALL = 1.4  # a measurement counts as at most this many times the expected one, and at least its inverse
FAST, SLOW = 0.88, 0.985  # the factor by which counts fade per round: those of a row, and of all rows together
SHORTEST, LONGEST = 1e-9, 1e9  # seconds that a clock can have measured
LOADS = 1e-50, 1e50  # only ratios count, so that the load may drift, but within the range of floats
PRIOR, LEVEL_WEIGHT = 0.6, 4.0  # alpha before any round, and the number of tests as which it counts
POSITION_WEIGHT, ROW_WEIGHT = 8.0, 5.0  # the number of tests as which the mean of all positions, or of all rows, counts


def believable(seconds: float) -> bool:
    """Return whether a measured time can be true: it is not 0, negative, infinite or NaN."""
    return SHORTEST <= seconds <= LONGEST


def limited(ratio: float) -> float:
    """Return how many times the expected seconds a measurement counts as: machines stall now and then.

    Levels and the load have to follow the same ratios. If stalls moved one of them more than the other, the load would
    grow without end, and kinds that are measured often would look faster than those measured long ago.
    """
    return min(STALL, max(1 / STALL, ratio))


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds as a function of a number of tokens, from noisy samples: monotone levels, interpolated linearly.

    The level of a number of tokens is the median of its first samples, and then follows further ones. Beyond the
    greatest number that was measured, the last line is extrapolated.
    """

    samples: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    levels: Mapping[int, float] = field(default_factory=dict)
    points: tuple[tuple[int, float], ...] = ()

    def add(self, tokens: int, seconds: float) -> Curve:
        """Return the curve with one more sample."""
        samples, level = {**self.samples}, self.levels.get(tokens, 0.0)
        if len(samples.get(tokens, ())) < WINDOW:
            samples[tokens] = (*samples.get(tokens, ()), seconds)
            level = _median(samples[tokens])
        elif level:
            level *= limited(seconds / level) ** FOLLOW
        levels = {**self.levels, tokens: level}
        points = _monotone([(n, levels[n], len(samples[n])) for n in sorted(levels)])
        return Curve(samples, levels, points)

    def timed(self, tokens: int) -> int:
        """Return how many samples there are of exactly this number of tokens."""
        return len(self.samples.get(tokens, ()))

    def at(self, tokens: int) -> float:
        """Return the seconds for this number of tokens; 0 before the first sample."""
        if not self.points:
            return 0.0
        place = bisect_left(self.points, (tokens, 0.0))
        if place < len(self.points) and (place == 0 or self.points[place][0] == tokens):
            return self.points[place][1]
        left, right = (self.points[0], self.points[-1]) if place == len(self.points) else self.points[place - 1 :][:2]
        slope = (right[1] - left[1]) / max(1, right[0] - left[0])
        return right[1] + slope * (tokens - right[0])

    def scaled(self, factor: float) -> Curve:
        """Return a curve of the same points times `factor`, without samples."""
        return Curve(points=tuple((tokens, seconds * factor) for tokens, seconds in self.points))

    @property
    def tried(self) -> bool:
        """Whether the curve has a point at 1 token or more."""
        return bool(self.points) and self.points[-1][0] > 0


def _median(samples: Sequence[float]) -> float:
    """Return the median, the lower of the middle two: a first run of a shape is slow, and stalls only add time."""
    return sorted(samples)[(len(samples) - 1) // 2]


def _monotone(points: Sequence[tuple[int, float, int]]) -> tuple[tuple[int, float], ...]:
    """Convert points (tokens, seconds, weight) to the nearest that never fall: falling neighbours are averaged."""
    blocks: list[tuple[list[int], float, int]] = []
    for tokens, seconds, weight in points:
        block = ([tokens], seconds, weight)
        while blocks and blocks[-1][1] > block[1]:
            names, level, mass = blocks.pop()
            total = mass + block[2]
            block = (names + block[0], (level * mass + block[1] * block[2]) / total, total)
        blocks.append(block)
    return tuple((tokens, level) for names, level, _ in blocks for tokens in names)


UNMEASURED = Curve().add(0, 0.0)
"""The curve of what takes no time for 0 tokens, before anything was measured."""


class RoundKind(NamedTuple):
    """A kind of rounds that have similar costs: their number of rows (the next power of two), and whether any of them
    is sampled, since laws over the whole vocabulary take time."""

    size: int
    sampled: bool

    @staticmethod
    def of(rows: Sequence[Row]) -> RoundKind:
        """Return the kind of a round of these rows."""
        return RoundKind(size(len(rows)), not all(row.request.sampler.greedy for row in rows))

    def distance(self, other: RoundKind) -> tuple[bool, int]:
        """Return how different another kind is, in a form that can be compared."""
        return self.sampled != other.sampled, abs(self.size.bit_length() - other.size.bit_length())


@dataclass(frozen=True, slots=True)
class RoundCosts:
    """The seconds of a round by its kind and the depth of its longest draft; those of drafting, by the rows that draft.

    All are divided by the load of the machine when they were measured, so that a gamma does not look slow because it
    was tried last, when the machine was slower or the text longer: only ratios count here. `reading` are the seconds in
    which the draft reads a number of tokens that it has not read, of prompts or emitted without it.
    """

    draft: Mapping[RoundKind, Curve] = field(default_factory=dict)
    rest: Mapping[RoundKind, Curve] = field(default_factory=dict)  # target, laws, verification, bookkeeping
    reading: Curve = UNMEASURED
    load: float = 1.0

    def of(self, kind: RoundKind, drafting: RoundKind | None = None) -> tuple[Curve, Curve]:
        """Return the curves for a round of this kind: the seconds of drafting, and those of everything else.

        `drafting` is the kind of the rows that draft, without which all do: a target scores a batch at the width of its
        longest draft, but drafts take the time of the rows that have any.
        """
        return _grown(self.draft, drafting or kind), _find(self.rest, kind)

    def knows_plain(self, kind: RoundKind) -> bool:
        """Return whether plain rounds of this kind were measured: what is gained or lost depends on them.

        The first ones of a batch come after its prompts were read, and are slow.
        """
        return kind in self.rest and self.rest[kind].timed(0) >= (ENOUGH if kind.size == 1 else PLAINLY)

    def learn(self, round: Round, kind: RoundKind, unread: int) -> RoundCosts:
        """Return the costs after one more round of a kind, before whose drafts `unread` tokens had to be read.

        If the draft did not report how long it read, the time of such a round is only an upper limit of the cost of
        drafting. Times that cannot be true change nothing."""
        if not clocked(round):
            return self
        depth, draft = max(round.draft.depths), round.seconds["draft"]
        rest = sum(round.seconds.values()) - draft - round.reading
        load, after = self.load, self.rest.get(kind, Curve())
        if after.timed(depth) >= 3:
            load *= limited(rest / (after.at(depth) * load)) ** DRIFT
            load = min(LOADS[1], max(LOADS[0], load))
        costs = RoundCosts(self.draft, {**self.rest, kind: after.add(depth, rest / load)}, self.reading, load)
        # A drafter that found nothing has searched nevertheless.
        asked = depth or max(round.gammas)
        return costs._learn_drafting(round, asked, unread) if asked else costs

    def _learn_drafting(self, round: Round, asked: int, unread: int) -> RoundCosts:
        """Return the costs after the draft of a round, of which `asked` tokens were asked for."""
        drafting, draft = kind_that_drafts(round), round.seconds["draft"]
        own, reading, drafts = self.draft.get(drafting, UNMEASURED), self.reading, self.draft
        if unread and (round.reading or own.tried):
            seconds = round.reading or max(0.0, draft - own.at(asked) * self.load)
            reading = reading.add(size(unread), seconds / self.load * size(unread) / unread)
        if round.reading or not unread or not own.tried or draft / self.load < own.at(asked):
            drafts = {**drafts, drafting: own.add(asked, draft / self.load)}
        return replace(self, draft=drafts, reading=reading)


def kind_that_drafts(round: Round) -> RoundKind:
    """Return the kind of the rows of a round that were asked for a draft, or of all rows if none were."""
    drafting = [row for row, gamma in zip(round.rows, round.gammas, strict=True) if gamma]
    return RoundKind.of(drafting or round.rows)


def clocked(round: Round) -> bool:
    """Return whether the times of a round can be true. Drafting may take 0 seconds: a plain step has no draft."""
    draft = round.seconds["draft"]
    return 0 <= draft <= LONGEST and believable(sum(round.seconds.values()) - draft - round.reading)


def size(count: int) -> int:
    """Return the next power of two: batches of similar size, and texts of similar length, share their estimates."""
    return 1 << (count - 1).bit_length()


def _grown(curves: Mapping[RoundKind, Curve], kind: RoundKind) -> Curve:
    """Return the curve of drafts of this kind; if only fewer rows have drafted, that of the most, grown as before.

    A batch of drafts takes as long as one, or as long as all one by one: what the last increase of rows has shown goes
    on with the next one.
    """
    fewer = sorted(other.size for other in curves if other.sampled == kind.sampled and other.size < kind.size)
    if kind in curves or len(fewer) < 2:
        return _find(curves, kind)
    before, last = (curves[RoundKind(size, kind.sampled)] for size in fewer[-2:])
    tokens, more = last.points[-1][0], fewer[-1] / fewer[-2]
    growth = min(more, max(1.0, last.at(tokens) / max(before.at(tokens), 1e-9)))
    return last.scaled(growth ** math.log(kind.size / fewer[-1], more))


def _find(curves: Mapping[RoundKind, Curve], kind: RoundKind) -> Curve:
    """Return the curve of this kind; while it has at most one point, that of the nearest other, scaled to it."""
    own = curves.get(kind, Curve())
    known = [other for other, curve in curves.items() if len(curve.points) > 1]
    if len(own.points) > 1 or not known:
        return own
    near = curves[min(known, key=kind.distance)]
    if not own.points:
        return near
    tokens, seconds = own.points[0]
    return near.scaled(seconds / max(near.at(tokens), 1e-9))


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The chances that drafted tokens stand, by position, estimated from counts that fade over rounds.

    All rows together have a chance per position, shrunk to the mean of all positions. Each row has the number of tokens
    that it kept beyond that (`surplus`, in `weight` tests), which fades faster. `drafted` of `asked` drafts
    had a token.
    """

    kept: tuple[float, ...] = ()
    tested: tuple[float, ...] = ()
    rows: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    drafted: float = 1.0
    asked: float = 1.0

    @property
    def hit(self) -> float:
        """The chance that the drafter proposes at least one token."""
        return self.drafted / self.asked

    def chances(self, most: int) -> list[float]:
        """Return the chance that a token at positions 1 to `most` is kept, if all before it stand, over all rows."""
        level = (sum(self.kept) + PRIOR * LEVEL_WEIGHT) / (sum(self.tested) + LEVEL_WEIGHT)
        known = zip(self.kept, self.tested, strict=True)
        found = [(kept + POSITION_WEIGHT * level) / (tested + POSITION_WEIGHT) for kept, tested in known]
        return (found + [level] * (most - len(found)))[:most]

    def of_rows(self, running: Container[int]) -> Acceptance:
        """Return the acceptance without what was learned about single rows, except the running ones."""
        return replace(self, rows={index: counts for index, counts in self.rows.items() if index in running})

    def survival(self, row: int, chances: Sequence[float]) -> list[float]:
        """Return the chances that at least i tokens of a row stand, i = 1 .. len(chances), if they are drafted."""
        surplus, weight = self.rows.get(row, (0.0, 0.0))
        shift, left, found = surplus / (weight + ROW_WEIGHT), 1.0, []
        for chance in chances:
            left *= min(0.99, max(0.01, chance + shift))
            found.append(left)
        return found

    def learn(self, round: Round) -> Acceptance:
        """Return the acceptance after one more round that drafted.

        The last draft of rows that ended does not count: it may have been cut."""
        depths = round.draft.depths
        chances = self.chances(max(depths))
        rows, wide = dict[int, tuple[float, float]](), max(max(depths), len(self.tested))
        kept, tested = _faded(self.kept, wide, any(depths)), _faded(self.tested, wide, any(depths))
        for place, row in enumerate(round.rows):
            if row.finish_reason:
                continue
            stood, depth = round.accepted[place], depths[place]
            surplus, weight = (FAST ** (depth > 0) * part for part in self.rows.get(row.index, (0.0, 0.0)))
            for position in range(min(stood + 1, depth)):
                stands = position < stood
                kept[position] += stands
                tested[position] += 1
                surplus, weight = surplus + stands - chances[position], weight + 1
            rows[row.index] = surplus, weight
        learned = replace(self, kept=tuple(kept), tested=tuple(tested), rows=rows)
        if not any(round.gammas):
            return learned
        some = sum(map(bool, depths)) / sum(map(bool, round.gammas))
        return replace(learned, drafted=FAST * self.drafted + some, asked=FAST * self.asked + 1)


def _faded(counts: Sequence[float], wide: int, drafted: bool) -> list[float]:
    return [SLOW * count if drafted else count for count in counts] + [0.0] * (wide - len(counts))
