"""Where tokens came from, for requests that want to be told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.engine.generation import Piece
from slipstream.serve.answers import Explained
from slipstream.serve.logprobs import Spell


@dataclass(frozen=True)
class Explainer:
    """Tells the source of every token and what was refused, if it is `wanted`. `spell` writes single tokens."""

    spell: Spell
    wanted: bool

    def __call__(self, pieces: Sequence[Piece]) -> list[Explained] | None:
        """The tokens of pieces, with their sources; None if nobody wants to know."""
        if not self.wanted:
            return None
        return [
            Explained(text=each.text, token=each.token, source=each.source, refused=list(map(self.spell, each.refused)))
            for each in pieces
        ]
