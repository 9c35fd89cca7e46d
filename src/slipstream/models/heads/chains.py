"""Drafting chains by graphs with a network that reads the hidden states of a compiled target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from slipstream.execution.backends import draft_graphs
from slipstream.execution.draft_graphs import FED, DraftGraphs, Seat
from slipstream.execution.masks import PassMasks, Sight
from slipstream.execution.passes import GivenSlots


@dataclass(frozen=True)
class Behind:
    """The context of the new tokens of a pass: `positions` (rows, n), `masks`, and the `cache` (None: no cache)."""

    positions: Tensor
    cache: Any
    masks: PassMasks

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Return the additive mask (rows, 1, n, slots) of a layer with this window (None: no window)."""
        return self.masks.mask(Sight(window), dtype)

    @staticmethod
    def within(slots: Tensor, end: int, cache: Any) -> Behind:
        """Return the context of tokens at slots (rows, n).

        There is no state before a text's first token: its slot is kept, so that slots count as the text's places do,
        but no other token attends to it.
        """
        masks = PassMasks.chain(slots, end)
        assert masks.allowed is not None
        seen = masks.allowed & ((masks.others > 0)[:, None] | (slots == 0)[:, :, None])
        return Behind((slots - 1).clamp(min=0), cache, replace(masks, allowed=seen))


class OneLayer(Protocol):
    """A network of one layer that goes on from its own states; see `scorer.Head`."""

    def combine(self, states: Tensor) -> Tensor:
        """Combine the target's states (rows, n, width of all places) -> the network's input (rows, n, width)."""
        ...

    def __call__(self, step: int, tokens: Tensor, hidden: Tensor, behind: Behind) -> Tensor: ...

    @property
    def targets(self) -> Tensor | None:
        """The ids in the target's vocabulary of the tokens that it drafts, in rising order; None for all."""
        ...

    def own_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits (rows, n, drafted tokens) of the next tokens."""
        ...


@dataclass(frozen=True)
class HeadNetwork:
    """A network on hidden states that drafts in a graph: step one reads the target's states, later ones its own.

    The target's are (rows, fed, places, width), its own are (rows, 1, width).
    """

    head: OneLayer

    @property
    def known(self) -> Tensor | None:
        return self.head.targets

    def __call__(self, tokens: Tensor, states: Tensor | None, seat: Seat) -> tuple[Tensor, Tensor]:
        assert states is not None
        if states.ndim == 4:
            states = self.head.combine(states.flatten(2))
        slots, end = seat.slots(tokens.shape[1]), seat.places.shape[0]
        made = self.head(0, tokens, states, Behind.within(slots, end, GivenSlots(seat.stores, slots, end)))
        last = made[:, -1:]
        return self.head.own_logits(last)[:, 0], last


def head_graphs(
    head: OneLayer,
    name: str,
    device: torch.device,
    sizes: Sequence[int],
    progress: Callable[[str], object] | None = None,
) -> DraftGraphs:
    """Return graphs that draft chains of these sizes.

    In every round the network reads the tokens that the previous round kept again, and the pending token.
    """
    return draft_graphs(HeadNetwork(head), name, device, sizes, max(FED, *sizes) + 1, progress)
