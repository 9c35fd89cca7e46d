"""Draft by copying the tokens after an earlier occurrence of the text's longest suffix (section 3.6 of the paper).

It needs no model, so that c is about 0; it is strong where the output repeats its prompt or itself (edits, summaries,
code, tables). The match is exact and of any length: a suffix automaton (Blumer et al. 1985) grows with the text, as in
SAM decoding (arXiv 2411.10666); the draft grows with the match, as in suffix decoding (arXiv 2411.04975).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

from slipstream.core.draft import Draft
from slipstream.core.protocols import Traits
from slipstream.core.request import Row
from slipstream.core.round import Context, Round
from slipstream.drafters.copying import ByRow, ended, source_tokens, sure
from slipstream.drafters.suffix_automaton import SuffixAutomaton


class Lookup:
    """Copies the tokens after the latest earlier occurrence of the longest suffix of prompt (or source) and output.

    A match of m tokens drafts at most factor * m + offset tokens, never more than gamma; without a match the round
    is a plain step. q is a point mass, so a drafted x is kept with chance p(x). In texts that loop with more than
    DEPTH nested repeats, the occurrence may be an older one. Tokens are on the CPU.
    """

    traits = Traits(by_text=True)

    def __init__(
        self,
        prompt_lookup_num_tokens: int | None = None,
        max_matching_ngram_size: int | None = None,
        min_matching_ngram_size: int = 1,
        factor: float = 1.0,
        offset: float = 1.0,
        vocab: int = 0,
    ) -> None:
        """Make the drafter, with settings named as in transformers.

        At most `prompt_lookup_num_tokens` are drafted (None: gamma). As in transformers, a longer match counts as one
        of `max_matching_ngram_size` (None: no limit); one shorter than `min_matching_ngram_size` does not count.
        `vocab` is the target's; without it, nothing is copied from the source of an encoder-decoder. Raises ValueError
        for settings under which nothing can be drafted.
        """
        largest = sys.maxsize if max_matching_ngram_size is None else max_matching_ngram_size
        most = sys.maxsize if prompt_lookup_num_tokens is None else prompt_lookup_num_tokens
        for name, value, least, words in (
            ("prompt_lookup_num_tokens", most, 1, "1 or more"),
            ("min_matching_ngram_size", min_matching_ngram_size, 1, "1 or more"),
            ("max_matching_ngram_size", largest, min_matching_ngram_size, "at least min_matching_ngram_size"),
            ("factor", factor, 0, "0 or more"),
            ("factor * max_matching_ngram_size + offset", factor * largest + offset, 1, "1 or more"),
        ):
            if not least <= value < math.inf:  # NaN is refused as well
                raise ValueError(f"{name}={value} is not possible: it must be {words}.")
        self.prompt_lookup_num_tokens = prompt_lookup_num_tokens
        self.max_matching_ngram_size = max_matching_ngram_size
        self.min_matching_ngram_size = min_matching_ngram_size
        self.factor, self.offset, self.vocab = factor, offset, vocab
        # The automaton of every running row; rows that have ended, or were garbage collected, are dropped.
        self.automata: ByRow[SuffixAutomaton] = ByRow()

    def propose(self, context: Context, gammas: Sequence[int]) -> Draft:
        """Draft up to `gammas[r]` copied tokens per row, (rows, longest), none if nothing matches."""
        self.automata.follow(context.rows, lambda row: SuffixAutomaton(self.max_matching_ngram_size))
        return sure([self._copy(row, gamma) for row, gamma in zip(context.rows, gammas, strict=True)])

    def observe(self, round: Round) -> None:
        """Drop the rows that have ended; the automata of others are extended when they draft."""
        for row in round.rows:
            if row.finish_reason:
                self.automata.forget(row)

    def _copy(self, row: Row, gamma: int) -> list[int]:
        """Return up to `gamma` tokens that followed the longest repeated suffix of a row's text; [] without a match."""
        if not gamma:
            return []
        automaton = self.automata[row]
        automaton.follow([*source_tokens(row, self.vocab), *row.tokens])
        if automaton.length < self.min_matching_ngram_size:
            return []
        most = min(gamma, self.prompt_lookup_num_tokens or gamma, int(self.factor * automaton.length + self.offset))
        return ended(automaton.following(most), row)
