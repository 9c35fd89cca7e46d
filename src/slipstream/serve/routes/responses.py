"""/v1/responses: texts, reasoning and calls of functions, in the newer form of OpenAI's interface."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from slipstream.engine.generation import Completion, Piece
from slipstream.serve.call import Call
from slipstream.serve.chats import begun
from slipstream.serve.faults import BadRequest, ServeError
from slipstream.serve.json_route import JsonRoute, Once, off_loop
from slipstream.serve.output import ERRORS, Answering, answered, completed, event, finish_reason, streams
from slipstream.serve.readers import Reader, read_all
from slipstream.serve.response_output import (
    Incomplete,
    ResponseAnswer,
    ResponseDeleted,
    ResponseEvent,
    ResponseOutput,
    ResponseUsage,
    StoredConversation,
    Told,
)
from slipstream.serve.response_schema import (
    Content,
    InputCall,
    InputImage,
    InputMessage,
    InputReasoning,
    InputResult,
    Kept,
    ResponsesRequest,
    qualified_name,
)
from slipstream.serve.schema import ChatRequest, RefusalPart
from slipstream.serve.state import ServerState, state_of, tenant_of


def as_chat(body: ResponsesRequest, items: Sequence[Kept]) -> ChatRequest:
    """Return the chat that a request means, with the items of its conversation as messages."""
    system = [{"role": "system", "content": body.instructions}] if body.instructions else []
    choice: Any = body.tool_choice
    if choice is not None and not isinstance(choice, str):
        choice = {"type": "function", "function": {"name": choice.name}}
    form = body.text.format if body.text else None
    functions = {name: tool.model_dump(exclude_none=True) for name, (tool, _) in body.functions().items()}
    same = ("parallel_tool_calls", "temperature", "top_p", "ignore_eos", "stream")
    fields = {name: getattr(body, name) for name in same} | {  # null is no field
        "messages": [*system, *_messages(items)],
        "tools": [{"type": tool.pop("type"), "function": {**tool, "name": name}} for name, tool in functions.items()],
        "tool_choice": choice,
        "reasoning_effort": body.reasoning and body.reasoning.effort,
        "max_tokens": body.max_output_tokens,
        "response_format": form and {"type": form.type, "json_schema": {"schema": form.schema_}},
    }
    chat = ChatRequest.of(fields)
    chat.speculative = body.speculative
    return chat


def _messages(items: Sequence[Kept]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for item in items:
        part = _message(item)
        last = messages[-1] if messages else {}
        whole = {"content", "tool_calls"} & last.keys()  # after which only calls go on with a message
        joins = part.get("tool_calls") or ("content" in part and not whole)
        if part["role"] == last.get("role") == "assistant" and joins:
            last |= {**part, "tool_calls": [*last.get("tool_calls", ()), *part.get("tool_calls", ())]}
        else:
            messages.append(part)
    return messages


def _message(item: Kept) -> dict[str, Any]:
    if isinstance(item, InputMessage):
        return {"role": item.role, "content": _content(item.content)}
    if isinstance(item, InputResult):
        return {"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output)}
    if isinstance(item, InputCall):
        function = {"name": qualified_name(item.name, item.namespace), "arguments": item.arguments}
        return {"role": "assistant", "tool_calls": [{"id": item.call_id, "type": "function", "function": function}]}
    assert isinstance(item, InputReasoning)
    return {"role": "assistant", "reasoning_content": "".join(part.text for part in item.content or item.summary or ())}


def _content(content: Content) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    parts: list[dict[str, Any]] = []
    for part in content:
        if isinstance(part, InputImage):
            parts.append({"type": "image_url", "image_url": {"url": part.image_url}})
        else:
            text = part.refusal if isinstance(part, RefusalPart) else part.text
            parts.append({"type": "text", "text": text})
    return parts


router = APIRouter(tags=["text"], route_class=JsonRoute)
OUTCOMES = {**ERRORS, 200: streams(ResponseEvent)}
FOUND: dict[int | str, dict[str, Any]] = {status: ERRORS[status] for status in (401, 404)}


@router.post("/v1/responses", responses=OUTCOMES, response_model=ResponseAnswer)
async def responses(body: Once[ResponsesRequest], request: Request) -> Response:
    """Answer a text or a conversation."""
    state = state_of(request)
    conversation = state.conversations.resume(body, tenant_of(request), getattr(request.state, "size", 0))
    if not conversation.items:
        raise BadRequest("input is empty: give a text, or at least one item.", "input")
    plain = body.input if isinstance(body.input, str) and len(conversation.items) == 1 else None
    chat = await off_loop(request, as_chat, body, conversation.items)
    call, tools = await begun(chat, request, "input", None if body.instructions else plain)
    reader = await off_loop(request, tools.reader, call.tickets[0].generation.request.prompt)
    return await _ResponseAnswer(state, body, conversation, call, reader).reply(request)


@router.get("/v1/responses/{response_id}", responses=FOUND, response_model=ResponseAnswer)
async def response(response_id: str, request: Request) -> Response:
    """Return a response that is kept."""
    return answered(state_of(request).conversations.find(response_id, tenant_of(request)))


@router.delete("/v1/responses/{response_id}", responses=FOUND, response_model=ResponseDeleted)
async def delete_response(response_id: str, request: Request) -> Response:
    """Keep a response no longer."""
    state_of(request).conversations.drop(response_id, tenant_of(request))
    return answered(ResponseDeleted(id=response_id))


class _ResponseAnswer(Answering):
    """Makes the answer from a call, and keeps it with its conversation."""

    prefix = "resp"

    def __init__(
        self, state: ServerState, body: ResponsesRequest, conversation: StoredConversation, call: Call, reader: Reader
    ) -> None:
        super().__init__(state, body, call)
        self.asked, self.conversation, self.reader = body, conversation, reader
        self.output = ResponseOutput(body.functions())
        self.count = 0  # the number of events so far

    def whole(self, texts: Sequence[Sequence[Piece]]) -> Response:
        list(self._read(texts[0]))
        return answered(self._done(completed(texts[0])))

    async def events(self) -> AsyncIterator[str]:
        for kind in ("created", "in_progress"):
            yield self._event(kind, response=self._response("in_progress"))
        completion: Completion | None = None
        try:
            async for _, pieces in self.call.rounds():
                for kind, fields in self._read(pieces):
                    yield self._event(kind, **fields)
                completion = pieces[-1].completion
            assert completion is not None, "the last piece has the completion"
            response = self._done(completion)
        except ServeError as error:
            response = self._response("failed", error=error.body()["error"])
        yield self._event(response.status, response=response)

    def _read(self, pieces: Sequence[Piece]) -> list[Told]:
        """Add the pieces of a round to the output -> the events that tell of them; the last ones end it."""
        told = [each for delta in read_all(self.reader, pieces) for each in self.output.add(delta)]
        completion = pieces[-1].completion
        return told if completion is None else [*told, *self.output.end(_status(completion))]

    def _done(self, completion: Completion) -> ResponseAnswer:
        status = _status(completion)
        about, usage = self.call.about(self.speculation), self.call.usage
        about["usage"] = ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=usage.prompt_tokens_details,
            output_tokens=usage.completion_tokens,
            total_tokens=usage.total_tokens,
        )
        incomplete = Incomplete(reason="max_output_tokens") if status == "incomplete" else None
        response = self._response(status, incomplete_details=incomplete, **about)
        if self.asked.store is not False:
            self.state.conversations.keep(response, self.conversation, self.output.as_input)
        return response

    def _response(self, status: str, **fields: Any) -> ResponseAnswer:
        body, choice = self.asked, self.asked.tool_choice or ("auto" if self.asked.tools else "none")
        text = body.text.model_dump(exclude_none=True, by_alias=True) if body.text else {}
        return ResponseAnswer(
            id=self.heading["id"],
            created_at=self.heading["created"],
            model=self.heading["model"],
            status=status,
            output=self.output.items,
            instructions=body.instructions,
            metadata=body.metadata or {},
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=body.previous_response_id,
            reasoning={"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            temperature=self.state.temperature if body.temperature is None else body.temperature,
            text={"format": {"type": "text"}, **text},
            tool_choice=choice if isinstance(choice, str) else choice.model_dump(),
            tools=[tool.model_dump() for tool in body.tools or ()],
            top_p=1.0 if body.top_p is None else body.top_p,
            max_output_tokens=body.max_output_tokens,
            store=body.store is not False,
            **fields,
        )

    def _event(self, kind: str, **fields: Any) -> str:
        self.count += 1
        name = f"response.{kind}"
        return event(ResponseEvent(type=name, sequence_number=self.count - 1, **fields), name)


def _status(completion: Completion) -> str:
    return "incomplete" if finish_reason(completion) == "length" else "completed"
