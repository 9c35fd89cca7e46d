"""`Guarded`, a controller for large batches that limits the time lost by speculation to a share of the total."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from slipstream.core.protocols import Controller, Resumes
from slipstream.core.request import Row
from slipstream.core.round import Round
from slipstream.decoding.adaptive import Adaptive
from slipstream.decoding.round_estimates import Curve, clocked, size


@dataclass(frozen=True, slots=True)
class Purse:
    """The state of `Guarded`: the inner controller's state, the seconds of plain rounds by batch size, the seconds that
    may be lost (`left`), how many rows may draft in the next attempt (`pilots`), and the plain rounds that the last one
    lost (`price`)."""

    inside: Any
    plain: dict[int, Curve] = field(default_factory=dict)
    left: float = 0.0
    pilots: int = 1
    price: float = 1.0


@dataclass(frozen=True)
class Guarded:
    """Uses another controller's gammas below `crowd` rows; from there on only while there are seconds left to lose.

    In a large batch a plain round serves all rows at nearly the price of one, and a draft model has to read the texts
    of all rows before it can draft: one bad attempt may cost more than speculation ever wins back. All time counts
    here, that of reading texts too, except the time in which the target reads prompts. A round loses the time by which
    it exceeds plain rounds of this batch size for as many tokens. The purse for losses begins empty, gets `share` of
    the time of every round, and holds at most `most_steps` plain rounds. Nothing is drafted until it holds as much as
    the previous attempt lost. The first attempt drafts for one row, each further one for twice as many, so that none
    loses much more than the one before.

    All of this depends on older rounds alone, before anything is drafted, so that every choice is exact. How many
    tokens to verify must never depend on the drafted tokens themselves: that gives another law.

    Raises ValueError for a `crowd` below 2, a `share` outside 0 to 1, or a negative `most_steps`.
    """

    inner: Controller = field(default_factory=Adaptive)
    crowd: int = 16
    share: float = 0.015
    most_steps: float = 4.0

    def __post_init__(self) -> None:
        if self.crowd < 2 or not 0 <= self.share <= 1 or not self.most_steps >= 0:
            raise ValueError(
                f"crowd={self.crowd}, share={self.share}, most_steps={self.most_steps} is not possible: a crowd has 2 "
                "or more rows, a share is 0 to 1, and a purse holds 0 or more steps."
            )

    @property
    def most(self) -> int:
        """The greatest gamma of the inner controller."""
        return self.inner.most

    def init(self) -> Purse:
        """Return the state before any round: no times are known, and no seconds may be lost."""
        return Purse(self.inner.init())

    def resume(self, state: Purse) -> Purse:
        """Return the state for new rows: the purse and the times that were measured, and what the inner one keeps."""
        inner = self.inner
        return replace(state, inside=inner.resume(state.inside) if isinstance(inner, Resumes) else inner.init())

    def gammas(self, state: Purse, rows: Sequence[Row]) -> list[int]:
        """Return the inner controller's gammas for as many rows as may draft, and 0 for the others."""
        if len(rows) < self.crowd:
            return list(self.inner.gammas(state.inside, rows))
        plain = state.plain.get(size(len(rows)), Curve())
        if not plain.points or state.left < min(state.price, self.most_steps) * plain.at(0):
            return [0] * len(rows)
        chosen = self.inner.gammas(state.inside, rows)
        drafting = [place for place, gamma in enumerate(chosen) if gamma][: state.pilots]
        return [gamma if place in drafting else 0 for place, gamma in enumerate(chosen)]

    def update(self, state: Purse, round: Round) -> Purse:
        """Return the state after a round: its share added to the purse, its loss subtracted, plain seconds stored."""
        state = replace(state, inside=self.inner.update(state.inside, round))
        rows = len(round.rows)
        if rows < self.crowd or not clocked(round):
            return state
        key, drafted = size(rows), any(round.gammas)
        took, plain = sum(round.seconds.values()), state.plain.get(key, Curve())
        if not drafted:
            plain = plain.add(0, took)
            state = replace(state, plain={**state.plain, key: plain})
        step = plain.at(0)
        lost = took - step * sum(map(len, round.tokens)) / rows if drafted else 0.0
        left = min(state.left + self.share * took - lost, self.most_steps * step)
        if not drafted:
            return replace(state, left=left)
        price = max(0.0, lost / step) if step else state.price
        return replace(state, left=left, pilots=2 * sum(map(bool, round.gammas)), price=price)
