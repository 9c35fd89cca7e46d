"""Drafting by networks that read the target's hidden states: heads that ship with checkpoints, and EAGLE-3."""

from __future__ import annotations

from slipstream.core.protocols import HasModel
from slipstream.drafters.model import ModelDrafter
from slipstream.models.head_scorer import Head, HeadScorer, RecordsStates

AT_ONCE = 64
"""Tokens that are read with the first drafting step: all that a round accepted, since each is read again."""


def head_drafter(target: HasModel, head: Head, name: str) -> ModelDrafter:
    """A drafter that samples chains from a head, token by token as from a model; its law is the one they come from.

    Raises ValueError if the target shows no hidden states, or not those that the head reads.
    """
    if not isinstance(target, RecordsStates):
        raise ValueError(f"{target.name} keeps a state and shows no hidden states of its tokens: use another draft.")
    return ModelDrafter(HeadScorer(target, head, name), target.vocab, AT_ONCE)
