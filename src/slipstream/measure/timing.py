"""Times every round of a run from outside, and lets contenders race: all run once in every lap, in a rotating order."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter
from typing import TypeVar

from slipstream.core.request import Request
from slipstream.core.round import Round
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.generate import rounds, succeeded

Runner = TypeVar("Runner")
Lap = TypeVar("Lap")
Outcome = TypeVar("Outcome")
Spread = dict[str, float]  # `median`, `min` and `max` over the laps


def race(
    runners: Sequence[Runner], laps: Iterable[Lap], run: Callable[[Runner, Lap], Outcome]
) -> Iterator[list[Outcome]]:
    """Run all runners once per lap -> the outcomes of each whole lap, in the order of `runners`.

    The first runner of a lap is the last of the next, so that a drift of the machine favours none; garbage is collected
    before each run, so that no run pays for that of another.
    """
    for number, lap in enumerate(laps):
        outcomes: dict[int, Outcome] = {}
        first = number % max(1, len(runners))
        for place in [*range(first, len(runners)), *range(first)]:
            gc.collect()
            outcomes[place] = run(runners[place], lap)
        yield [outcomes[place] for place in range(len(runners))]


def ratios(speeds: Sequence[float], baseline: Sequence[float]) -> list[float]:
    return [speed / base for speed, base in zip(speeds, baseline, strict=True)]


def spread(values: Sequence[float]) -> Spread:
    return {"median": median(values), "min": min(values), "max": max(values)}


def beats(decoder: Decoder, requests: Sequence[Request]) -> Iterator[tuple[Round, Beat]]:
    """Decode and time every round from outside: with the draft's prefill, and of the target's, only that of sources."""
    seen, last = set[int](), perf_counter()
    for round in rounds(decoder, requests):
        wall = perf_counter() - last
        new = [place for place, row in enumerate(succeeded(round.rows)) if row.index not in seen]
        seen |= {round.rows[place].index for place in new}
        read = sum(prompt_seconds(round, place) for place in new)
        sources = 0.0 if round.rows[0].request.source is None else read
        draft, target = round.seconds["draft"] + round.reading, round.seconds["target"]
        width = 1 + max(round.draft.lengths)
        yield round, Beat(len(round.rows), len(new), width, draft, target, wall - read - draft - target, sources)
        last = perf_counter()


def prompt_seconds(round: Round, place: int) -> float:
    """Return the seconds in which the target read a row's prompt, if this is the row's first round."""
    return round.rows[place].stats.seconds.get("prefill", 0.0) - round.reading / len(round.rows)


@dataclass(frozen=True)
class Beat:
    """A timed round: its rows, how many of them are new, the tokens per row that the target scored, seconds by phase.
    `rest` is everything but drafting and the target's pass: laws, verification, draws, bookkeeping. Before the round,
    the target took `sources` to read those of new rows."""

    rows: int
    new: int
    width: int
    draft: float
    target: float
    rest: float
    sources: float = 0.0

    @property
    def seconds(self) -> float:
        """The wall time of the round in seconds, without the target's prefill."""
        return self.draft + self.target + self.rest

    def scaled(self, by: float) -> Beat:
        return replace(self, **{name: by * getattr(self, name) for name in ("draft", "target", "rest", "sources")})
