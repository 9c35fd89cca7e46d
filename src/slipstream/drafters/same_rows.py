"""Self-speculation: what drafts runs on the rows of the target's own cache.

They hold every committed token, so there is nothing to catch up with, nothing to copy and no prompt to read twice. The
draft's keys and values go to the slots behind the text, where the target's verifying pass overwrites them. What the
draft sees of the text are the target's keys; those of drafted tokens are its own. That only changes q, which is the law
each token was really sampled from, so every rule stays exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.core.draft import Draft
from slipstream.core.law import Law
from slipstream.core.protocols import HasModel
from slipstream.core.round import Context, Round
from slipstream.drafters.sampled import chains_by_graphs, law_of, sample_chain
from slipstream.execution.draft_graphs import DraftsInGraphs


class SameRowsDrafter:
    """Samples a chain from a Scorer that shares the target's rows, with the request's own sampling settings.

    It serves the decoder whose target the rows are of, and no other.
    """

    on_target_rows = True

    def __init__(self, scorer: HasModel) -> None:
        """`scorer`: made by the target's `sharing_rows`."""
        self.scorer = scorer
        self._graphs = scorer if isinstance(scorer, DraftsInGraphs) else None

    def propose(self, context: Context, gammas: Sequence[int]) -> Draft:
        """Sample up to `gammas[r]` tokens per row, each from the law given all before it.

        Raises ValueError if the rows are not those of the target's cache.
        """
        if not max(gammas, default=0):
            return Draft.empty(len(context.rows), self.scorer.device)
        before = self.scorer.lengths[: len(context.rows)]  # behind them prompts may still be read
        if before != [len(row.tokens) - 1 for row in context.rows]:
            raise ValueError(f"{self.scorer.name} drafts only for the target it was made of: make one for this target.")
        draft = self._at_once(context, gammas) or self._token_by_token(context, gammas)
        self.scorer.rollback(before)
        return draft

    def _at_once(self, context: Context, gammas: Sequence[int]) -> Draft | None:
        fed = [row.tokens[-1:] if gamma else [] for row, gamma in zip(context.rows, gammas, strict=True)]
        chains = chains_by_graphs(self._graphs, context, fed, gammas, self.scorer.vocab)
        return chains and Draft(*chains, tuple(gammas))

    def _token_by_token(self, context: Context, gammas: Sequence[int]) -> Draft:
        pending = torch.tensor([row.tokens[-1:] for row in context.rows], device=self.scorer.device)

        def law_after(tokens: Tensor) -> Law:
            i = tokens.shape[1]
            logits = self.scorer.extend(tokens[:, -1:] if i else pending, [int(i < wanted) for wanted in gammas])
            return law_of(context, logits, tokens, self.scorer.name)

        return sample_chain(context, law_after, gammas, self.scorer.device)

    def release(self) -> None:
        """There are no rows of its own."""

    def observe(self, round: Round) -> None:
        """The target's cache is rolled back by the loop, and there is no other."""
