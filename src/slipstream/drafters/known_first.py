"""Draft predictions and forced texts first; for other rows, use another drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from slipstream.core.draft import Draft, ScopedDraft
from slipstream.core.protocols import Drafter, Traits, scorers_among
from slipstream.core.request import Row
from slipstream.core.round import Context, Round
from slipstream.drafters.choice import merge
from slipstream.drafters.copying import CopyingDrafter, grammar_of
from slipstream.drafters.lookup import Prediction
from slipstream.drafters.tree import TreeDrafter


class Forced(CopyingDrafter[None]):
    """Drafts the usual tokens of the next text where a row's grammar allows only one.

    The same text may be possible in other tokens, so the target verifies it as any draft: a drafted x is kept with
    chance p(x), which is 1 if no other token is allowed.
    """

    def begin(self, row: Row) -> None: ...

    def copy(self, row: Row, gamma: int) -> list[int]:
        grammar = grammar_of(row)
        return [] if grammar is None else grammar.forced(row.output)[:gamma]


class KnownFirst:
    """Copies from predictions and drafts what grammars force; rows for which that gives nothing use another drafter.

    In rounds of rows without either, the other drafter makes the whole draft, and its draws have the same names in all
    rounds, so that a text does not depend on the other rows. Copied tokens of predictions are counted in the rows'
    statistics. Raises ValueError for a drafter of trees, which cannot share a round with chains.
    """

    def __init__(self, inner: Drafter) -> None:
        if isinstance(inner, TreeDrafter):
            raise ValueError(
                "predictions and forced tokens are drafted as chains, which share no round with a tree: leave the tree "
                "out."
            )
        self.inner, self.prediction, self.forced = inner, Prediction(), Forced()
        self._copied: tuple[int, ...] = ()  # places of the rows in this round whose draft is a copy of their prediction
        self.traits = Traits(scorers_among([inner]), drafters=(inner,))

    def propose(self, context: Context, gammas: Sequence[int]) -> Draft:
        self._copied = ()
        if not any(row.request.prediction or grammar_of(row) for row in context.rows):
            return self.inner.propose(context, gammas)
        left, drafts = list(gammas), list[Draft]()
        for drafter in (self.prediction, self.forced, self.inner):
            drafts.append(drafter.propose(context, left))
            left = [0 if length else gamma for gamma, length in zip(left, drafts[-1].lengths, strict=True)]
        parts = [ScopedDraft("", draft, rows) for draft in drafts if (rows := _served(draft))]
        self._copied = _served(drafts[0])
        return parts[0].draft if len(parts) == 1 else replace(merge(drafts), parts=tuple(parts))

    def observe(self, round: Round) -> None:
        for place in self._copied:
            stats = round.rows[place].stats
            stats.predicted += round.draft.lengths[place]
            stats.predicted_accepted += round.accepted[place]
        for drafter in (self.prediction, self.forced, self.inner):
            drafter.observe(round)


def _served(draft: Draft) -> tuple[int, ...]:
    return tuple(place for place, length in enumerate(draft.lengths) if length)
