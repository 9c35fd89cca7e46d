"""String-level exact match (SLEM): a draft's text is encoded again with the target's tokenizer."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from slipstream.core.draft import Draft
from slipstream.core.protocols import Drafter
from slipstream.core.round import Context
from slipstream.drafters.copying import sure
from slipstream.drafters.cross_tokenizer.reader import RetokenizingReader

TAIL = 48  # the number of characters before the drafted text that are encoded together with it


class StringMatch(Drafter):
    """Lets the draft model write its likeliest tokens, and drafts the same text in the target's tokens.

    If the text's last token and the first drafted one would be one token of the target, the drafted text is encoded on
    its own. Tokens that do not write the drafted text are dropped, and nothing is drafted while the text ends inside a
    character.
    """

    def __init__(self, reader: RetokenizingReader) -> None:
        self.reader, self.scorer = reader, reader.scorer
        self._target, self._draft, common = reader.target, reader.draft, reader.common
        silent = {number for number in range(self.scorer.vocab) if not self._draft.piece(number)}
        self._ends = {int(d): int(t) for t, d in zip(common.wanted, common.drafted, strict=True) if int(d) in silent}
        self._silent = torch.tensor(sorted(silent - set(self._ends)), dtype=torch.long)

    def propose(self, context: Context, gammas: Sequence[int]) -> Draft:
        reader, rows = self.reader, context.rows
        reader.follow(rows, context.watch)
        wanted = [gamma if view.whole and view.ids else 0 for gamma, view in zip(gammas, reader.readings, strict=True)]
        if not any(wanted):
            return Draft.empty(len(rows), self.scorer.device)
        steps = [
            math.ceil(gamma * len(view.ids) / len(row.tokens))
            for gamma, view, row in zip(wanted, reader.readings, rows, strict=True)
        ]
        most = max(steps) if self.scorer.context is None else min(max(steps), self.scorer.context - 1)
        logits = self.reader.catch_up(most)
        tokens = torch.empty(len(steps), 0, dtype=torch.long, device=self.scorer.device)
        for i in range(most):
            logits[..., self._silent.to(logits.device)] = float("-inf")
            tokens = torch.cat([tokens, logits.argmax(-1)], 1)
            if i + 1 < most:
                logits = self.reader.feed(tokens[:, -1:], [int(i + 1 < wanted) for wanted in steps])
        written = [row[:wanted] for row, wanted in zip(tokens.tolist(), steps, strict=True)]
        drafts = [
            self._encode(view.text, new)[:gamma]
            for view, new, gamma in zip(reader.readings, written, wanted, strict=True)
        ]
        return sure(drafts, self.scorer.device, reader.windowed(list(map(len, drafts))))

    def _encode(self, text: str, written: Sequence[int]) -> list[int]:
        end = next((place for place, token in enumerate(written) if token in self._ends), len(written))
        raw = self._draft.write(written[:end])
        try:
            new = raw.decode()
        except UnicodeDecodeError as error:
            new = raw[: error.start].decode()  # whole characters
        tail = text[-TAIL:]
        anchors = dict.fromkeys([tail[max(0, tail.find(" ")) :], "\n", ""])
        tokens = next(filter(None, (self._behind(anchor, new) for anchor in anchors)), []) if new else []
        if end < len(written) and self._target.write(tokens) == raw:
            tokens.append(self._ends[written[end]])
        return tokens

    def _behind(self, anchor: str, new: str) -> list[int]:
        """Return the tokens of `new` after an anchor, up to the first that does not write the drafted text."""
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
