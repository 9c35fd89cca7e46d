"""Drafting by networks that read the target's hidden states: heads that ship with checkpoints, and EAGLE-3."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.core.draft import Draft
from slipstream.core.protocols import HasModel, Scorer
from slipstream.core.round import Context, Round
from slipstream.drafters.model import ModelDrafter
from slipstream.models.head_scorer import Head, HeadScorer, RecordsStates

AT_ONCE = 64
"""Tokens that are read with the first drafting step: all that a round accepted, since each is read again."""


class HeadDrafter:
    """Samples chains from a network on the target's hidden states, token by token, as from a model of its own.

    It serves the decoder whose target it was made for. Rows of which that target shows no states get no draft: those
    of one token, before which there is none, and those of others.
    """

    def __init__(self, target: HasModel, head: Head, name: str) -> None:
        """Raises ValueError if the target shows no hidden states, or not those that the head reads."""
        if not isinstance(target, RecordsStates):
            raise ValueError(f"{target.name} shows no hidden states of its tokens: use another draft.")
        self.head, self._target = head, target
        self._drafter = ModelDrafter(HeadScorer(target, head, name), target.vocab, AT_ONCE)

    @property
    def scorers(self) -> tuple[Scorer, ...]:
        """The network with its cache."""
        return self._drafter.scorers

    def propose(self, context: Context, gammas: Sequence[int]) -> Draft:
        """Up to `gammas[r]` tokens per row, each from the law given all before it."""
        read = [*self._target.lengths, *[0] * len(context.rows)]
        shown = [have > 0 and have == len(row.tokens) - 1 for have, row in zip(read, context.rows, strict=False)]
        return self._drafter.propose(context, [gamma * known for gamma, known in zip(gammas, shown, strict=True)])

    def observe(self, round: Round) -> None:
        """Forget what was drafted: where it stands, it is read again with the target's states."""
        self._drafter.observe(round)
