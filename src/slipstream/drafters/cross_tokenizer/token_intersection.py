"""Draft by a model with another tokenizer: on the common tokens, or by re-encoding its text.

Both are exact with every rule. `TokenIntersection` samples from the draft's law, renormalised on the tokens that both
vocabularies have: the law q that was really sampled from (token-level intersection, arXiv 2502.05202). `StringMatch`
lets the draft write freely and encodes what it wrote with the target's tokenizer (string-level exact match, same
paper). There q is a point mass on the encoded tokens, however they were made: given the text so far, the draft is fixed
or depends on random numbers that the verifier does not use, the rules are exact for every fixed draft, and a mixture of
exact rounds is exact. For the same reason `StringMatch` may drop what it wrote, and need not sample from the draft's
law: it writes the likeliest tokens, since a point mass x is kept with chance p(x).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from slipstream.core.draft import Draft
from slipstream.core.law import Law
from slipstream.core.protocols import Drafter
from slipstream.core.request import Prefixes
from slipstream.core.round import Context
from slipstream.drafters.cross_tokenizer.reader import RetokenizingReader
from slipstream.drafters.sampled import sample_chain


class TokenIntersection(Drafter):
    """Samples a chain of common tokens, with the request's own sampling settings.

    The draft reads the text in its own tokens; a drafted token continues both texts. Nothing is drafted for a row whose
    text ends inside a character without tokens of the draft, and drafting stops where the settings forbid every common
    token: both are known before the token is sampled, so stopping is exact.
    """

    def __init__(self, reader: RetokenizingReader) -> None:
        self.reader, self.scorer, self.common = reader, reader.scorer, reader.common

    def propose(self, context: Context, gammas: Sequence[int]) -> Draft:
        reader = self.reader
        reader.follow(context.rows, context.watch)
        left = [gamma if view.ready and view.ids else 0 for gamma, view in zip(gammas, reader.readings, strict=True)]
        if not any(left):
            return Draft.empty(len(left), self.scorer.device)

        def law_after(tokens: Tensor) -> Law | None:
            nonlocal left
            i = tokens.shape[1]
            if max(left) <= i:
                return None
            if i:
                counterparts = self.common.to_draft.to(tokens.device)[tokens[:, -1:]].clamp(min=0)
                logits = reader.feed(counterparts, [int(i < wanted) for wanted in left])
            else:
                logits = reader.catch_up(max(left))
            law, left = self._law(context, logits, tokens, left)
            return law if max(left) > i else None

        draft = sample_chain(context, law_after, left, self.scorer.device)
        if draft.law is None:
            return draft
        return replace(draft, lengths=tuple(left), windowed=reader.windowed(left))

    def _law(self, context: Context, logits: Tensor, tokens: Tensor, left: list[int]) -> tuple[Law, list[int]]:
        """Return q of the next position, and the numbers of tokens to draft, cut for rows without a possible token."""
        common = self.common.translate(logits)
        hopeless = common.amax((1, 2)) == float("-inf")  # (rows,): the draft gives no common token any chance
        common = common.masked_fill(hopeless[:, None, None], 0)
        law, faults = context.law_and_faults(common, Prefixes.chain(tokens, 1), self.scorer.name)
        for place, _ in faults:  # the settings forbid all common tokens
            hopeless[place] = True
        ends = zip(left, hopeless.tolist(), strict=True)
        return law.bare(), [min(wanted, tokens.shape[1]) if end else wanted for wanted, end in ends]
