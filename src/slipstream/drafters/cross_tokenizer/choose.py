"""Choose the method for a draft with another tokenizer, and describe the choice in a sentence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.core.draft import Draft, padded
from slipstream.core.draws import Key, Purpose, draw
from slipstream.core.law import Law
from slipstream.core.protocols import Drafter, Scorer
from slipstream.core.round import Context
from slipstream.drafters.cross_tokenizer.reader import RetokenizingReader
from slipstream.drafters.cross_tokenizer.string_match import StringMatch
from slipstream.drafters.cross_tokenizer.token_intersection import TokenIntersection
from slipstream.drafters.cross_tokenizer.vocabulary import ABSENT, CommonTokens, Vocabulary

ENOUGH = 0.6  # the least share of common tokens with which sampling uses them (docs/tokenizers.md has the measurement)

ROWS, STEPS = 4, 32
"""The number of texts that the draft writes, and the tokens of each, to measure the share of common tokens."""

METHODS: dict[str, Callable[[RetokenizingReader], Drafter]] = {
    "intersection": TokenIntersection,
    "strings": StringMatch,
}
"""The drafters by the names of methods that users give."""


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
    theirs, ours = map(Vocabulary.of, tokenizers)
    reader = RetokenizingReader(draft, theirs, ours, CommonTokens.of(theirs, ours, (target.vocab, draft.vocab)))
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
