"""Trees of drafted tokens: where each token stands, and what it sees."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

ABSENT = -1
"""Stands in a tree for a candidate that a row does not have."""


@dataclass(frozen=True, slots=True)
class Tree:
    """Where the new tokens of one forward pass stand, if they are no chain: the same for every row.

    The newest `len(depths)` tokens of a row are tree tokens, of which the last `len(seen)` are new. Tree token k has
    the position base + depths[k], base being the length before the tree; new token i sees the text before the tree
    and the tree tokens with seen[i, k]: its ancestors and itself.
    """

    depths: Tensor
    seen: Tensor

    @staticmethod
    @lru_cache(maxsize=256)
    def of(parents: tuple[int, ...], new: int) -> Tree:
        """`parents[k]` is the tree token k hangs on, -1 for the text itself; the last `new` tokens are fed."""
        lines = ancestors(parents)
        seen = torch.zeros(len(parents), len(parents), dtype=torch.bool)
        for node, line in enumerate(lines):
            seen[node, list(line)] = True
        return Tree(torch.tensor([len(line) - 1 for line in lines]), seen[len(parents) - new :])


@lru_cache(maxsize=256)
def ancestors(parents: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The path from the root to each node, itself included. Parents come before their children."""
    lines: list[tuple[int, ...]] = []
    for node, parent in enumerate(parents):
        assert parent < node, "parents come before their children"
        lines.append((*(lines[parent] if parent >= 0 else ()), node))
    return tuple(lines)
