"""Server-sent events: chunks of an answer as they are made, or an error as the last event if one happens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from slipstream.engine.generation import Piece
from slipstream.serve.answers import Answer, Explained
from slipstream.serve.call import Call, Heading, unless_gone
from slipstream.serve.faults import ServeError, error_body
from slipstream.serve.json_route import off_loop
from slipstream.serve.options import speculation
from slipstream.serve.output import DONE
from slipstream.serve.schema import Decoding, StreamOptions
from slipstream.serve.state import ServerState
from slipstream.text.jsontext import json_text

LAST = f"data: {DONE}\n\n"
"""The last event of a stream."""

HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # proxies must not hold chunks back


def event(answer: Answer, name: str | None = None) -> str:
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


class Answering(Protocol):
    """Makes the answer from a call, as a whole, of the pieces of its texts, or in events."""

    call: Call

    def whole(self, texts: Sequence[Sequence[Piece]]) -> Response: ...
    def events(self) -> AsyncIterator[str]: ...


async def reply(request: Request, answering: Answering, stream: bool | None) -> Response:
    """Return the response to a request: streamed, or whole, made beside the event loop, unless the client goes."""
    if stream:
        return EventStream(answering.events(), answering.call)
    texts = await unless_gone(request, answering.call.collect())
    return await off_loop(request, answering.whole, texts)


class ChunkAnswering:
    """What answers of chats and completions share: a heading, chunks, and what stands in them besides the text."""

    def __init__(
        self, prefix: str, chunk: Callable[..., Answer], state: ServerState, body: Decoding, call: Call
    ) -> None:
        self.state, self.body, self.call, self.chunk = state, body, call, chunk
        self.heading = Heading.new(prefix, state.model)
        self.stream, self.speculation = body.stream_options or StreamOptions(), speculation(body)

    def explained(self, pieces: Sequence[Piece]) -> list[Explained] | None:
        """Return the source of every token and those refused in its place; None unless the request asks for that."""
        if not self.speculation.explain:
            return None
        spell = self.state.spelling.text
        return [
            Explained(text=each.text, token=each.token, source=each.source, refused=list(map(spell, each.refused)))
            for each in pieces
        ]

    def event(self, choices: list[Any], usage: bool = False, ended: bool = False) -> str:
        wanted = {"usage": usage, "timings": ended or self.body.timings_per_token}
        about = self.call.about(self.speculation) if ended or any(wanted.values()) else {}
        further = {name: value for name, value in about.items() if wanted.get(name, ended)}
        return event(self.chunk(**self.heading.fields, choices=choices, **further))

    def last_events(self) -> list[str]:
        """Return the end of a stream: the usage, if it was requested, and the mark."""
        return [*([self.event([], usage=True, ended=True)] if self.stream.include_usage else []), LAST]
