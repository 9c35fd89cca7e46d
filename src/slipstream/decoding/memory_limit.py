"""Limits the rows that run together by the bytes that their KV caches take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from slipstream.core.protocols import TakesMemory
from slipstream.core.request import Row
from slipstream.decoding.decoder import Decoder


@dataclass(frozen=True)
class MemoryLimit:
    """A limit in bytes for the keys and values of all rows, in the target and the models that draft.

    Drafts are counted at the greatest gamma. What counts is what the caches take: on CPUs the pages that hold
    tokens, on GPUs as many slots in every row as the longest needs, doubled; keys and values of an encoder's sources
    are not counted. None is no limit.
    Raises ValueError below 1 byte, and if a model cannot compute what its cache takes.
    """

    bytes: int | None
    decoder: Decoder
    scorers: tuple[TakesMemory, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        if self.bytes is None:
            return
        if self.bytes < 1:
            raise ValueError(f"memory={self.bytes} is not possible: give 1 byte or more, or None for no limit.")
        scorers = self.decoder.scorers
        object.__setattr__(self, "scorers", tuple(each for each in scorers if isinstance(each, TakesMemory)))
        if len(self.scorers) < len(scorers):
            names = ", ".join(each.name for each in scorers if not isinstance(each, TakesMemory))
            raise ValueError(f"memory={self.bytes} cannot be kept: {names} cannot tell what rows take. Leave it out.")

    def fits(self, rows: Sequence[Row]) -> bool:
        """Return whether there is memory for one more round of these rows with the longest drafts."""
        gammas = (self.decoder.controller.most if row.request.gamma is None else row.request.gamma for row in rows)
        return self.holds([len(row.tokens) + gamma + 1 for row, gamma in zip(rows, gammas, strict=True)])

    def holds(self, lengths: Sequence[int]) -> bool:
        return self.bytes is None or sum(each.bytes_for(lengths) for each in self.scorers) <= self.bytes
