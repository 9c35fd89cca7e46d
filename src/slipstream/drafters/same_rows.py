"""Self-speculation: the draft runs on the rows of the target's own KV cache.

These rows hold every committed token, so nothing has to be copied and no prompt is read twice. The draft's keys and
values are written to the slots behind the text, where the target's verifying pass overwrites them. The draft attends to
the target's keys for the text, and to its own for drafted tokens. That only changes q, which is the law each token was
really sampled from, so every rule stays exact.

Drafting with the first layers only is how LayerSkip checkpoints are meant to be used (arXiv 2404.16710).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.core.draft import Draft
from slipstream.core.protocols import Drafter, HasModel, Traits
from slipstream.core.round import Context
from slipstream.drafters.sampled import sample_after


class SameRowsDrafter(Drafter):
    """Samples a chain of tokens from a Scorer that shares the target's rows, in the decoder of that target."""

    def __init__(self, scorer: HasModel) -> None:
        self.scorer = scorer
        self.traits = Traits(model=scorer, on_target_rows=True)

    def propose(self, context: Context, gammas: Sequence[int]) -> Draft:
        if not max(gammas, default=0):
            return Draft.empty(len(context.rows), self.scorer.device)
        before = self.scorer.lengths[: len(context.rows)]  # further rows may belong to prompts in prefill
        if before != [len(row.tokens) - 1 for row in context.rows]:
            raise ValueError(f"{self.scorer.name} drafts only for the target it was made of: make one for this target.")
        fed = [row.tokens[-1:] if gamma else [] for row, gamma in zip(context.rows, gammas, strict=True)]

        def feed() -> Tensor:
            pending = torch.tensor([row.tokens[-1:] for row in context.rows], device=self.scorer.device)
            return self.scorer.extend(pending, [int(gamma > 0) for gamma in gammas])

        draft = sample_after(context, self.scorer, fed, gammas, self.scorer.vocab, feed)
        self.scorer.rollback(before)
        return draft
