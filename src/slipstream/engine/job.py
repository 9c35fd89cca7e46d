"""`Job`, a call that is ready to run, round by round."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

from slipstream.decoding.decoder import Decoder
from slipstream.decoding.scheduler import Scheduler
from slipstream.engine.generation import Generation, Piece
from slipstream.engine.options import Options


@dataclass(frozen=True)
class Job:
    """A call, ready to run: its decoder, its options, and the generations, those of a prompt side by side."""

    decoder: Decoder
    options: Options
    generations: list[Generation]

    def begin(self, scheduler: Scheduler) -> None:
        for index, generation in enumerate(self.generations):
            generation.row = scheduler.add(generation.request, index)

    def stream(self) -> Iterator[tuple[int, Piece]]:
        """Play rounds to the end -> each piece, with the index of its generation."""
        with Scheduler(self.decoder) as scheduler:
            self.begin(scheduler)
            for round in scheduler.rounds():
                for place, row in enumerate(round.rows):
                    for piece in self.generations[row.index].follow(round, place):
                        yield row.index, piece
            for index, one in enumerate(self.generations):
                if not one.request.max_new_tokens:  # its prompt was scored, without a round
                    yield index, one.end()

    def pieces(self) -> Iterator[Piece]:
        with closing(self.stream()) as stream:  # type: ignore[type-var]
            for _, piece in stream:
                yield piece
