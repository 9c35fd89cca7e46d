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

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.drafters.copies import sure
from slipstream.drafters.reading import Reader
from slipstream.laws import Law
from slipstream.records import Context, Draft, Round, Texts

TAIL = 48
"""Characters of the text that are encoded again before what was drafted."""


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
            tokens = torch.cat([tokens, context.draw(law, "draft", start=i)], 1)
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


class Strings:
    """Lets the draft write its likeliest tokens, and proposes their text in the target's tokens.

    Where the text's last token and the first drafted one would be one token of the target, the drafted text is
    encoded on its own. Tokens that do not write what the draft wrote are not proposed, nor is anything while the text
    ends inside a character.
    """

    def __init__(self, reader: Reader) -> None:
        self.reader, self.scorer = reader, reader.scorer
        self._target, self._draft, common = reader.target, reader.draft, reader.common
        mute = {number for number in range(self.scorer.vocab) if not self._draft.piece(number)}
        self._ends = {int(d): int(t) for t, d in zip(common.wanted, common.drafted, strict=True) if int(d) in mute}
        self._mute = torch.tensor(sorted(mute - set(self._ends)), dtype=torch.long)

    def propose(self, context: Context, gammas: Sequence[int]) -> Draft:
        """At most `gammas[r]` tokens per row, as many as the drafted text has."""
        reader, rows = self.reader, context.rows
        reader.follow(rows)
        wanted = [gamma if view.whole and view.ids else 0 for gamma, view in zip(gammas, reader.readings, strict=True)]
        if not any(wanted):
            return Draft.empty(len(rows), self.scorer.device)
        steps = [
            math.ceil(gamma * len(view.ids) / len(row.tokens))
            for gamma, view, row in zip(wanted, reader.readings, rows, strict=True)
        ]
        written = self._write(steps)
        drafts = [
            self._encode(view.text, new)[:gamma]
            for view, new, gamma in zip(reader.readings, written, wanted, strict=True)
        ]
        return sure(drafts, self.scorer.device, reader.windowed(list(map(len, drafts))))

    def observe(self, round: Round) -> None:
        """Nothing: the reader compares what it fed with the text of the next round."""

    def _write(self, steps: Sequence[int]) -> list[list[int]]:
        """`steps[r]` tokens of the draft per row."""
        most = max(steps) if self.scorer.context is None else min(max(steps), self.scorer.context - 1)
        logits = self.reader.catch_up(most)
        tokens = torch.empty(len(steps), 0, dtype=torch.long, device=self.scorer.device)
        for i in range(most):
            logits[..., self._mute.to(logits.device)] = float("-inf")
            tokens = torch.cat([tokens, logits.argmax(-1)], 1)
            if i + 1 < most:
                logits = self.reader.feed(tokens[:, -1:], [int(i + 1 < wanted) for wanted in steps])
        return [row[:wanted] for row, wanted in zip(tokens.tolist(), steps, strict=True)]

    def _encode(self, text: str, written: Sequence[int]) -> list[int]:
        """What the draft wrote after a text, in the target's tokens."""
        end = next((place for place, token in enumerate(written) if token in self._ends), len(written))
        raw = self._draft.write(written[:end])
        new = _whole_characters(raw)
        tail = text[-TAIL:]
        anchors = dict.fromkeys([tail[max(0, tail.find(" ")) :], "\n", ""])
        tokens = next(filter(None, (self._behind(anchor, new) for anchor in anchors)), []) if new else []
        if end < len(written) and self._target.write(tokens) == raw:
            tokens.append(self._ends[written[end]])
        return tokens

    def _behind(self, anchor: str, new: str) -> list[int]:
        """The tokens of `new` when it stands behind an anchor, as far as they write what was drafted."""
        before, both = self._target.encode(anchor), self._target.encode(anchor + new)
        if both[: len(before)] != before:
            return []
        left, tokens = new.encode(), []
        for token in both[len(before) :]:
            piece = self._target.piece(token)
            if not piece or not left.startswith(piece):
                break
            tokens.append(token)
            left = left[len(piece) :]
        return tokens


def _whole_characters(raw: bytes) -> str:
    """The text of bytes up to the first that do not belong to a whole character."""
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        return raw[: error.start].decode()
