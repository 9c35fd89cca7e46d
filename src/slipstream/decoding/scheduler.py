"""Which rows run: requests are checked, admitted into free places of the batch, and dismissed when they end."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from slipstream.core.protocols import Scorer
from slipstream.core.request import Request, Row
from slipstream.core.source import check_source
from slipstream.decoding.accounting import Stopwatch
from slipstream.decoding.decoder import Decoder


def check_requests(target: Scorer, requests: Sequence[Request]) -> None:
    """Raises ValueError if a prompt is empty, does not fit the target, or asks for less than one token."""
    for index, request in enumerate(requests):
        length = len(request.prompt)
        if not length:
            raise ValueError(f"prompt {index} is empty: it needs at least one token.")
        if request.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={request.max_new_tokens} is not possible: it must be at least 1.")
        if target.context and length >= target.context:
            raise ValueError(
                f"prompt {index} has {length} tokens, but {target.name} holds {target.context}; "
                f"shorten it to at most {target.context - 1}."
            )
        check_source(target.source_form, request.source, f"prompt {index}", target.name)
        if not all(0 <= token < target.vocab for token in request.prompt):
            raise ValueError(f"prompt {index} has token ids outside 0..{target.vocab - 1}, which {target.name} knows.")


def admit(decoder: Decoder, waiting: deque[Row], running: list[Row]) -> bool:
    """Fill free places of the batch; False when nothing runs any more."""
    new = [waiting.popleft() for _ in range(min(len(waiting), decoder.batch_size - len(running)))]
    if new:
        watch = Stopwatch()
        decoder.target.add(len(new), [row.request.source for row in new])
        running += new
        decoder.target.prefill([row.tokens[:-1] for row in new], first=len(running) - len(new))
        watch.lap("prefill")
        for row in new:
            row.stats.seconds["prefill"] = watch.laps["prefill"] / len(new)
    return bool(running)


def dismiss(decoder: Decoder, running: list[Row]) -> None:
    """Free the rows that have ended, or that fill the target's context."""
    full = decoder.target.context
    for row in running:
        if not row.finish_reason and full and len(row.tokens) >= full:
            row.finish_reason = "length"
    ended = [place for place, row in enumerate(running) if row.finish_reason]
    if ended:
        decoder.target.free(ended)
        running[:] = [row for row in running if not row.finish_reason]
