"""`Stats`: the counts made while decoding, and the figures computed from them, each with its denominator."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from itertools import zip_longest
from typing import Any


@dataclass
class Stats:
    """The counts of one row, or the sums over many. Tokens that were cut are neither emitted nor accepted.

    `target_calls` counts forward passes of the target after prefill; a pass that serves a batch counts once for
    each row it serves. `relaxed` and `distance` are the price of lossy rules. `seconds` are shared by the rows of a
    round in equal parts, so that sums stay true. `levels` are the counts inside a draft that is itself drafted: by
    model, with that model in the place of the target. `cached` are tokens of prompts that were not read, because their
    cache entries were taken over. `predicted` drafted tokens were copied from the request's prediction, and
    `predicted_accepted` of them were accepted. `undrafted` counts rounds without the draft requested from another
    machine, by reason: "late", "refused", "disconnected".
    """

    emitted: int = 0
    accepted: int = 0
    drafted: int = 0
    tested: int = 0
    beta: float = 0.0
    target_calls: int = 0
    cached: int = 0
    predicted: int = 0
    predicted_accepted: int = 0
    relaxed: int = 0
    distance: float = 0.0
    drafted_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    undrafted: dict[str, int] = field(default_factory=dict)
    levels: dict[str, Stats] = field(default_factory=dict)

    def __add__(self, other: Stats) -> Stats:
        return Stats(**{each.name: _sum(getattr(self, each.name), getattr(other, each.name)) for each in fields(self)})

    def spend(self, phase: str, seconds: float) -> None:
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    def count_positions(self, depth: int, accepted: int) -> None:
        """Count, for each position of a draft of this depth, one drafted token and whether it was accepted."""
        for counts, reached in ((self.drafted_by_position, depth), (self.accepted_by_position, accepted)):
            counts += [0] * (depth - len(counts))
            for position in range(reached):
                counts[position] += 1

    @property
    def alpha(self) -> float | None:
        """The mean of beta over tested positions (Corollary 3.6); None when nothing was tested."""
        return self.beta / self.tested if self.tested else None

    @property
    def draft_acceptance_rate(self) -> float | None:
        """The share of drafted tokens that were accepted. Not alpha: tokens after a rejection count as failures."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """The emitted tokens per target call, correction or bonus included; plain decoding has 1."""
        return self.emitted / self.target_calls if self.target_calls else None

    @property
    def acceptance_by_position(self) -> list[float]:
        """The acceptance rates by position; entry i-1: rounds that accepted >= i tokens / rounds that drafted >= i."""
        pairs = zip(self.accepted_by_position, self.drafted_by_position, strict=True)
        return [accepted / drafted for accepted, drafted in pairs]

    @property
    def mean_distance(self) -> float | None:
        """The mean total-variation distance of a tested position's law from the target's; 0 for lossless rules."""
        return self.distance / self.tested if self.tested else None

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def tokens_per_second(self) -> float | None:
        """The emitted tokens per second of generation, prefill excluded."""
        decode = self.total_seconds - self.seconds.get("prefill", 0.0)
        return self.emitted / decode if decode > 0 else None

    def as_dict(self) -> dict[str, Any]:
        names = (
            *("alpha", "draft_acceptance_rate", "mean_acceptance_length", "acceptance_by_position"),
            *("target_calls", "emitted", "accepted", "drafted", "tested", "cached"),
            *("predicted", "predicted_accepted", "tokens_per_second", "relaxed", "mean_distance"),
        )
        levels = {name: stats.as_dict() for name, stats in self.levels.items()}
        counted = {"undrafted": dict(self.undrafted)} if self.undrafted else {}
        figures = {name: getattr(self, name) for name in names}
        return {**figures, **counted, "seconds": dict(self.seconds), "levels": levels}


def _sum(one: Any, other: Any) -> Any:
    if isinstance(one, list):
        return [sum(pair) for pair in zip_longest(one, other, fillvalue=0)]
    if isinstance(one, dict):
        zeros = {name: type(count)() for name, count in {**one, **other}.items()}
        return {name: _sum(one.get(name, zero), other.get(name, zero)) for name, zero in zeros.items()}
    return one + other
