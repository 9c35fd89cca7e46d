"""Decodes requests to their end: `rounds` yields every round, `generate` returns the rows, `plain` is the baseline."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from slipstream.core.request import Request, Row
from slipstream.core.round import Round
from slipstream.decoding.controllers import Fixed
from slipstream.decoding.decoder import Decoder, NoDraft
from slipstream.decoding.scheduler import Scheduler, check_requests


def rounds(decoder: Decoder, requests: Sequence[Request]) -> Iterator[Round]:
    """Decode the requests, at most `batch_size` at a time, a new one joining as soon as one ends.

    Raises ValueError before any work if a prompt is empty or longer than the target's context, and RuntimeError if
    another call has not ended: its stream has to be drained or closed first.
    """
    check_requests(decoder.target, requests)
    with Scheduler(decoder) as scheduler:
        for request in requests:
            scheduler.add(request)
        yield from scheduler.rounds()


def generate(decoder: Decoder, requests: Sequence[Request]) -> list[Row]:
    """Decode all requests to their end -> their rows, in order; those that failed have an `error`."""
    check_requests(decoder.target, requests)
    with Scheduler(decoder) as scheduler:
        rows = [scheduler.add(request) for request in requests]
        for _ in scheduler.rounds():
            pass
    return rows


def plain(decoder: Decoder, requests: Sequence[Request]) -> list[Row]:
    """Decode all requests without drafts, with the same target and the same counting -> their rows."""
    return generate(replace(decoder, drafter=NoDraft(), controller=Fixed(0)), requests)


def succeeded(rows: Iterable[Row]) -> list[Row]:
    """Return the rows, or raise for the first that failed: what a processor raised, else FloatingPointError."""
    rows = list(rows)
    for row in rows:
        if row.error:
            raise row.error.cause or FloatingPointError(row.error)
    return rows
