"""Draft by a model with another tokenizer: on the common tokens, or by re-encoding its text.

Both are exact with every rule. `TokenIntersection` samples from the draft's law, renormalised on the tokens that both
vocabularies have: the law q that was really sampled from (token-level intersection, arXiv 2502.05202). `StringMatch`
lets the draft write freely and encodes what it wrote with the target's tokenizer (string-level exact match, same
paper). There q is a point mass on the encoded tokens, however they were made: given the text so far, the draft is fixed
or depends on random numbers that the verifier does not use, the rules are exact for every fixed draft, and a mixture of
exact rounds is exact. For the same reason `StringMatch` may drop what it wrote, and need not sample from the draft's
law: it writes the likeliest tokens, since a point mass x is kept with chance p(x).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from slipstream.core.draft import Draft, padded
from slipstream.core.draws import Key, Purpose, draw
from slipstream.core.law import Law
from slipstream.core.protocols import Drafter, Scorer
from slipstream.core.request import Prefixes
from slipstream.core.round import Context
from slipstream.drafters.copying import sure
from slipstream.drafters.cross_tokenizer.reader import RetokenizingReader
from slipstream.drafters.cross_tokenizer.vocabulary import ABSENT, CommonTokens, Vocabulary
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
            common = self.common.translate(logits)
            hopeless = common.amax((1, 2)) == float("-inf")  # (rows,): the draft gives no common token any chance
            common = common.masked_fill(hopeless[:, None, None], 0)
            law, faults = context.law_and_faults(common, Prefixes.chain(tokens, 1), self.scorer.name)
            for place, _ in faults:  # the settings forbid all common tokens
                hopeless[place] = True
            left = [min(wanted, i) if end else wanted for wanted, end in zip(left, hopeless.tolist(), strict=True)]
            return law.bare() if max(left) > i else None

        draft = sample_chain(context, law_after, left, self.scorer.device)
        return draft if draft.law is None else replace(draft, lengths=tuple(left))


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
        return sure(drafts, self.scorer.device)

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


ENOUGH = 0.6  # the least share of common tokens with which sampling uses them (docs/tokenizers.md has the measurement)

ROWS, STEPS = 4, 32
"""The number of texts that the draft writes, and the tokens of each, to measure the share of common tokens."""

METHODS: dict[str, Callable[[RetokenizingReader], Drafter]] = {  # the drafters by the names of methods that users give
    "intersection": TokenIntersection,
    "strings": StringMatch,
}


@dataclass(frozen=True)
class BySampling(Drafter):
    """Drafts by one method in greedy rounds and by another in sampled ones, with the same cache."""

    greedy: Drafter
    sampling: Drafter

    @property
    def scorer(self) -> Any:
        return getattr(self.sampling, "scorer", None)

    def propose(self, context: Context, gammas: Any) -> Draft:
        greedy = bool(context.rows) and context.rows[0].request.sampler.greedy
        return (self.greedy if greedy else self.sampling).propose(context, gammas)


def foreign(
    target: Scorer, draft: Scorer, tokenizers: tuple[Any, Any], method: str | None = None
) -> tuple[Drafter, str]:
    """Make the drafter for a draft whose `tokenizers` (target's, draft's) differ -> it, and a sentence for the user.

    `method` is "intersection", "strings" or None: then greedy decoding uses strings, as an accepted draft needs no law
    there; sampling uses the common tokens, if their share in the draft's texts is `ENOUGH`, since a point mass x is
    only kept with chance p(x). Raises ValueError for another method, and if no token is common.
    """
    if method is not None and method not in METHODS:
        raise ValueError(f"vocabulary={method!r} is not possible: choose {' or '.join(METHODS)}.")
    target_vocabulary, draft_vocabulary = map(Vocabulary.of, tokenizers)
    common = CommonTokens.of(target_vocabulary, draft_vocabulary, (target.vocab, draft.vocab))
    reader = RetokenizingReader(draft, target_vocabulary, draft_vocabulary, common)
    part = share(reader)
    facts = (
        f"{draft.name} has another tokenizer than {target.name}; they have {len(reader.common.wanted)} tokens in "
        f"common, {part:.0%} of those in a text that the draft wrote"
    )
    if method:
        return METHODS[method](reader), f"{facts}: it drafts by {method}, as asked."
    if part < ENOUGH:
        return StringMatch(reader), f"{facts}: it drafts by strings."
    return BySampling(StringMatch(reader), TokenIntersection(reader)), (
        f"{facts}: it drafts by strings where decoding is greedy, on the common tokens where it samples."
    )


@torch.inference_mode()
def share(reader: RetokenizingReader) -> float:
    """Return the share (0 to 1) of the target's tokens that the draft has too, in texts that the draft writes."""
    end = reader.draft.role("eos")
    first = min(reader.draft.ids.values()) if end is None else end  # where the tokenizer puts nothing before a text
    scorer, begin = reader.scorer, reader.draft.prefix or (first,)
    scorer.add(ROWS)
    written = torch.empty(ROWS, 0, dtype=torch.long)
    fed = padded([begin] * ROWS, scorer.device)
    for step in range(STEPS):
        logits = scorer.extend(fed, [fed.shape[1]] * ROWS)[:, -1:]
        key = Key((0,) * ROWS, tuple(range(ROWS)), (0,) * ROWS, (step,) * ROWS, Purpose.DRAFT, scope=("share",))
        fed = draw(Law(probs=logits.float().softmax(-1)), key)
        written = torch.cat([written, fed.cpu()], 1)
    scorer.free(range(ROWS))
    texts = [reader.draft.write(row).decode(errors="ignore") for row in written.tolist()]
    tokens = [token for text in texts for token in reader.target.encode(text)]
    known = [token for token in tokens if token < len(reader.common.to_draft)]
    return sum(int(reader.common.to_draft[token]) != ABSENT for token in known) / max(1, len(tokens))
