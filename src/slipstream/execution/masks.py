"""What the new tokens of a pass see: positions, and additive masks for layers with and without windows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from slipstream.core.draft import Tree


@dataclass(frozen=True)
class Sight:
    """What a layer sees of a text: all of it, its last `window` tokens and first `sinks` ones, or a token's `chunk`."""

    window: int | None = None
    chunk: int | None = None
    sinks: int = 0

    @property
    def limited(self) -> bool:
        """Whether there are tokens that it does not see."""
        return bool(self.window or self.chunk)

    def within(self, window: int, sinks: int) -> Sight:
        """What the layer sees if the middle of a text is hidden from it: at most its last `window` tokens, and the
        first `sinks` too unless the layer has a window of its own, which does not show them either."""
        if self.window:
            return replace(self, window=min(self.window, window))
        return replace(self, window=window, sinks=sinks)


@dataclass(frozen=True)
class PassMasks:
    """What the new tokens of a pass see: `own` positions (rows, n), `others` (rows or 1, slots) positions of what is
    in the cache, and `allowed` (rows, n, slots), before any window; None allows all `end` slots."""

    own: Tensor
    others: Tensor
    allowed: Tensor | None
    end: int

    @staticmethod
    def everything(slots: Tensor, end: int) -> PassMasks:
        """Make the masks of a pass of one token per row, which sees all that stands before it."""
        return PassMasks(slots, slots, None, end)

    @staticmethod
    def chain(slots: Tensor, end: int) -> PassMasks:
        """Every token sees the slots up to its own; slot and position are the same."""
        others = torch.arange(end, device=slots.device)[None]
        return PassMasks(slots, others, others[:, None] <= slots[:, :, None], end)

    @staticmethod
    def tree(slots: Tensor, end: int, tree: Tree) -> PassMasks:
        """A token sees the text before the tree and its own line of ancestors."""
        rows, new = slots.shape
        held, depths, seen = (part.to(slots.device) for part in (tree.held, tree.depths, tree.seen))
        depths, seen = depths.expand(rows, -1), seen.expand(rows, -1, -1)
        count = depths.shape[1]
        base = slots[:, :1] - held  # (rows, 1): where the tree begins
        places = torch.arange(end, device=slots.device) - base  # (rows, slots)
        inside = places.clamp(0, count - 1)
        others = torch.where(places < 0, places + base, base + depths.gather(1, inside))
        line = seen.gather(2, inside[:, None].expand(-1, new, -1)) & ((places >= 0) & (places < count))[:, None]
        own = base + depths.gather(1, held + torch.arange(new, device=slots.device).expand(rows, -1))
        return PassMasks(own, others, (places < 0)[:, None] | line, end)

    @property
    def back(self) -> Tensor:
        """How many positions back everything lies, (rows, n, slots); negative for what is not to be seen."""
        return self.own[:, :, None] - self.others[:, None]

    def mask(self, sight: Sight, dtype: torch.dtype) -> Tensor:
        """The additive mask (rows, 1, n, slots) of a layer."""
        blank = torch.zeros(*self.own.shape, self.end, dtype=dtype, device=self.own.device)
        if self.allowed is None:
            return blank.unsqueeze(1)
        own, others, seen = self.own[:, :, None], self.others[:, None], self.allowed
        if sight.window:
            seen = seen & ((others > own - sight.window) | (others < sight.sinks))
        if sight.chunk:
            seen = seen & (others // sight.chunk == own // sight.chunk)
        return blank.masked_fill_(~seen, torch.finfo(dtype).min).unsqueeze(1)


def mask_kinds(config: Any) -> dict[str, Sight]:
    """What layers see, by their type; one entry if all see the same."""
    window, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
    named = getattr(config, "layer_types", None) or ()
    types = list(dict.fromkeys(kind for kind in named if kind not in {"mlp", "moe"}))  # which look at nothing
    if not types:
        return {"all": Sight(window)}
    rules = {
        "full_attention": Sight(),
        "indexed_attention": Sight(),
        "attention": Sight(window),
        "sliding_attention": Sight(window),
        "chunked_attention": Sight(chunk=chunk),
    }
    return {kind: rules[kind] for kind in types}
