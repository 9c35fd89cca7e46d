"""Draft by a model with another tokenizer: on the common tokens, or by way of the text.

Both are exact with every rule. `Intersection` samples from the draft's law, renormalised on the tokens that both
vocabularies have: the law q that was really sampled from (token-level intersection, arXiv 2502.05202). `Strings`
lets the draft write freely and encodes what it wrote with the target's tokenizer (string-level exact match, same
paper). There q is a point mass on the encoded tokens, whatever way they came about: given the text so far, what is
proposed is a fixed draft or chosen by coins that the verifier never looks at, the rules are exact for every fixed
draft, and a mixture of exact rounds is exact. For the same reason `Strings` may drop what it wrote, and need not be
the law that the draft would sample: it writes the likeliest tokens, since a point mass x is kept with chance p(x).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.core.draft import Draft
from slipstream.core.draws import Purpose
from slipstream.core.law import Law
from slipstream.core.request import Texts
from slipstream.core.round import Context, Round
from slipstream.drafters.cross_tokenizer.reader import Reader


class Intersection:
    """Samples a chain of common tokens, with the request's own sampling settings.

    The draft reads the text in its own tokens; a drafted token continues both texts. A row drafts nothing while its
    text ends inside a character that the draft cannot see, and stops where the settings forbid every common token:
    both are known before the token is sampled, so stopping is exact.
    """

    def __init__(self, reader: Reader) -> None:
        self.reader, self.scorer, self.common = reader, reader.scorer, reader.common

    def propose(self, context: Context, gammas: Sequence[int]) -> Draft:
        """Sample up to `gammas[r]` tokens per row, each from the renormalised law given all before it."""
        reader = self.reader
        reader.follow(context.rows)
        left = [gamma if view.ready and view.ids else 0 for gamma, view in zip(gammas, reader.readings, strict=True)]
        if not any(left):
            return Draft.empty(len(left), self.scorer.device)
        logits = reader.catch_up(max(left))
        tokens = torch.empty(len(left), 0, dtype=torch.long, device=self.scorer.device)
        laws: list[Law] = []
        while True:
            i = len(laws)
            law, left = self._law(context, logits, tokens, left)
            if max(left) <= i:
                break
            laws.append(law)
            tokens = torch.cat([tokens, context.draw(law, Purpose.DRAFT, start=i)], 1)
            if max(left) == i + 1:
                break
            counterparts = self.common.to_draft.to(tokens.device)[tokens[:, -1:]].clamp(min=0)
            logits = reader.feed(counterparts, [int(i + 1 < wanted) for wanted in left])
        if not laws:
            return Draft.empty(len(left), self.scorer.device)
        return Draft(tokens, Law.join(laws, 1), tuple(left), reader.windowed(left))

    def observe(self, round: Round) -> None:
        """Nothing: the reader compares what it fed with the text of the next round."""

    def _law(self, context: Context, logits: Tensor, tokens: Tensor, left: list[int]) -> tuple[Law, list[int]]:
        """q of the next position, and how many tokens each row drafts now that this is known."""
        common = self.common.translate(logits)
        hopeless = common.amax((1, 2)) == float("-inf")  # (rows,): the draft wants none of the common tokens
        common = common.masked_fill(hopeless[:, None, None], 0)
        law, faults = context.law_and_faults(common, Texts.chain(tokens, 1), self.scorer.name)
        for place, _ in faults:  # the settings forbid them all
            hopeless[place] = True
        ends = zip(left, hopeless.tolist(), strict=True)
        return law.bare(), [min(wanted, tokens.shape[1]) if end else wanted for wanted, end in ends]
