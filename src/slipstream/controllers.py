"""Controllers: how many tokens to draft next. Settings are immutable; the state goes in and out."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.records import Round


@dataclass(frozen=True)
class Fixed:
    """Always the same gamma; 0 is plain decoding. Raises ValueError if negative."""

    tokens: int

    def __post_init__(self) -> None:
        if self.tokens < 0:
            raise ValueError(f"gamma={self.tokens} is not possible: it must be 0 (plain decoding) or more.")

    def init(self) -> None:
        """No state."""

    def gamma(self, state: None) -> int:
        """The constant."""
        return self.tokens

    def update(self, state: None, round: Round) -> None:
        """Nothing is learned."""
