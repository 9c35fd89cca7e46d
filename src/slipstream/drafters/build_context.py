"""`BuildContext`: the target and the settings for which a draft is built."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from slipstream.core.protocols import Drafter, Scorer
from slipstream.decoding.beam import refuse_states
from slipstream.drafters.frequent_tokens import FrequentTokens
from slipstream.drafters.model import ModelDrafter
from slipstream.drafters.tree import TreeDrafter, tree_shape
from slipstream.execution.passes import EAGER, Mode


@dataclass(frozen=True)
class BuildContext:
    """The target for which a draft is built, and how other models are loaded. `notes` collects notes for the user.

    `drafted`: another draft drafts for the one that is built. `independent`: siblings of the `tree` are drawn
    independently of each other, as rules of several paths require.
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

    def kept_tokens(self, wanted: FrequentTokens | None) -> Tensor | None:
        """Return the ids (n,) of the tokens to which a draft's head is cut; None if it is not cut."""
        if wanted is None:
            return None
        kept, note = wanted.choose(self.target.name, self.target.vocab, self.tokenizer)
        self.notes.append(note)
        if self.tree:
            tree_shape(self.tree, len(kept))
        return kept

    def drafting(self, scorer: Scorer) -> Drafter:
        if self.tree:
            for each in (self.target, scorer):
                refuse_states(each, "a tree of candidates, as of gbv, needs")
            return TreeDrafter(scorer, self.tree, self.target.vocab, self.independent)
        return ModelDrafter(scorer, self.target.vocab)
