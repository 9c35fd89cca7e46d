"""Draft what a grammar makes come next: the usual tokens of a text that has no choice."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.core.draft import Draft
from slipstream.core.request import Row
from slipstream.core.round import Context, Round
from slipstream.drafters.copying import grammar_of, sure


class Forced:
    """Drafts the tokens in which the only text that a row's grammar allows is usually written.

    The same text may be possible in other tokens, so the target decides as about any draft: q is a point mass, and a
    drafted x is kept with chance p(x), which is 1 where nothing else can stand. Rows without a grammar, or with a
    choice, draft nothing.
    """

    def propose(self, context: Context, gammas: Sequence[int]) -> Draft:
        """Up to `gammas[r]` tokens per row, (rows, longest)."""
        return sure([self._next(row, gamma) for row, gamma in zip(context.rows, gammas, strict=True)])

    def observe(self, round: Round) -> None:
        """Do nothing: what a grammar forces does not depend on rounds."""

    def _next(self, row: Row, gamma: int) -> list[int]:
        grammar = grammar_of(row)
        return grammar.forced(row.output)[:gamma] if grammar is not None and gamma else []
