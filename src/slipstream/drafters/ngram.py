"""Draft by an n-gram model: table lookup with a full law q, so that c is about 0 (section 3.6 of the paper).

The tables are smoothed by interpolated modified Kneser-Ney (Chen and Goodman 1998, section 3), which predicts best
in their comparison and in ours with Witten-Bell: its lower orders count in how many contexts a token appears, not
how often. Counts of tokens emitted while decoding are smoothed by Witten-Bell instead, which needs no counts of counts,
so that adding a token changes the law at once and in constant time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from slipstream.core.draft import Draft
from slipstream.core.law import Law
from slipstream.core.protocols import Traits
from slipstream.core.round import Context, Round
from slipstream.drafters.ngram_model import NgramModel, OnlineCounts
from slipstream.drafters.sampled import law_of, sample_chain


class Ngram:
    """Samples a chain from an n-gram model, with the request's own sampling settings.

    `online` counts the emitted tokens of all texts, and mixes them in from the next round on. That is exact, as the law
    of a draft is fixed before it is sampled, but the text of a seed then depends on the texts decoded before.
    """

    traits = Traits(by_text=True)

    def __init__(self, model: NgramModel, vocab: int, online: bool = False) -> None:
        """Make the drafter; `vocab` is the size of the target's logits. Raises ValueError if the model's differs."""
        if model.vocab != vocab:
            raise ValueError(f"the n-gram model knows {model.vocab} token ids, the target {vocab}: build it for those.")
        self.model = model
        self.online = OnlineCounts(model.order, vocab) if online else None

    @property
    def facts(self) -> str:
        return self.model.facts

    def propose(self, context: Context, gammas: Sequence[int]) -> Draft:
        texts = [row.tokens[-self.model.order :] for row in context.rows]
        states = [self.model.state(text) for text in texts]

        def law_after(tokens: Tensor) -> Law:
            for place, (token,) in enumerate(tokens[:, -1:].tolist() if tokens.shape[1] else ()):
                texts[place].append(token)
                states[place] = self.model.advance(states[place], token)
            q = [self.model.law(state, self.online, text) for state, text in zip(states, texts, strict=True)]
            logits = torch.from_numpy(np.log(np.stack(q))).unsqueeze(1)
            return law_of(context, logits, tokens, "the n-gram model")

        return sample_chain(context, law_after, gammas, torch.device("cpu"))

    def observe(self, round: Round) -> None:
        if self.online is not None:
            for row, new in zip(round.rows, round.tokens, strict=True):
                self.online.add(row.tokens, len(new))
