"""Drafting chains by graphs, after the texts of a memory."""

from __future__ import annotations

from torch import Tensor

from slipstream.core.law import Law
from slipstream.execution.draft_graphs import DraftGraphs, Room, Wish
from slipstream.models.memory import Memory


class DraftChains:
    """Drafts chains for the first rows of a memory by graphs."""

    def __init__(self, draft_graphs: DraftGraphs, memory: Memory, context: int | None) -> None:
        self.draft_graphs, self._memory, self._context = draft_graphs, memory, context

    def fits(self, wish: Wish) -> bool:
        """Whether the graphs would stay within the model's context."""
        lengths = self._memory.texts.lengths[: len(wish.fed)]
        return not self._context or max(lengths) + self._room(wish) <= self._context

    def draft(self, wish: Wish) -> tuple[Tensor, Law] | None:
        """Draft tokens (rows, gamma), with the law each was drawn from; None where graphs cannot do it."""
        texts, sources = self._memory.texts, self._memory.sources
        texts.reserve(self._room(wish), 0, len(wish.fed))
        cross = sources.cross(texts.part, None) if sources else None
        drafted = self.draft_graphs.run(wish, Room(texts.lengths[texts.part], texts.end, texts.taking_part, cross))
        if drafted is not None:
            fed = zip(wish.fed, wish.gammas, strict=True)
            texts.advance([len(tokens) + max(gamma, 1) - 1 if tokens else 0 for tokens, gamma in fed])
        return drafted

    def _room(self, wish: Wish) -> int:
        """Return the number of slots of each row that the graphs may write to."""
        return self.draft_graphs.most_fed + sum(self.draft_graphs.steps(wish))
