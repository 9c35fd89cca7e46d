"""Measures acceptance and costs in real rounds, on the caches that decoding uses.

Plain runs and runs of every drafter alternate text by text, so that changes of the machine's speed affect all alike. A
run of a drafter sweeps: every third round asks for the most tokens, the others for 1, 2, ... in turn. So one run
measures both the acceptance and the cost of rounds of every width.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from operator import add
from statistics import median

from slipstream.core.protocols import Controller, Drafter
from slipstream.core.request import Request, Row
from slipstream.core.round import Round
from slipstream.decoding.controllers import Fixed
from slipstream.decoding.decoder import Decoder, NoDraft
from slipstream.decoding.generate import rounds
from slipstream.measure.timing import Beat, beats, race
from slipstream.plan.predict import AcceptanceCounts, PlanCosts, between

Step = Callable[[str], None]  # a callback that receives the name of each step as it begins


@dataclass(frozen=True)
class Sweep:
    """A controller that asks for the most in every third round and for 1, 2, ... in turn in the others.
    `start` is the position in that cycle where it begins."""

    most: int
    start: int = 0

    def init(self) -> int:
        return self.start

    def gammas(self, state: int, rows: Sequence[Row]) -> list[int]:
        third, rest = divmod(state, 3)
        return [1 + (2 * third + rest - 1) % self.most if rest else self.most] * len(rows)

    def update(self, state: int, round: Round) -> int:
        return state + 1


@dataclass(frozen=True)
class PlanTask:
    """The texts to measure on, as requests, of which at most `rows` run together."""

    texts: tuple[Request, ...]
    rows: int

    def requests(self, places: Sequence[int], seed: int = 0) -> list[Request]:
        """Return the requests for some of the texts, with their seeds raised by `seed`."""
        return [replace(self.texts[place], seed=self.texts[place].seed + seed) for place in places]

    def parts(self) -> list[range]:
        """Return the texts of each call: one, or twice the batch size, so that new rows join while others run."""
        size = 1 if self.rows == 1 else 2 * self.rows
        return [range(start, min(start + size, len(self.texts))) for start in range(0, len(self.texts), size)]


class Record:
    """The measurements of one drafter during its sweep; `beats` are (number of the part, times of a round)."""

    def __init__(self, most: int, texts: int, rows: int) -> None:
        self.most, self.rows = most, rows
        self.counts = [AcceptanceCounts.blank(most) for _ in range(texts)]
        self.beats: list[tuple[int, Beat]] = []
        self.lengths: list[int] = []
        self.tokens = 0

    def take(self, round: Round, beat: Beat, part: int, places: Sequence[int]) -> None:
        if beat.rows == self.rows:
            self.beats.append((part, beat))
        self.tokens += sum(map(len, round.tokens))
        for r, row in enumerate(round.rows):
            counts = self.counts[places[row.index]]
            ended = row.finish_reason == "stop"  # what was drafted beyond the end is not tested
            counts.add(round.accepted[r] if ended else round.gammas[r], round.accepted[r])
            counts.beta, counts.positions = row.stats.beta, row.stats.tested
            if round.gammas[r] == self.most:
                self.lengths.append(round.draft.lengths[r])

    def costs(self, calm: Sequence[tuple[int, Beat]]) -> PlanCosts:
        """Return the costs of the drafter and of plain decoding, corrected for changes of the machine's speed.

        `calm` are the plain rounds. The startup cost of a new row is the median extra drafting time of the rounds in
        which rows joined.
        """
        pace = paces(calm)
        plain, ours = (
            tuple(beat.scaled(1 / pace.get(part, 1.0)) for part, beat in found) for found in (calm, self.beats)
        )
        usual = PlanCosts(self.rows, plain, ours, tuple(self.lengths) or (0,))
        known = {width: median(beat.draft for beat in group) for width, group in usual.by_width.items()}
        more = [(beat.draft - between(known, beat.width)) / beat.new for beat in ours if beat.new and known]
        return replace(usual, startup=max(0.0, median(more)) if more else 0.0)

    @property
    def tallies(self) -> list[AcceptanceCounts]:
        return [counts for counts in self.counts if any(counts.tested)]


def paces(calm: Sequence[tuple[int, Beat]]) -> dict[int, float]:
    """Return the relative slowness of the machine per part: its median plain round over the median of all parts."""
    parts: dict[int, list[float]] = {}
    for part, beat in calm:
        parts.setdefault(part, []).append(beat.seconds)
    medians = {part: median(seconds) for part, seconds in parts.items()}
    usual = median(medians.values()) if medians else 1.0
    return {part: value / usual for part, value in medians.items()}


@dataclass(frozen=True)
class Speed:
    """The amount of work done in full batches: tokens, rounds, seconds of these, and of reading sources."""

    tokens: int = 0
    rounds: int = 0
    seconds: float = 0.0
    sources: float = 0.0

    def __add__(self, other: Speed) -> Speed:
        return Speed(*map(add, astuple(self), astuple(other)))

    @property
    def per_second(self) -> float:
        return self.tokens / (self.seconds + self.sources)

    @property
    def per_round(self) -> float:
        return self.seconds / self.rounds


def sweep(
    decoder: Decoder, drafters: Sequence[Drafter], task: PlanTask, most: int, step: Step
) -> tuple[list[tuple[int, Beat]], list[Record]]:
    """Measure plain decoding and every drafter in turns -> plain rounds of full batches, and a record per drafter."""
    records = [Record(most, len(task.texts), task.rows) for _ in drafters]
    calm: list[tuple[int, Beat]] = []
    warm_up(decoder, drafters, task, most, step)
    for number, part in enumerate(task.parts()):
        requests = task.requests(part)
        gc.collect()
        step("plain")
        timed = beats(using(decoder, NoDraft(), Fixed(0), task.rows), requests)
        calm += [(number, beat) for _, beat in timed if beat.rows == task.rows]
        for record, drafter in zip(records, drafters, strict=True):
            step("acceptance and costs")
            for round, beat in beats(using(decoder, drafter, Sweep(most, 4 * number), task.rows), requests):
                record.take(round, beat, number, part)
    return calm, records


def warm_up(decoder: Decoder, drafters: Sequence[Drafter], task: PlanTask, most: int, step: Step) -> None:
    """Run plain decoding and every drafter at every width, untimed, so that memory, graphs and caches are allocated."""
    requests = task.requests(range(len(task.texts)))
    for drafter in (NoDraft(), *drafters):
        step("warm-up")
        controller = Fixed(0) if isinstance(drafter, NoDraft) else Sweep(most)
        for count, _ in enumerate(rounds(using(decoder, drafter, controller, task.rows), requests)):
            if count > 2 * most:
                break


def using(decoder: Decoder, drafter: Drafter, controller: Controller, rows: int) -> Decoder:
    return replace(decoder, drafter=drafter, controller=controller, batch_size=rows)


def speeds(decoders: Sequence[Decoder], task: PlanTask, seed: int) -> list[Speed]:
    """Decode all texts with every decoder, in turns part by part -> the speed of each in full batches."""

    def run(decoder: Decoder, part: range) -> Speed:
        timed = beats(decoder, task.requests(part, seed))
        full = [(round, beat) for round, beat in timed if beat.rows == task.rows]
        return sum((Speed(sum(map(len, round.tokens)), 1, beat.seconds, beat.sources) for round, beat in full), Speed())

    return [sum(runs, Speed()) for runs in zip(*race(decoders, task.parts(), run), strict=True)]
