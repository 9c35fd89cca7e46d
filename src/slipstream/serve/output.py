"""How answers are sent: as a whole, or as server-sent events, in which an error becomes the last one."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from slipstream.core.law import ModelFault
from slipstream.engine.generation import Completion, Piece
from slipstream.serve.answers import Answer, Common, ErrorAnswer, Explained
from slipstream.serve.call import Call, new_heading, unless_gone
from slipstream.serve.faults import BadRequest, ServeError, ServiceUnavailable, error_body
from slipstream.serve.json_route import off_loop
from slipstream.serve.options import speculation
from slipstream.serve.response_schema import ResponsesRequest
from slipstream.serve.schema import Decoding, StreamOptions
from slipstream.serve.state import ServerState
from slipstream.text.jsontext import json_text

DONE = "[DONE]"  # data of the last event of a stream
ERRORS: dict[int | str, dict[str, Any]] = {  # possible errors by status, for the OpenAPI description
    status: {"model": ErrorAnswer, "description": text}
    for status, text in {
        400: "The request cannot be served as it is; `param` names the field.",
        401: "No valid key was sent.",
        404: "The model is not served here.",
        413: "The body is too long.",
        429: "Too many requests wait; try again later.",
        500: "The text could not be finished.",
        503: "The server is starting, ending, or has lost its worker.",
    }.items()
}
ERRORS[401]["headers"] = {"WWW-Authenticate": {"required": True, "schema": {"type": "string"}}}
ERRORS[429]["headers"] = {"Retry-After": {"required": True, "schema": {"type": "string"}}}


def streams(chunk: type[Answer]) -> dict[str, Any]:
    """Return the OpenAPI description of an answer sent whole or, with `stream`, in chunks as server-sent events."""
    forms = [{"$ref": f"#/components/schemas/{model.__name__}"} for model in (chunk, ErrorAnswer)]
    payload = {"contentMediaType": "application/json", "contentSchema": {"anyOf": forms}}
    data = {"type": "string", "anyOf": [{"const": DONE}, payload]}
    each = {"type": "object", "required": ["data"], "properties": {"event": {"type": "string"}, "data": data}}
    return {
        "description": "The answer, or with `stream` its chunks as server-sent events.",
        "content": {"text/event-stream": {"itemSchema": each}},
    }


def answered(answer: Answer) -> Response:
    return Response(answer.json_text(), media_type="application/json")


def with_choices(answer: Common, choices: Sequence[Answer]) -> Response:
    """Return an answer, whose choices are empty, with these as an HTTP response.
    They become text one by one: while one does, no other thread runs."""
    text = ",".join(each.json_text() for each in choices)
    whole = answer.json_text().replace('"choices":[]', f'"choices":[{text}]', 1)
    return Response(whole, media_type="application/json")


def finish_reason(completion: Completion) -> str:
    """Return the finish reason under OpenAI's names.

    Raises ServeError for a text that was not finished: by the model's fault, by that of the request (BadRequest), such
    as a grammar that forbids every token, or because the server ended (Unavailable).
    """
    if completion.error:
        raise (ServeError if isinstance(completion.error, ModelFault) else BadRequest)(completion.error)
    if completion.finish_reason in ("abort", "interrupted"):
        raise ServiceUnavailable("the server ended before the text was finished: ask again later.")
    return "stop" if completion.finish_reason == "stop" else "length"


def completed(pieces: Sequence[Piece]) -> Completion:
    completion = pieces[-1].completion
    assert completion is not None, "the last piece of a text has its completion"
    return completion


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
