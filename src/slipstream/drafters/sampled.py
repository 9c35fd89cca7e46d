"""`sample_chain` draws a chain token by token, each from the law given those before: the loop of five drafters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from slipstream.core.draft import Draft
from slipstream.core.draws import Purpose
from slipstream.core.law import Law
from slipstream.core.request import Prefixes
from slipstream.core.round import Context

LawAfter = Callable[[Tensor], Law | None]
"""Tokens drafted so far (rows, i) -> the law (rows, 1) of the next one; None if no row drafts another."""


def sample_chain(context: Context, law_after: LawAfter, gammas: Sequence[int], device: torch.device) -> Draft:
    """Sample a chain of at most max(gammas) tokens; row r proposes `gammas[r]` of them.

    `law_after` is asked once per position, in order, and stops the chain early with None: what it looks at is known
    before the token is drawn, so stopping is exact.
    """
    tokens = torch.empty(len(context.rows), 0, dtype=torch.long, device=device)
    laws: list[Law] = []
    for i in range(max(gammas, default=0)):
        if (law := law_after(tokens)) is None:
            break
        laws.append(law.bare())
        tokens = torch.cat([tokens, context.draw(laws[-1], Purpose.DRAFT, start=i)], 1)
    if not laws:
        return Draft.empty(len(context.rows), device)
    return Draft(tokens, Law.join(laws, 1), tuple(gammas))


def law_of(context: Context, logits: Tensor, tokens: Tensor, name: str) -> Law:
    """The law of the token after `tokens` (rows, i), from logits (rows, 1, vocab) of the model `name`."""
    return context.law(logits, Prefixes.chain(tokens, 1), name)
