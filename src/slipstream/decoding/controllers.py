"""Controllers: they choose how many tokens to draft next. Settings are immutable; the state is passed in and out."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import cast

from slipstream.core.protocols import Controller
from slipstream.core.request import Row
from slipstream.core.values import OptionError, is_whole
from slipstream.decoding.adaptive import Adaptive


@dataclass(frozen=True)
class Fixed(Controller):
    """Chooses the same gamma in every round; 0 is plain decoding. Raises ValueError if it is negative."""

    tokens: int

    def __post_init__(self) -> None:
        if self.tokens < 0:
            raise OptionError("gamma", f"gamma={self.tokens} is not possible: it must be 0 (plain decoding) or more.")

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
        return Fixed(int(cast(int, gamma)))
    if isinstance(gamma, int | str) or not callable(getattr(gamma, "gammas", None)):
        raise OptionError("gamma", f'gamma={gamma!r} is not possible: give a number of tokens, "auto" or a controller.')
    return gamma
