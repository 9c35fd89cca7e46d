"""Draft from a prediction: what the caller expects the output to be is copied as long as the target agrees.

The prediction stands between prompt and output for the copying, and no model ever reads it.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.core.draft import Draft
from slipstream.core.request import Row
from slipstream.core.round import Context, Round
from slipstream.drafters.copying import ByRow, ended, sure
from slipstream.drafters.suffix_automaton import SuffixAutomaton

MOST = 8
"""Tokens that are copied from a prediction per round, unless told otherwise."""


class Prediction:
    """Copies from `Request.prediction` as long as the target agrees, and finds the place again where it did not.

    While the output is the beginning of the prediction, the draft is what comes next in it. After that, it is what
    followed the longest suffix of prompt, prediction and output when it occurred before, as `Lookup` does. Rows
    without a prediction draft nothing. q is a point mass, so a drafted x is kept with chance p(x).
    """

    def __init__(self) -> None:
        self.automata: ByRow[SuffixAutomaton] = ByRow()

    def propose(self, context: Context, gammas: Sequence[int]) -> Draft:
        """Up to `gammas[r]` copied tokens per row, (rows, longest), none without a prediction or a match."""
        self.automata.follow(context.rows, lambda row: SuffixAutomaton())
        return sure([self._copy(row, gamma) for row, gamma in zip(context.rows, gammas, strict=True)])

    def observe(self, round: Round) -> None:
        """Forget the rows that have ended; the others are read when they draft."""
        for row in round.rows:
            if row.finish_reason:
                self.automata.forget(row)

    def _copy(self, row: Row, gamma: int) -> list[int]:
        prediction, output = row.request.prediction, row.output
        if not (gamma and prediction):
            return []
        # An output that has just begun says nothing yet about a place: a suffix may occur in many.
        if tuple(output) == prediction[: len(output)] and len(output) < len(prediction):
            return ended(list(prediction[len(output) : len(output) + gamma]), row)
        automaton = self.automata[row]
        automaton.follow([*row.request.prompt, *prediction, *output])
        return ended(automaton.following(gamma), row)
