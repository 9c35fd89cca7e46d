"""Decoding requests to their end: `rounds` yields every round, `generate` drains it, `plain` is the baseline."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from slipstream.core.request import Request, Row
from slipstream.core.round import Round
from slipstream.decoding.controllers import Fixed
from slipstream.decoding.decoder import Decoder, NoDraft
from slipstream.decoding.scheduler import admit, check_requests, dismiss
from slipstream.decoding.speculate import play_round


def rounds(decoder: Decoder, requests: Sequence[Request], numbers: Sequence[int] | None = None) -> Iterator[Round]:
    """Decode the requests, at most `batch_size` at a time, a new one joining as soon as one ends.

    `numbers` are the indices of their rows, where they are not 0, 1, 2 ...

    Raises ValueError before any work if a prompt is empty or longer than the target's context, and RuntimeError if
    another call has not ended: its stream has to be drained or closed first.
    """
    check_requests(decoder.target, requests)
    if decoder.target.lengths:
        raise RuntimeError(f"{decoder.target.name} serves one call at a time: drain or close the stream before.")
    counted = zip(range(len(requests)) if numbers is None else numbers, requests, strict=True)
    everyone = [Row(request, index, list(request.prompt)) for index, request in counted]
    for _, group in groupby(everyone, key=lambda row: row.request.sampler.greedy):
        waiting, running = deque(group), list[Row]()
        state = decoder.controller.init()
        try:
            while admit(decoder, waiting, running):
                round = play_round(decoder, running, decoder.controller.gammas(state, running))
                state = decoder.controller.update(state, round)
                dismiss(decoder, running)
                yield round
        finally:
            decoder.target.free(range(len(decoder.target.lengths)))


def generate(decoder: Decoder, requests: Sequence[Request]) -> list[Row]:
    """Decode all requests to their end -> their rows, in order; those that failed have an `error`."""
    rows = {row.index: row for round in rounds(decoder, requests) for row in round.rows}
    return [rows[index] for index in range(len(requests))]


def plain(decoder: Decoder, requests: Sequence[Request]) -> list[Row]:
    """Ordinary decoding with the same target, counted by the same code."""
    return generate(replace(decoder, drafter=NoDraft(), controller=Fixed(0)), requests)


def sound(rows: Iterable[Row]) -> list[Row]:
    """The same rows. For the first that failed, raises what a processor raised, or else FloatingPointError."""
    rows = list(rows)
    for row in rows:
        if row.error:
            raise row.error.cause or FloatingPointError(row.error)
    return rows
