"""/v1/responses: text in, text out, in the newer form of OpenAI's interface. Nothing is stored."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.concurrency import run_in_threadpool

from slipstream.engine.generation import Completion
from slipstream.engine.requests import Chat
from slipstream.serve.call import Call, Heading, unless_gone
from slipstream.serve.grammars import constraint
from slipstream.serve.json_route import JsonRoute, Once
from slipstream.serve.options import engine_options, speculation
from slipstream.serve.output import ERRORS, answered, completed, finish_reason, streams
from slipstream.serve.response_answers import (
    Incomplete,
    InputDetails,
    OutputMessage,
    OutputText,
    ResponseAnswer,
    ResponseEvent,
    ResponseUsage,
)
from slipstream.serve.schema import Decoding, JsonSchema, ResponseFormat, ResponsesRequest
from slipstream.serve.state import ServerState, state_of, tenant_of
from slipstream.serve.stream import EventStream, event

router = APIRouter(tags=["text"], route_class=JsonRoute)

OUTCOMES = {**ERRORS, 200: streams(ResponseEvent)}


@router.post("/v1/responses", responses=OUTCOMES, response_model=ResponseAnswer)
async def responses(body: Once[ResponsesRequest], request: Request) -> Response:
    """Answer a text or a chat."""
    state = state_of(request)
    state.check_model(body.model)
    options = engine_options(_decoding(body), state.settings, tenant_of(request))
    options["max_new_tokens"] = body.max_output_tokens or state.longest
    options |= await run_in_threadpool(constraint, _decoding(body), state)
    call = await state.call(request, [_prompt(body, state)], options, "input")
    answer = _Answer(state, body, call)
    if body.stream:
        return EventStream(answer.events(), call)
    return answered(await unless_gone(request, answer.whole()))


def _decoding(body: ResponsesRequest) -> Decoding:
    """Return the fields that all requests for text have, under their usual names."""
    form = body.text.format if body.text else None
    response_format = None
    if form is not None:
        schema = JsonSchema(name=form.name or "answer", schema=form.schema_) if form.schema_ is not None else None
        response_format = ResponseFormat(type=form.type, json_schema=schema)
    sampled: dict[str, Any] = {"temperature": body.temperature, "top_p": body.top_p}
    return Decoding(**sampled, response_format=response_format, speculative=body.speculative)


def _prompt(body: ResponsesRequest, state: ServerState) -> Any:
    """Return a chat; or the text itself if the model has no chat template and only a text was given."""
    plain = isinstance(body.input, str) and not body.instructions
    if plain and not state.chats:
        return body.input
    messages = [{"role": "system", "content": body.instructions}] if body.instructions else []
    if isinstance(body.input, str):
        return Chat([*messages, {"role": "user", "content": body.input}])
    for item in body.input:
        text = item.content if isinstance(item.content, str) else "\n".join(part.text for part in item.content)
        messages.append({"role": item.role, "content": text})
    return Chat(messages)


class _Answer:
    """Makes the answer from a call, as a whole or in events."""

    def __init__(self, state: ServerState, body: ResponsesRequest, call: Call) -> None:
        self.state, self.body, self.call = state, body, call
        self.heading = Heading.new("resp", state.model)
        self.item = Heading.new("msg", state.model).id
        self.count = 0  # the number of events so far

    async def whole(self) -> ResponseAnswer:
        """Wait for the text -> the whole answer."""
        [pieces] = await self.call.collect()
        return self._done(completed(pieces))

    def _done(self, completion: Completion) -> ResponseAnswer:
        """Return the complete response, with usage and times."""
        cut = finish_reason(completion) == "length"
        status = "incomplete" if cut else "completed"
        about, usage = self.call.about(speculation(_decoding(self.body))), self.call.usage
        tokens = ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
            output_tokens=usage.completion_tokens,
            total_tokens=usage.total_tokens,
        )
        return self._response(
            status,
            output=[self._message(status, completion.text)],
            incomplete_details=Incomplete(reason="max_output_tokens") if cut else None,
            usage=tokens,
            metrics=about["metrics"],
            timings=about["timings"],
        )

    def _response(self, status: str, **fields: Any) -> ResponseAnswer:
        """Return a response of this status, with the fields of the request that it repeats."""
        body = self.body
        return ResponseAnswer(
            id=self.heading.id,
            created_at=self.heading.created,
            model=self.heading.model,
            status=status,
            instructions=body.instructions,
            metadata=body.metadata or {},
            temperature=self.state.temperature if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            max_output_tokens=body.max_output_tokens,
            **{"output": [], **fields},
        )

    def _message(self, status: str, text: str | None) -> OutputMessage:
        content = [] if text is None else [OutputText(text=text)]
        return OutputMessage(id=self.item, status=status, content=content)

    async def events(self) -> AsyncIterator[str]:
        """Yield the events of one message, as its text is written."""
        place: dict[str, Any] = {"item_id": self.item, "output_index": 0, "content_index": 0}
        for kind in ("created", "in_progress"):
            yield self._event(kind, response=self._response("in_progress"))
        started = self._message("in_progress", None)
        yield self._event("output_item.added", output_index=0, item=started)
        yield self._event("content_part.added", **place, part=OutputText(text=""))
        completion: Completion | None = None
        async for _, pieces in self.call.rounds():
            if text := "".join(piece.text for piece in pieces):
                yield self._event("output_text.delta", **place, delta=text, logprobs=[])
            completion = pieces[-1].completion
        assert completion is not None, "the last piece has the completion"
        response = self._done(completion)
        [message] = response.output
        [part] = message.content
        yield self._event("output_text.done", **place, text=part.text, logprobs=[])
        yield self._event("content_part.done", **place, part=part)
        yield self._event("output_item.done", output_index=0, item=message)
        yield self._event(response.status, response=response)

    def _event(self, kind: str, **fields: Any) -> str:
        self.count += 1
        name = f"response.{kind}"
        return event(ResponseEvent(type=name, sequence_number=self.count - 1, **fields), name)
