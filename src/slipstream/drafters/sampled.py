"""Samples chains from a model: `sample_chain` token by token, `chains_by_graphs` all at once with graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from slipstream.core.draft import Draft
from slipstream.core.draws import Purpose
from slipstream.core.law import Law
from slipstream.core.request import Prefixes
from slipstream.core.round import Context
from slipstream.decoding.sampling import temperatures_of
from slipstream.execution.draft_graphs import DraftsInGraphs, Wish

LawAfter = Callable[[Tensor], Law | None]
"""A function from the tokens drafted so far (rows, i) to the law (rows, 1) of the next; None ends the chain."""


def sample_chain(context: Context, law_after: LawAfter, gammas: Sequence[int], device: torch.device) -> Draft:
    """Sample a chain of at most max(gammas) tokens; row r proposes `gammas[r]` of them.

    `law_after` is called once per position, in order, and stops the chain early by returning None: its arguments are
    known before the token is drawn, so stopping is exact.
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


def sample_block(context: Context, logits: Tensor, gammas: Sequence[int], name: str) -> Draft:
    """Sample a chain from logits (rows, n, vocab) that do not depend on its earlier tokens, as samplers may."""

    def law_after(tokens: Tensor) -> Law:
        return law_of(context, logits[:, tokens.shape[1]].unsqueeze(1), tokens, name)

    return sample_chain(context, law_after, gammas, logits.device)


def law_of(context: Context, logits: Tensor, tokens: Tensor, name: str) -> Law:
    """Return the law of the token after `tokens` (rows, i), from logits (rows, 1, vocab) of the model `name`."""
    return context.law(logits, Prefixes.chain(tokens, 1), name)


def chains_by_graphs(
    graphs: DraftsInGraphs | None, context: Context, fed: Sequence[Sequence[int]], gammas: Sequence[int], vocab: int
) -> tuple[Tensor, Law] | None:
    """Draft with graphs -> tokens (rows, gamma) after those that are `fed`, and the law of each, equal to those drawn
    token by token; None if there are no graphs, or if settings other than the temperature shape the laws."""
    if graphs is None or graphs.draft_graphs is None:
        return None
    if (temperatures := temperatures_of(context.rows)) is None:
        return None
    chances = context.rng.chances(context.key(Purpose.DRAFT), max(gammas)) if any(temperatures) else ()
    if chances is None:
        return None
    return graphs.chain(Wish(fed, gammas, temperatures, vocab, chances))
