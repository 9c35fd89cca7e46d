"""Drafting chains by graphs with a network that reads a target's hidden states, beside a compiled target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from slipstream.execution.draft_graphs import FED, DraftGraphs, Seat
from slipstream.execution.masks import PassMasks, Sight
from slipstream.execution.passes import GivenSlots


@dataclass(frozen=True)
class Behind:
    """What the new tokens of a pass stand behind: their `positions` (rows, n), and the `cache` with what was read
    before (None: nothing was)."""

    positions: Tensor
    cache: Any
    masks: PassMasks

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """The additive mask (rows, 1, n, slots) of a layer, within its window."""
        return self.masks.mask(Sight(window), dtype)

    @staticmethod
    def within(slots: Tensor, end: int, cache: Any) -> Behind:
        """What tokens at slots (rows, n) stand behind. No state comes before a text's first token: its place is kept,
        so that places count as the text's do, and is seen by nothing else."""
        masks = PassMasks.chain(slots, end)
        assert masks.allowed is not None
        seen = masks.allowed & ((masks.others > 0)[:, None] | (slots == 0)[:, :, None])
        return Behind((slots - 1).clamp(min=0), cache, replace(masks, allowed=seen))


class OneLayer(Protocol):
    """A network of one layer that goes on from what it made; see `head_scorer.Head`."""

    def __call__(self, step: int, tokens: Tensor, hidden: Tensor, behind: Behind) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class HeadNetwork:
    """A network on hidden states as what drafts in a graph: the first step reads the target's states, later ones its
    own."""

    head: OneLayer

    def __call__(self, tokens: Tensor, states: Tensor | None, seat: Seat) -> tuple[Tensor, Tensor]:
        """See `execution.draft_graphs.Network`."""
        assert states is not None
        slots, end = seat.slots(tokens.shape[1]), seat.places.shape[0]
        made = self.head(0, tokens, states, Behind.within(slots, end, GivenSlots(seat.stores, slots, end)))
        last = seat.at_last(made)[:, None]
        return self.head.logits(last)[:, 0], last


def head_graphs(
    head: OneLayer, name: str, sizes: Sequence[int], progress: Callable[[str], object] | None = None
) -> DraftGraphs:
    """Graphs that draft chains of these sizes. In a round a network reads again all that the round before kept, and the
    pending token."""
    return DraftGraphs(HeadNetwork(head), name, tuple(sizes), max(FED, *sizes) + 1, progress)
