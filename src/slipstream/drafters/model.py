"""Draft by a smaller model: the paper's approximation model M_q, sampled token by token, as a chain or a tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from slipstream.core.draft import Draft
from slipstream.core.law import Law, pad_vocabulary
from slipstream.core.protocols import Scorer
from slipstream.core.round import Context, Round
from slipstream.drafters.following import Follower, windowed_lengths
from slipstream.drafters.sampled import chains_by_graphs, law_of, sample_chain
from slipstream.execution.draft_graphs import FED, DraftsInGraphs


class ModelDrafter:
    """Samples a chain from a Scorer with the request's own sampling settings.

    Drafting from a window of the text is exact, since q is the law the token was really sampled from; the
    statistics count such tokens as `windowed`.
    """

    on_target_rows = False

    def __init__(self, scorer: Scorer, vocab: int | None = None, at_once: int = FED) -> None:
        """`vocab`: size of the target's logits. The draft's padding ids beyond it are never proposed. `at_once` as in
        `Follower`."""
        self.scorer = scorer
        self.vocab = vocab or scorer.vocab
        self._follower = Follower(scorer, at_once)
        self._graphs = scorer if isinstance(scorer, DraftsInGraphs) else None

    @property
    def scorers(self) -> tuple[Scorer, ...]:
        """The model."""
        return (self.scorer,)

    def release(self) -> None:
        """Forget all rows."""
        self._follower.follow(())

    def propose(self, context: Context, gammas: Sequence[int]) -> Draft:
        """Sample up to `gammas[r]` tokens per row, each from the law given all before it."""
        if not any(gammas):
            return Draft.empty(len(context.rows), self.scorer.device)
        self._follower.follow(context.rows, context.watch)
        gammas = self._follower.read_late(gammas, context.prefill_chunk)
        gamma = max(gammas, default=0)
        if not gamma:
            return Draft.empty(len(context.rows), self.scorer.device)
        missing = self._follower.lacking(gamma)
        if (draft := self._at_once(context, missing, gammas)) is not None:
            return draft

        def law_after(tokens: Tensor) -> Law:
            if i := tokens.shape[1]:
                logits = self.scorer.extend(tokens[:, -1:], [int(i < wanted) for wanted in gammas])
            else:
                logits = self._follower.feed(missing)
            return law_of(context, pad_vocabulary(logits, self.vocab), tokens, self.scorer.name)

        draft = sample_chain(context, law_after, gammas, self.scorer.device)
        return replace(draft, windowed=windowed_lengths(self._follower, gammas))

    def _at_once(self, context: Context, missing: Sequence[Sequence[int]], gammas: Sequence[int]) -> Draft | None:
        """The chains by graphs; None if there are no such graphs, or if more than temperatures makes the laws."""
        chains = chains_by_graphs(self._graphs, context, missing, gammas, self.vocab)
        return chains and Draft(*chains, tuple(gammas), windowed_lengths(self._follower, gammas))

    def observe(self, round: Round) -> None:
        """Forget drafted tokens that were not kept."""
        self._follower.rollback(round)

    def trim(self) -> None:
        """Forget what was read beyond the rows' texts, which somebody has made shorter."""
        self._follower.trim()


MOST_NODES, MOST_LEVELS = 1024, 64
"""The largest tree: every node is a token of one pass of the target, and verifying goes from level to level."""
