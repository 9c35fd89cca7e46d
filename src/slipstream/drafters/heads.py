"""Drafters of networks on the target's hidden states: heads that ship with checkpoints, EAGLE-3 and DFlash."""

from collections.abc import Sequence
from typing import Any

from slipstream.core.draft import Draft, padded
from slipstream.core.protocols import HasModel, Traits
from slipstream.core.round import Context, Round
from slipstream.drafters.following import Follower, read_by_target
from slipstream.drafters.model import ModelDrafter
from slipstream.drafters.sampled import sample_block
from slipstream.models.heads.dflash import DFlashScorer
from slipstream.models.heads.scorer import Head, HeadScorer

AT_ONCE = 64  # the number of missing tokens fed with the first drafting step: accepted tokens are all read again


class HeadDrafter:
    """Samples chains from a network on the target's hidden states, token by token, like `ModelDrafter` from a model.

    It works only in the decoder of the target it was made for. Rows without recorded states of that target get no
    draft: rows of one token, and rows that the target has not read.
    """

    def __init__(self, target: HasModel, head: Head, name: str) -> None:
        """Raises ValueError if the target records no hidden states, or not those that the head reads."""
        self.head, self._target, self.scorer = head, target, HeadScorer(target, head, name)
        self._drafter = ModelDrafter(self.scorer, target.vocab, AT_ONCE)
        self.traits = Traits((self.scorer,))

    def propose(self, context: Context, gammas: Sequence[int]) -> Draft:
        return self._drafter.propose(context, read_by_target(self._target, context, gammas))

    def observe(self, round: Round) -> None:
        """Roll back all drafted tokens; accepted ones are read again with the target's hidden states."""
        self._drafter.observe(round)


class DFlashDrafter:
    """Drafts like `HeadDrafter`, but up to a block of tokens in one call, whose laws do not depend on each other."""

    def __init__(self, target: HasModel, net: Any, name: str) -> None:
        """Raises ValueError if the target records no hidden states, or not those that the network reads."""
        self._target, self.scorer = target, DFlashScorer(target, net, name)
        self._follower = Follower(self.scorer, AT_ONCE)
        self.traits = Traits((self.scorer,))

    def propose(self, context: Context, gammas: Sequence[int]) -> Draft:
        gammas = read_by_target(self._target, context, [min(gamma, self.scorer.block_size - 1) for gamma in gammas])
        gammas = self._follower.begin(context, gammas)
        if not any(gammas):
            return Draft.empty(len(context.rows), self.scorer.device)
        missing = self._follower.lacking(0)
        logits = self.scorer.block(padded(missing, self.scorer.device), list(map(len, missing)))
        return sample_block(context, logits, gammas, self.scorer.name)

    def observe(self, round: Round) -> None:
        """Roll the cache back to the text; drafted tokens were never written to it."""
        self._follower.rollback(round)
