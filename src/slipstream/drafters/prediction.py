"""Draft from a prediction, the text that the caller expects: it is copied as long as the target agrees.

For copying, the prediction is placed between prompt and output; no model ever reads it.
"""

from __future__ import annotations

from slipstream.core.request import Row
from slipstream.drafters.copying import CopyingDrafter
from slipstream.drafters.suffix_automaton import SuffixAutomaton

MOST = 8
"""The number of tokens copied from a prediction per round by default."""


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
