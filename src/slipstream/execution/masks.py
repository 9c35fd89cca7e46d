"""Positions of the new tokens of a pass, and their additive attention masks for layers with and without windows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from slipstream.core.draft import Tree


@dataclass(frozen=True)
class Sight:
    """What a layer attends to: all, the last `window` and first `sinks` tokens, or those in a chunk of size `chunk`."""

    window: int | None = None
    chunk: int | None = None
    sinks: int = 0

    @property
    def limited(self) -> bool:
        return bool(self.window or self.chunk)

    def within(self, window: int, sinks: int) -> Sight:
        """Return the sight within the last `window` tokens and first `sinks` ones; a window of its own has no sinks."""
        if self.window:
            return replace(self, window=min(self.window, window))
        return replace(self, window=window, sinks=sinks)


@dataclass(frozen=True)
class PassMasks:
    """The positions of a pass, and which slots its new tokens may attend to before any window.

    `own` (rows, n) are positions of the new tokens, `others` (rows or 1, slots) those of the slots in the cache, and
    `allowed` is (rows, n, slots).
    """

    own: Tensor
    others: Tensor
    allowed: Tensor

    @staticmethod
    def chain(slots: Tensor, end: int) -> PassMasks:
        """Make the masks of chains: every token attends to the slots up to its own, and its position is its slot."""
        others = torch.arange(end, device=slots.device)[None]
        return PassMasks(slots, others, others[:, None] <= slots[:, :, None])

    @staticmethod
    def tree(slots: Tensor, end: int, tree: Tree) -> PassMasks:
        """Make the masks of a tree: a token attends to the text before the tree, its ancestors and itself."""
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
        return PassMasks(own, others, (places < 0)[:, None] | line)

    @property
    def back(self) -> Tensor:
        """The number of positions (rows, n, slots) from each slot's token to each new one; negative for later slots."""
        return self.own[:, :, None] - self.others[:, None]

    def mask(self, sight: Sight, dtype: torch.dtype) -> Tensor:
        """Return the additive mask (rows, 1, n, slots) of a layer with this sight."""
        own, others, seen = self.own[:, :, None], self.others[:, None], self.allowed
        if sight.window:
            seen = seen & ((others > own - sight.window) | (others < sight.sinks))
        if sight.chunk:
            seen = seen & (others // sight.chunk == own // sight.chunk)
        blank = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
        return blank.masked_fill_(~seen, torch.finfo(dtype).min).unsqueeze(1)


def causal_mask(slots: Tensor, past: int, end: int, dtype: torch.dtype) -> Tensor:
    """Return the additive mask (rows, 1, n, end) of chains at slots (rows, n) behind texts of `past` tokens each."""
    rows, new = slots.shape
    return torch.full((rows, 1, new, end), torch.finfo(dtype).min, dtype=dtype, device=slots.device).triu_(past + 1)


def mask_kinds(config: Any) -> dict[str, Sight]:
    """Return the sight of each type of layers in a configuration; one entry if it names no types."""
    window, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
    named = getattr(config, "layer_types", None) or ()
    types = list(dict.fromkeys(kind for kind in named if kind not in {"mlp", "moe"}))  # layers without attention
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
