"""Draft by copying the tokens after an earlier occurrence of the text's longest suffix (section 3.6 of the paper).

It needs no model, so that c is about 0; it is strong where the output repeats its prompt or itself (edits, summaries,
code, tables). The match is exact and of any length: a suffix automaton (Blumer et al. 1985) grows with the text, as in
SAM decoding (arXiv 2411.10666); the draft grows with the match, as in suffix decoding (arXiv 2411.04975).
"""

import math
import sys

from slipstream.core.protocols import Traits
from slipstream.core.request import Row
from slipstream.drafters.copying import CopyingDrafter, SuffixAutomaton, source_tokens

MOST = 8  # the number of tokens copied from a prediction per round by default


class Prediction(CopyingDrafter[SuffixAutomaton]):
    """Copies from `Request.prediction` as long as the target agrees, and by matching suffixes after that.

    While the output is a prefix of the prediction, the draft is its continuation. After that, it is what followed the
    longest suffix of prompt, prediction and output when it occurred before, as in `Lookup`. Nothing is drafted for rows
    without a prediction. q is a point mass, so a drafted x is kept with chance p(x).
    """

    def begin(self, row: Row) -> SuffixAutomaton:
        return SuffixAutomaton()

    def copy(self, row: Row, gamma: int) -> list[int]:
        prediction, output = row.request.prediction, row.output
        if not prediction:
            return []
        # The suffix of an output that has just begun may occur in many places.
        if tuple(output) == prediction[: len(output)] and len(output) < len(prediction):
            return list(prediction[len(output) : len(output) + gamma])
        automaton = self.known[row]
        automaton.follow([*row.request.prompt, *prediction, *output])
        return automaton.following(gamma)


class Lookup(CopyingDrafter[SuffixAutomaton]):
    """Copies the tokens after the latest earlier occurrence of the longest suffix of prompt (or source) and output.

    A match of m tokens drafts at most factor * m + offset tokens, never more than gamma; without a match the round
    is a plain step. q is a point mass, so a drafted x is kept with chance p(x). In texts that loop with more than
    DEPTH nested repeats, the occurrence may be an older one.
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
        super().__init__()
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

    def begin(self, row: Row) -> SuffixAutomaton:
        return SuffixAutomaton(self.max_matching_ngram_size)

    def copy(self, row: Row, gamma: int) -> list[int]:
        automaton = self.known[row]
        automaton.follow([*source_tokens(row, self.vocab), *row.tokens])
        if automaton.length < self.min_matching_ngram_size:
            return []
        most = min(gamma, self.prompt_lookup_num_tokens or gamma, int(self.factor * automaton.length + self.offset))
        return automaton.following(most)
