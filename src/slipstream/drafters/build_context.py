"""`BuildContext`: where a draft has to work, as those who build drafts are told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from slipstream.core.protocols import Drafter, Scorer
from slipstream.drafters.frequent_tokens import FrequentTokens
from slipstream.drafters.model import ModelDrafter
from slipstream.drafters.tree import TreeDrafter, tree_shape
from slipstream.execution.passes import EAGER, Mode


@dataclass(frozen=True)
class BuildContext:
    """Where a draft has to work: its target, and how models are loaded beside it. `notes` are for the user to read.

    With `drafted`, another draft stands before the one that is built. With `independent`, siblings of the `tree` are
    drawn without regard to each other, as rules of several paths want them. With `waits`, nothing is drafted ahead,
    because no target of this process verifies the draft.
    """

    target: Scorer
    tokenizer: Any = None
    dtype: Any = "auto"
    device: str | None = None
    tree: tuple[int, ...] | None = None
    notes: list[str] = field(default_factory=list)
    mode: Mode = EAGER
    drafted: bool = False
    independent: bool = False
    waits: bool = False

    def kept_tokens(self, wanted: FrequentTokens | None) -> Tensor | None:
        """The ids (n,) of the tokens that a draft is cut to; None: it is not cut. Raises ValueError if there are no
        counts for this target, or too few tokens for the tree."""
        if wanted is None:
            return None
        kept, note = wanted.choose(self.target.name, self.target.vocab, self.tokenizer)
        self.notes.append(note)
        if self.tree:
            tree_shape(self.tree, len(kept))
        return kept

    def drafting(self, scorer: Scorer) -> Drafter:
        """A drafter that samples from a model with a cache of its own: the tree that is asked for, or a chain."""
        if self.tree:
            return TreeDrafter(scorer, self.tree, self.target.vocab, self.independent)
        return ModelDrafter(scorer, self.target.vocab)
