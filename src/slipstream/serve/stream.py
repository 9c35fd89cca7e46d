"""Server-sent events: chunks of an answer as they are made, or an error as the last event if one happens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from slipstream.engine.generation import Piece
from slipstream.serve.answers import Answer, Explained
from slipstream.serve.call import Call, new_heading, unless_gone
from slipstream.serve.faults import ServeError, error_body
from slipstream.serve.json_route import off_loop
from slipstream.serve.options import speculation
from slipstream.serve.output import DONE, with_choices
from slipstream.serve.response_schema import ResponsesRequest
from slipstream.serve.schema import Decoding, StreamOptions
from slipstream.serve.state import ServerState
from slipstream.text.jsontext import json_text

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


class Answering:
    """Makes the answer to a request from its call: as a whole, of the pieces of its texts, or in events."""

    prefix = ""  # that of the answer's id

    def __init__(self, state: ServerState, body: Decoding | ResponsesRequest, call: Call) -> None:
        self.state, self.body, self.call = state, body, call
        self.heading, self.speculation = new_heading(self.prefix, state.model), speculation(body)

    async def reply(self, request: Request) -> Response:
        """Return the response: streamed, or whole, made beside the event loop, unless the client goes."""
        if self.body.stream:
            return EventStream(self.events(), self.call)
        return await off_loop(request, self.whole, await unless_gone(request, self.call.collect()))

    def whole(self, texts: Sequence[Sequence[Piece]]) -> Response:
        raise NotImplementedError

    def events(self) -> AsyncIterator[str]:
        raise NotImplementedError


class ChunkAnswering(Answering):
    """What answers of chats and completions share: choices, chunks of them, and what stands there besides the text."""

    answer: type[Any]
    chunk: type[Any]

    def __init__(self, state: ServerState, body: Decoding, call: Call) -> None:
        super().__init__(state, body, call)
        self.options, self.timed = body.stream_options or StreamOptions(), body.timings_per_token

    def choices(self, texts: Sequence[Sequence[Piece]]) -> list[Any]:
        raise NotImplementedError

    def chunks(self, index: int, pieces: Sequence[Piece]) -> list[Any]:
        """Return the choices of chunks, one each, for what a round gave to a text."""
        raise NotImplementedError

    def whole(self, texts: Sequence[Sequence[Piece]]) -> Response:
        empty = self.answer(**self.heading, choices=[], **self.call.about(self.speculation))
        return with_choices(empty, self.choices(texts))

    async def events(self) -> AsyncIterator[str]:
        async for index, pieces in self.call.rounds():
            for choice in self.chunks(index, pieces):
                yield self._event(choice)
        if self.options.include_usage:
            yield self._event(None)
        yield f"data: {DONE}\n\n"

    def _event(self, choice: Any) -> str:
        ended = choice is None or choice.finish_reason is not None
        usage = choice is None or self.options.continuous_usage_stats
        wanted = {"usage": usage, "timings": ended or self.timed}
        about = self.call.about(self.speculation) if ended or any(wanted.values()) else {}
        further = {name: value for name, value in about.items() if wanted.get(name, ended)}
        return event(self.chunk(**self.heading, choices=[] if choice is None else [choice], **further))

    def explained(self, pieces: Sequence[Piece]) -> list[Explained] | None:
        if not self.speculation.explain:
            return None
        spell = self.state.spelling.text
        return [
            Explained(text=each.text, token=each.token, source=each.source, refused=list(map(spell, each.refused)))
            for each in pieces
        ]
