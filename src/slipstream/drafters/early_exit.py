"""Self-speculation: the target drafts for itself with some of its layers, its own head and its own cache.

With the first layers only this is how LayerSkip checkpoints are meant to be used (arXiv 2404.16710); leaving out layers
in the middle needs no training (Draft & Verify, arXiv 2309.08168). Both work on any target; how well is a question of
its layers, which `slipstream.plan.layers` answers by measuring.

The draft runs on the target's own weights and rows of its cache, which hold every committed token: there is nothing to
catch up with and nothing to copy. Its keys and values go to the slots behind the text, where the verifying pass of all
layers overwrites them. Keys of the first layers are the target's own; behind a skipped layer, those of drafted tokens
are approximations. That only changes q, which is the law each token was really sampled from, so every rule stays exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.core.draft import Draft
from slipstream.core.law import Law
from slipstream.core.protocols import HasModel
from slipstream.core.round import Context, Round
from slipstream.drafters.sampled import law_of, sample_chain
from slipstream.models.layers import find_layers, kept_layers, part_of


class ExitDrafter:
    """Samples a chain from some layers of the target, with the request's own sampling settings.

    It serves the decoder whose target it was made of, and no other.
    """

    def __init__(self, target: HasModel, layers: int | Sequence[int]) -> None:
        """`layers`: how many of the first ones, or which ones, counted from 0.

        Raises ValueError if the target has no such layers or cannot run with some of them.
        """
        count = len(find_layers(target.model, target.name)[1])
        self.layers = kept_layers(layers, count)
        self.scorer = part_of(target, self.layers)

    def propose(self, context: Context, gammas: Sequence[int]) -> Draft:
        """Sample up to `gammas[r]` tokens per row, each from the law given all before it.

        Raises ValueError if the rows are not those of the target's cache.
        """
        if not max(gammas, default=0):
            return Draft.empty(len(context.rows), self.scorer.device)
        before = self.scorer.lengths[: len(context.rows)]  # behind them prompts may still be read
        if before != [len(row.tokens) - 1 for row in context.rows]:
            raise ValueError(f"{self.scorer.name} drafts only for the target it was made of: make one for this target.")
        pending = torch.tensor([row.tokens[-1:] for row in context.rows], device=self.scorer.device)

        def law_after(tokens: Tensor) -> Law:
            i = tokens.shape[1]
            logits = self.scorer.extend(tokens[:, -1:] if i else pending, [int(i < wanted) for wanted in gammas])
            return law_of(context, logits, tokens, self.scorer.name)

        draft = sample_chain(context, law_after, gammas, self.scorer.device)
        self.scorer.rollback(before)
        return draft

    def observe(self, round: Round) -> None:
        """The target's cache is rolled back by the loop, and there is no other."""
