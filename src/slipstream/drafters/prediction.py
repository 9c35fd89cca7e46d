"""Draft from a prediction, the text that the caller expects: it is copied as long as the target agrees.

For copying, the prediction is placed between prompt and output; no model ever reads it.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.core.draft import Draft
from slipstream.core.request import Row
from slipstream.core.round import Context, Round
from slipstream.drafters.copying import ByRow, ended, sure
from slipstream.drafters.suffix_automaton import SuffixAutomaton

MOST = 8
"""The number of tokens copied from a prediction per round by default."""


class Prediction:
    """Copies from `Request.prediction` as long as the target agrees, and by matching suffixes after that.

    While the output is a prefix of the prediction, the draft is its continuation. After that, it is what followed the
    longest suffix of prompt, prediction and output when it occurred before, as in `Lookup`. Nothing is drafted for rows
    without a prediction. q is a point mass, so a drafted x is kept with chance p(x).
    """

    def __init__(self) -> None:
        self.automata: ByRow[SuffixAutomaton] = ByRow()

    def propose(self, context: Context, gammas: Sequence[int]) -> Draft:
        """Draft up to `gammas[r]` copied tokens per row, (rows, longest), none without a prediction or a match."""
        self.automata.follow(context.rows, lambda row: SuffixAutomaton())
        return sure([self._copy(row, gamma) for row, gamma in zip(context.rows, gammas, strict=True)])

    def observe(self, round: Round) -> None:
        """Drop the rows that have ended; the automata of others are extended when they draft."""
        for row in round.rows:
            if row.finish_reason:
                self.automata.forget(row)

    def _copy(self, row: Row, gamma: int) -> list[int]:
        """Return up to `gamma` tokens of a row's prediction that continue its output; [] without a match."""
        prediction, output = row.request.prediction, row.output
        if not (gamma and prediction):
            return []
        # The suffix of an output that has just begun may occur in many places.
        if tuple(output) == prediction[: len(output)] and len(output) < len(prediction):
            return ended(list(prediction[len(output) : len(output) + gamma]), row)
        automaton = self.automata[row]
        automaton.follow([*row.request.prompt, *prediction, *output])
        return ended(automaton.following(gamma), row)
