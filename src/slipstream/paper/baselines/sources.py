"""Shallow Aggressive Decoding's guesses (arXiv 2106.04970): the source is the draft of a text that resembles it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from slipstream.core.draft import Draft
from slipstream.core.request import Row
from slipstream.core.round import Context, Round
from slipstream.drafters.copying import ended, sure

Source = Callable[[Sequence[int]], Sequence[int]]
"""Finds the source in the token ids of a prompt."""


class SourceDrafter:
    """Copies the rest of the source as long as the output is its beginning.

    After the first difference a round is a plain step, until the last tokens of the output occur at one place of the
    source alone: the fewest for which that holds. From there the rest of the source is copied again. How much of it at
    once is the controller's to say; the paper copies all of it.
    """

    by_text = True

    def __init__(self, source: Source) -> None:
        self.source = source

    def propose(self, context: Context, gammas: Sequence[int]) -> Draft:
        """Up to `gammas[r]` copied tokens per row, none where the output has left the source."""
        return sure([self._copy(row, gamma) for row, gamma in zip(context.rows, gammas, strict=True)])

    def observe(self, round: Round) -> None:
        """Nothing is remembered: the texts say it all."""

    def _copy(self, row: Row, gamma: int) -> list[int]:
        source = list(self.source(row.request.prompt))
        place = continuation(source, row.output)
        return [] if place is None else ended(source[place : place + gamma], row)


def continuation(source: Sequence[int], output: Sequence[int]) -> int | None:
    """Where the source goes on from an output; None if the output has left it, or stands at its end."""
    source, output = list(source), list(output)
    if output == source[: len(output)]:
        return len(output) if len(output) < len(source) else None
    places = list(range(1, len(source) + 1))
    for back in range(1, len(output) + 1):  # where the output's last `back` tokens end in the source
        places = [place for place in places if place >= back and source[place - back] == output[-back]]
        if len(places) < 2:
            break
    return places[0] if len(places) == 1 and places[0] < len(source) else None
