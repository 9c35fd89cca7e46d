"""Server-sent events: chunks of an answer as they are made, or an error as the last event if one happens."""

from __future__ import annotations

from collections.abc import AsyncIterator

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from slipstream.serve.answers import Answer
from slipstream.serve.call import Call
from slipstream.serve.faults import ServeError, error_body
from slipstream.serve.output import DONE
from slipstream.text.jsontext import json_text

LAST = f"data: {DONE}\n\n"
"""The last event of a stream."""

HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # proxies must not hold chunks back


def event(answer: Answer, name: str | None = None) -> str:
    """Return an answer as one server-sent event."""
    line = f"event: {name}\n" if name else ""
    return f"{line}data: {answer.json_text()}\n\n"


async def _guarded(events: AsyncIterator[str]) -> AsyncIterator[str]:
    """Yield the events; an error becomes the last event, since the status has already been sent."""
    try:
        async for each in events:
            yield each
    except ServeError as error:
        yield f"data: {json_text(error.body())}\n\n"
    except Exception as error:
        yield f"data: {json_text(error_body(f'the server failed: {type(error).__name__}.', 'server_error'))}\n\n"
        raise


class EventStream(StreamingResponse):
    """A streamed response of events. A client that disconnects ends the call, even before its first token."""

    def __init__(self, events: AsyncIterator[str], call: Call) -> None:
        super().__init__(_guarded(events), media_type="text/event-stream", headers=HEADERS)
        self._call = call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._call.cancel()
