"""`Guarded`, a controller for many rows at once: what speculation loses there stays within a share of the time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from slipstream.core.protocols import Controller
from slipstream.core.request import Row
from slipstream.core.round import Round
from slipstream.decoding.adaptive import Adaptive
from slipstream.decoding.round_estimates import Curve, clocked, size


@dataclass(frozen=True, slots=True)
class Purse:
    """The state of `Guarded`: what the controller inside knows, the seconds of plain rounds by the size of the batch,
    the seconds that may be lost, how many rows may draft at the next attempt, and the plain rounds it may lose."""

    inside: Any
    plain: dict[int, Curve] = field(default_factory=dict)
    left: float = 0.0
    pilots: int = 1
    price: float = 1.0


@dataclass(frozen=True)
class Guarded:
    """Lets a controller choose for fewer than `crowd` rows; for more, only as long as there are seconds left to lose.

    In a crowd a plain round serves everybody at nearly the price of one row, and a draft model has to read everybody's
    text before it can draft: one bad attempt may cost more than speculation ever wins back. Here every second counts,
    that of reading texts too, except what the target takes to read prompts. A round loses what it took longer than
    plain rounds of this size take for as many tokens. The purse for that begins empty, gets `share` of the time of
    every round, and holds no more than `most_steps` plain rounds. Nobody drafts, which costs nothing, until it has what
    the attempt before has lost. The first attempt drafts for one row, each further one for twice as many, so that none
    loses much more than the one before.

    All of this is known from older rounds, before anything is drafted, so that every choice is exact. How many
    tokens to verify must never be chosen by the drafted tokens themselves: that gives another law.

    Raises ValueError for a crowd below 2, a share outside 0 to 1, or a negative purse.
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
        """The greatest gamma of the controller inside."""
        return self.inner.most

    def init(self) -> Purse:
        """Return the state before any round: no times are known, and no seconds may be lost."""
        return Purse(self.inner.init())

    def gammas(self, state: Purse, rows: Sequence[Row]) -> list[int]:
        """What the controller inside says, for as many rows as may draft; none without seconds to lose."""
        chosen = list(self.inner.gammas(state.inside, rows))
        if len(rows) < self.crowd:
            return chosen
        plain = state.plain.get(size(len(rows)), Curve())
        pilots = state.pilots if plain.points and state.left >= min(state.price, self.most_steps) * plain.at(0) else 0
        return [*chosen[:pilots], *[0] * len(chosen[pilots:])]

    def update(self, state: Purse, round: Round) -> Purse:
        """Fill the purse, take from it what was lost, and learn what plain rounds take."""
        state = replace(state, inside=self.inner.update(state.inside, round))
        rows, key, drafted = len(round.rows), size(len(round.rows)), any(round.gammas)
        if rows < self.crowd or not clocked(round):
            return state
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
        return replace(state, left=left, pilots=2 * min(state.pilots, rows), price=price)
