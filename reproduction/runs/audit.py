"""Measures how far the law of a method with its own model is from the target's, which scores the method's texts."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from reproduction.runs.subjects import Subject
from slipstream.core.law import Law, total_variation
from slipstream.core.request import Request, Row
from slipstream.core.round import Round
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.generate import rounds


class Laws:
    """Decodes like `rounds`, one text at a time, and stores the law from which every token was emitted."""

    def __init__(self) -> None:
        self.rows: dict[int, Row] = {}
        self._laws: list[Law] = []

    def play(self, decoder: Decoder, requests: Sequence[Request]) -> Iterator[Round]:
        """Decode the requests, and yield the rounds."""
        for round in rounds(decoder, requests):
            assert round.p is not None and len(round.rows) == 1, "one text at a time, with models"
            self.rows[id(round.rows[0])] = round.rows[0]
            self._laws.append(round.p.first(len(round.tokens[0])).bare())
            yield round

    def distances(self, subject: Subject, temperature: float) -> Tensor:
        """Return the total variation of every token's law from the target's on the same prefix, (tokens,).

        At temperature 0 it is 1 for tokens that the target would not have chosen, and 0 for others.
        """
        p = torch.cat([_target_laws(subject, row, temperature) for row in self.rows.values()])
        if not temperature:
            chosen = torch.cat([law.tokens[0] for law in self._laws if law.tokens is not None])
            return (chosen != p.argmax(-1)).float()
        return total_variation(torch.cat([law.dense[0] for law in self._laws]), p)


def _target_laws(subject: Subject, row: Row, temperature: float) -> Tensor:
    """Return the target's law at every token of the output, (tokens, vocab); for temperature 0 at temperature 1."""
    target = subject.engine.decoder.target
    logits = target.alone(row.tokens)[0, len(row.request.prompt) - 1 : -1]  # type: ignore[attr-defined]
    return (logits.float() / (temperature or 1.0)).softmax(-1)
