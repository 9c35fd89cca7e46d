"""Log probabilities in the two forms of OpenAI's interface."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from slipstream.engine.generation import TokenLogprobs
from slipstream.serve import answers

LEAST = -9999.0
"""The number sent for minus infinity, which JSON lacks."""

Spell = Callable[[int], str]
"""A function that returns the text of one token, as clients are shown it."""


def _finite(logprob: float) -> float:
    return max(LEAST, logprob)


def for_chat(found: Sequence[TokenLogprobs], spell: Spell) -> answers.ChatLogprobs:
    """Return the log probabilities of a chat's tokens."""

    def top(token: int, logprob: float) -> answers.TopLogprob:
        text = spell(token)
        return answers.TopLogprob(token=text, logprob=_finite(logprob), bytes=list(text.encode()))

    return answers.ChatLogprobs(
        content=[
            answers.TokenLogprob(
                **top(each.token, each.logprob).model_dump(), top_logprobs=[top(*pair) for pair in each.top]
            )
            for each in found
        ]
    )


def for_text(found: Sequence[TokenLogprobs], spell: Spell, offset: int, wanted: int) -> answers.TextLogprobs:
    """Return the log probabilities of a completion's tokens, the first of which begins at character `offset`."""
    tokens = [spell(each.token) for each in found]
    starts = [offset + sum(map(len, tokens[:i])) for i in range(len(tokens))]
    return answers.TextLogprobs(
        text_offset=starts,
        token_logprobs=[_finite(each.logprob) for each in found],
        tokens=tokens,
        top_logprobs=[{spell(token): _finite(logprob) for token, logprob in each.top} for each in found]
        if wanted
        else None,
    )
