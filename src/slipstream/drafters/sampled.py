"""Samples chains: `sample_chain` from laws token by token, `sample_after` from a Scorer, all at once with graphs."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream.core.draft import Draft
from slipstream.core.draws import Purpose
from slipstream.core.law import Law, pad_vocabulary
from slipstream.core.request import Prefixes
from slipstream.core.round import Context
from slipstream.decoding.sampling import temperatures_of
from slipstream.execution.draft_graphs import Wish

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


def sample_after(
    context: Context,
    scorer: Any,
    fed: Sequence[Sequence[int]],
    gammas: Sequence[int],
    vocab: int,
    feed: Callable[[], Tensor],
) -> Draft:
    """Sample a chain from a Scorer after the tokens `fed`, of ids below `vocab`: by its graphs, if it has such.
    Otherwise `feed` feeds them -> logits (rows, 1, vocab), and each drafted token is fed by itself."""
    if getattr(scorer, "draft_graphs", None) is not None and (wanted := temperatures_of(context.rows)) is not None:
        chances = context.rng.chances(context.key(Purpose.DRAFT), max(gammas)) if any(wanted) else ()
        chain = None if chances is None else scorer.chain(Wish(fed, gammas, wanted, vocab, chances))
        if chain is not None:  # its tokens and laws equal those that are drawn token by token
            tokens, law = chain
            return Draft(tokens, law, tuple(gammas))

    def law_after(tokens: Tensor) -> Law:
        i = tokens.shape[1]
        logits = scorer.extend(tokens[:, -1:], [int(i < wanted) for wanted in gammas]) if i else feed()
        return law_of(context, pad_vocabulary(logits, vocab), tokens, scorer.name)

    return sample_chain(context, law_after, gammas, scorer.device)
