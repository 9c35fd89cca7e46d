"""Draft the text that a grammar forces, in its usual tokens."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.core.draft import Draft
from slipstream.core.round import Context, Round
from slipstream.drafters.copying import grammar_of, sure


class Forced:
    """Drafts the usual tokens of the next text where a row's grammar allows only one.

    The same text may be possible in other tokens, so the target verifies it as any draft: q is a point mass, and a
    drafted x is kept with chance p(x), which is 1 if no other token is allowed. Nothing is drafted for rows without a
    grammar, or whose grammar allows several texts.
    """

    def propose(self, context: Context, gammas: Sequence[int]) -> Draft:
        """Draft up to `gammas[r]` forced tokens per row, (rows, longest)."""
        copies = list[list[int]]()
        for row, gamma in zip(context.rows, gammas, strict=True):
            grammar = grammar_of(row)
            copies.append(grammar.forced(row.output)[:gamma] if grammar is not None and gamma else [])
        return sure(copies)

    def observe(self, round: Round) -> None:
        """Do nothing: what a grammar forces does not depend on rounds."""
