"""The sources of tokens, for requests with `explain`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.engine.generation import Piece
from slipstream.serve.answers import Explained
from slipstream.serve.logprobs import Spell


@dataclass(frozen=True)
class Explainer:
    """Lists the source of every token and the rejected ones, if it is `wanted`. `spell` returns the text of a token."""

    spell: Spell
    wanted: bool

    def __call__(self, pieces: Sequence[Piece]) -> list[Explained] | None:
        if not self.wanted:
            return None
        return [
            Explained(text=each.text, token=each.token, source=each.source, refused=list(map(self.spell, each.refused)))
            for each in pieces
        ]
