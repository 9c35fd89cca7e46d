"""A drafter that keeps the draft model's scores in its draft, and may stop drafting where the model is unsure."""

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.core.draft import Draft
from slipstream.core.draws import Purpose
from slipstream.core.law import Law, pad_vocabulary
from slipstream.core.round import Context, Round
from slipstream.drafters.following import Follower
from slipstream.drafters.sampled import law_of


class ScoredDrafter:
    """Samples chains from a model like `ModelDrafter`, and keeps the scores of greedy choices, to compute confidence.

    A row's chain ends at the first position where the most probable token has a probability below `sure`, which is
    known before the token is drawn. Several drafters may use one `follower` in turns.
    """

    on_target_rows = False

    def __init__(self, follower: Follower, vocab: int, sure: float = 0.0) -> None:
        self.follower, self.vocab, self.sure = follower, vocab, sure

    @property
    def scorer(self) -> object:
        return self.follower.scorer

    def release(self) -> None:
        self.follower.follow(())

    def propose(self, context: Context, gammas: Sequence[int]) -> Draft:
        if not any(gammas):
            return Draft.empty(len(context.rows), self.follower.scorer.device)
        self.follower.follow(context.rows, context.watch)
        wanted = self.follower.read_late(gammas, context.prefill_chunk)
        lengths, laws = [0] * len(wanted), list[Law]()
        tokens = torch.empty(len(wanted), 0, dtype=torch.long, device=self.follower.scorer.device)
        logits = self.follower.feed(self.follower.lacking(max(*wanted, 1)))
        while any(goes := self._goes_on(law := self._law(context, logits, tokens), lengths, wanted)):
            laws.append(law)
            tokens = torch.cat([tokens, context.draw(law, Purpose.DRAFT, start=len(laws) - 1)], 1)
            lengths = [length + go for length, go in zip(lengths, goes, strict=True)]
            further = [go and length < most for go, length, most in zip(goes, lengths, wanted, strict=True)]
            if not any(further):
                break
            logits = self.follower.scorer.extend(tokens[:, -1:], list(map(int, further)))
        if not laws:
            return Draft.empty(len(wanted), self.follower.scorer.device)
        return Draft(tokens, Law.join(laws, 1), tuple(lengths))

    def observe(self, round: Round) -> None:
        self.follower.rollback(round)

    def _law(self, context: Context, logits: Tensor, tokens: Tensor) -> Law:
        return law_of(context, pad_vocabulary(logits, self.vocab), tokens, self.follower.scorer.name)

    def _goes_on(self, law: Law, lengths: Sequence[int], wanted: Sequence[int]) -> list[bool]:
        """Return which rows draft one more token: those still drafting, below their gamma, and sure enough."""
        depth, sure = max(lengths, default=0), (confidence(law)[:, -1] >= self.sure).tolist()
        return [length == depth < most and yes for length, most, yes in zip(lengths, wanted, sure, strict=True)]


def probabilities(law: Law) -> Tensor:
    """Return the law's probabilities (rows, positions, vocab); for a greedy law, the softmax of its scores."""
    if law.probs is not None:
        return law.probs
    assert law.scores is not None, "a greedy law without its scores"
    return law.scores.softmax(-1)


def confidence(law: Law) -> Tensor:
    """Return the probability of the most probable token, (rows, positions)."""
    return probabilities(law).amax(-1)
