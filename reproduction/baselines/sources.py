"""The drafts of Shallow Aggressive Decoding (arXiv 2106.04970), copied from a source that the output resembles."""

from collections.abc import Callable, Sequence

from slipstream.core.draft import Draft
from slipstream.core.protocols import Drafter, Traits
from slipstream.core.request import Row
from slipstream.core.round import Context
from slipstream.drafters.copying import ended, sure

Source = Callable[[Sequence[int]], Sequence[int]]
"""A function that returns the token ids of the source for the token ids of a prompt."""


class SourceDrafter(Drafter):
    """Drafts the rest of the source as long as the output equals its beginning.

    After the first difference nothing is drafted until the last tokens of the output (as few as suffice) occur at
    exactly one place of the source. From there the rest of the source is copied again. The controller sets how many
    tokens are copied at once; the paper copies all.
    """

    traits = Traits(by_text=True)

    def __init__(self, source: Source) -> None:
        self.source = source

    def propose(self, context: Context, gammas: Sequence[int]) -> Draft:
        return sure([self._copy(row, gamma) for row, gamma in zip(context.rows, gammas, strict=True)])

    def _copy(self, row: Row, gamma: int) -> list[int]:
        source = list(self.source(row.request.prompt))
        place = continuation(source, row.output)
        return [] if place is None else ended(source[place : place + gamma], row)


def continuation(source: Sequence[int], output: Sequence[int]) -> int | None:
    """Return the position at which the source continues an output; None if it is not unique or the source's end."""
    source, output = list(source), list(output)
    if output == source[: len(output)]:
        return len(output) if len(output) < len(source) else None
    places = list(range(1, len(source) + 1))
    for back in range(1, len(output) + 1):  # where the output's last `back` tokens end in the source
        places = [place for place in places if place >= back and source[place - back] == output[-back]]
        if len(places) < 2:
            break
    return places[0] if len(places) == 1 and places[0] < len(source) else None
