"""Drafting by a smaller model: the paper's approximation model M_q, sampled token by token as a chain."""

from collections.abc import Sequence

from slipstream.core.draft import Draft
from slipstream.core.protocols import Scorer, Traits
from slipstream.core.round import Context, Round
from slipstream.drafters.following import Follower
from slipstream.drafters.sampled import sample_after
from slipstream.execution.draft_graphs import FED


class ModelDrafter:
    """Samples a chain of tokens from a Scorer, with each request's own sampling settings.

    Drafting from a window of the text is exact, since q is the law the token was really sampled from.
    """

    def __init__(self, scorer: Scorer, vocab: int | None = None, at_once: int = FED) -> None:
        """Make the drafter; ids from `vocab` on, the target's size, are never drafted. `at_once` as in `Follower`."""
        self.scorer = scorer
        self.vocab = vocab or scorer.vocab
        self._follower = Follower(scorer, at_once)
        self.traits = Traits((scorer,), scorer, release=self._follower.release)

    def propose(self, context: Context, gammas: Sequence[int]) -> Draft:
        gammas = self._follower.begin(context, gammas)
        if not any(gammas):
            return Draft.empty(len(context.rows), self.scorer.device)
        missing = self._follower.lacking(max(gammas))
        return sample_after(context, self.scorer, missing, gammas, self.vocab, lambda: self._follower.feed(missing))

    def observe(self, round: Round) -> None:
        self._follower.rollback(round)
