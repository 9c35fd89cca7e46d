"""Building passes: the positions, masks and sources of new tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.core.draft import Tree
from slipstream.execution.masks import PassMasks
from slipstream.execution.passes import Cross, Pass
from slipstream.models.facts import ModelFacts
from slipstream.models.memory import Memory


class PassBuilder:
    """Makes a `Pass` of new tokens for the rows of a memory that take part in its present pass."""

    def __init__(self, facts: ModelFacts, memory: Memory) -> None:
        self._facts, self._memory = facts, memory
        self._looks_at_distance = facts.looks_at_distance

    def build(self, tokens: Tensor, slots: Tensor, tree: Tree | None = None) -> Pass:
        """Return the pass of tokens (rows, n) that go to slots (rows, n), after the rows' texts or within a tree."""
        pass_masks, context = self._pass_masks(slots, tree), self._facts.context
        masks = {kind: pass_masks.mask(sight, self._facts.dtype) for kind, sight in self._facts.kinds.items()}
        positions = pass_masks.own
        if context and self._memory.texts.end > context:  # padding may stand beyond the last learned position
            positions = positions.clamp(max=context - 1)
        positions = self._shifted(positions)
        cross: Cross | None = None
        if (sources := self._memory.sources) is not None:
            cross = sources.cross(self._memory.texts.part, pass_masks.back if self._facts.relative else None)
        return Pass(tokens, positions, slots, masks, cross)

    def _shifted(self, positions: Tensor) -> Tensor:
        """Return positions (rows, n) that account for images, which may take fewer positions than tokens."""
        shifts = self._memory.shifts[self._memory.texts.part]
        if not any(shifts):
            return positions
        shifts += [0] * (len(positions) - len(shifts))  # rows that only fill a shape
        return positions + torch.tensor(shifts, device=positions.device)[:, None]

    def _pass_masks(self, slots: Tensor, tree: Tree | None) -> PassMasks:
        """Return the masks of a pass at slots (rows, n): of a tree, of a single token per row, or of chains."""
        texts = self._memory.texts
        if tree is not None:
            return PassMasks.tree(slots, texts.end, tree)
        if slots.shape[1] == 1 and texts.last_sees_all and not self._looks_at_distance:
            return PassMasks.everything(slots, texts.end)  # a drafting step: nothing to compare
        return PassMasks.chain(slots, texts.end)
