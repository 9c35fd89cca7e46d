"""Draft from a prediction: what the caller expects the output to be is copied as long as the target agrees.

The prediction stands between prompt and output for the copying, and no model ever reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from slipstream.core.draft import Draft, Part
from slipstream.core.protocols import Drafter, Scorer, scorers_among
from slipstream.core.request import Row
from slipstream.core.round import Context, Round
from slipstream.drafters.choice import merge
from slipstream.drafters.copying import ByRow, ended, sure
from slipstream.drafters.suffix_automaton import SuffixAutomaton
from slipstream.drafters.tree import TreeDrafter

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


class PredictionFirst:
    """Copies from the prediction for rows that have one, and lets another drafter draft where that gives nothing.

    Rounds without a prediction are the other drafter's alone, and its draws have the same names in all rounds: what
    becomes of a text does not depend on whether others have predictions. What was copied is counted in the rows'
    statistics. Raises ValueError for a drafter of trees, beside which chains cannot be verified.
    """

    def __init__(self, inner: Drafter) -> None:
        if isinstance(inner, TreeDrafter):
            raise ValueError("predictions are copied as chains, beside which a tree cannot run: leave the tree out.")
        self.inner, self.prediction = inner, Prediction()
        self._copied: tuple[int, ...] = ()  # rows of the present round whose draft is a copy

    @property
    def scorers(self) -> tuple[Scorer, ...]:
        """The models of the other drafter."""
        return scorers_among([self.inner])

    def propose(self, context: Context, gammas: Sequence[int]) -> Draft:
        """Up to `gammas[r]` tokens per row, copied where that is possible."""
        self._copied = ()
        if not any(row.request.prediction for row in context.rows):
            return self.inner.propose(context, gammas)
        copies = self.prediction.propose(context, gammas)
        self._copied = tuple(row for row, length in enumerate(copies.lengths) if length)
        left = [0 if length else gamma for gamma, length in zip(gammas, copies.lengths, strict=True)]
        draft = self.inner.propose(context, left)
        drafted = tuple(row for row, length in enumerate(draft.lengths) if length)
        if not self._copied or not drafted:
            return copies if self._copied else draft
        return replace(merge([copies, draft]), parts=(Part("", copies, self._copied), Part("", draft, drafted)))

    def observe(self, round: Round) -> None:
        """Count what was copied, and let both see the round."""
        for place in self._copied:
            stats = round.rows[place].stats
            stats.predicted += round.draft.lengths[place]
            stats.predicted_accepted += round.accepted[place]
        self.prediction.observe(round)
        self.inner.observe(round)
