"""The answers of /v1/responses: their objects, the events that tell of items, and the last ones, to go on with."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pydantic import ConfigDict, Field

from slipstream.serve import answers
from slipstream.serve.answers import Answer, AnswerMetrics, Error, PromptDetails, Sometimes, Timings, new_id
from slipstream.serve.faults import BadRequest, ServeError
from slipstream.serve.readers import parts_of
from slipstream.serve.response_schema import (
    InputCall,
    InputMessage,
    InputReasoning,
    InputReference,
    InputText,
    Kept,
    ResponsesRequest,
    ResponseTool,
)


class OutputText(Answer):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = Field(default_factory=list)
    logprobs: list[Any] = Field(default_factory=list)


class OutputMessage(Answer):
    type: Literal["message"] = "message"
    id: str
    role: Literal["assistant"] = "assistant"
    status: str = "in_progress"
    content: list[OutputText]


class ReasoningText(Answer):
    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class OutputReasoning(Answer):
    type: Literal["reasoning"] = "reasoning"
    id: str
    status: str = "in_progress"
    summary: list[Any] = Field(default_factory=list)
    content: list[ReasoningText]


class OutputCall(Answer):
    """A call of a function in the output of /v1/responses; its arguments are JSON text."""

    type: Literal["function_call"] = "function_call"
    id: str
    call_id: str
    name: str
    namespace: Sometimes[str] = None
    arguments: str
    status: str = "in_progress"


OutputItem = OutputMessage | OutputReasoning | OutputCall


class OutputDetails(Answer):
    """The tokens of the output that are reasoning."""

    reasoning_tokens: int = 0


class ResponseUsage(Answer):
    """The numbers of tokens read and written, under the names of /v1/responses."""

    input_tokens: int
    input_tokens_details: PromptDetails
    output_tokens: int
    output_tokens_details: OutputDetails = Field(default_factory=OutputDetails)
    total_tokens: int


class Incomplete(Answer):
    """The reason why a response ended before it was complete."""

    reason: str


class ResponseAnswer(Answer):
    id: str
    object: Literal["response"] = "response"
    created_at: int
    model: str
    status: str
    output: list[OutputItem]
    error: Error | None = None
    incomplete_details: Incomplete | None = None
    instructions: str | None
    metadata: dict[str, str] = Field(default_factory=dict)
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    max_output_tokens: Sometimes[int] = None
    store: bool
    usage: Sometimes[ResponseUsage] = None
    metrics: Sometimes[AnswerMetrics] = None
    timings: Sometimes[Timings] = None


class ResponseDeleted(Answer):
    """The answer to the deletion of a response."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class ResponseEvent(Answer):
    model_config = ConfigDict(extra="allow")
    type: str
    sequence_number: int


Told = tuple[str, dict[str, Any]]  # kind of an event, without `response.`, and its fields


class ResponseOutput:
    """The items of one response, in the order in which they are written; one of them is open.
    `functions` are those that may be called, and their namespaces, by the names under which the model calls them."""

    def __init__(self, functions: Mapping[str, tuple[ResponseTool, str | None]]) -> None:
        self._functions = functions
        self.items: list[OutputItem] = []
        self._open: OutputItem | None = None

    def add(self, delta: answers.Delta) -> Iterator[Told]:
        for kind, text, call in parts_of(delta):
            if call is not None:
                assert call.id is not None, "the first part of a call has its id"
                tool, space = self._functions.get(str(call.function.name), (call.function, None))
                called = {"call_id": call.id, "name": tool.name, "namespace": space, "arguments": ""}
                yield from self._begin(OutputCall(id=f"fc_{new_id()}", **called))
            elif kind == "reasoning" and not isinstance(self._open, OutputReasoning):
                yield from self._begin(OutputReasoning(id=f"rs_{new_id()}", content=[ReasoningText(text="")]))
            elif kind == "content" and not isinstance(self._open, OutputMessage):
                yield from self._begin(OutputMessage(id=f"msg_{new_id()}", content=[OutputText(text="")]))
            item = self._open
            if isinstance(item, OutputCall):
                item.arguments += text
                if text:
                    yield "function_call_arguments.delta", {**self._place, "delta": text}
            elif item is not None:
                [part] = item.content
                part.text += text
                yield f"{part.type}.delta", {**self._place, **_of_text(part), "delta": text}

    def end(self, status: str) -> Iterator[Told]:
        """End the output -> the last events; a response without any item gets a message without a text."""
        if not self.items:
            yield from self._begin(OutputMessage(id=f"msg_{new_id()}", content=[OutputText(text="")]))
        yield from self._close(status)

    @property
    def as_input(self) -> dict[str, Kept]:
        found: dict[str, Kept] = {}
        for item in self.items:
            if isinstance(item, OutputCall):
                found[item.id] = InputCall(**item.model_dump(exclude={"id", "status"}))
            elif isinstance(item, OutputMessage):
                found[item.id] = InputMessage(role="assistant", content=item.content[0].text)
            else:
                text = InputText(type="reasoning_text", text=item.content[0].text)
                found[item.id] = InputReasoning(type="reasoning", content=[text])
        return found

    def _begin(self, item: OutputItem) -> Iterator[Told]:
        yield from self._close("completed")
        self._open = item
        self.items.append(item)
        bare = item if isinstance(item, OutputCall) else item.model_copy(update={"content": []})
        yield "output_item.added", {"output_index": self._place["output_index"], "item": bare.model_copy()}
        if not isinstance(item, OutputCall):
            yield "content_part.added", {**self._place, "content_index": 0, "part": item.content[0].model_copy()}

    def _close(self, status: str) -> Iterator[Told]:
        item, self._open = self._open, None
        if item is None:
            return
        item.status = status
        if isinstance(item, OutputCall):
            done = {"name": item.name, "arguments": item.arguments}
            yield "function_call_arguments.done", {**self._place, **done}
        else:
            [part] = item.content
            yield f"{part.type}.done", {**self._place, **_of_text(part), "text": part.text}
            yield "content_part.done", {**self._place, "content_index": 0, "part": part}
        yield "output_item.done", {"output_index": self._place["output_index"], "item": item}

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1].id, "output_index": len(self.items) - 1}


def _of_text(part: OutputText | ReasoningText) -> dict[str, Any]:
    return {"content_index": 0, **({"logprobs": []} if isinstance(part, OutputText) else {})}


RESPONSES, BYTES = 1000, 64 << 20  # most responses that are kept, and the most bytes of their requests together


class NoSuchResponse(BadRequest):
    """A request goes on with a response that is not kept (400)."""

    code = "previous_response_not_found"

    def __init__(self, what: str, param: str) -> None:
        kept = f"the last {RESPONSES} responses, {BYTES >> 20} MiB of requests at most, until the server ends"
        super().__init__(f"{what}, but this server keeps only {kept}: send the whole conversation as input.", param)


class NoResponse(ServeError):
    """A request names a response that is not kept (404)."""

    status, kind, code = 404, "invalid_request_error", "response_not_found"


@dataclass(frozen=True)
class StoredConversation:
    """The items of a tenant's conversation, the last response, its items by their ids, and the bytes that they took."""

    tenant: str
    items: tuple[Kept, ...] = ()
    answered: dict[str, Kept] = field(default_factory=dict)
    size: int = 0
    response: ResponseAnswer | None = None


class Conversations:
    """The conversations of the last responses, the oldest dropped first; every tenant finds only its own."""

    def __init__(self, most: int = RESPONSES, size: int = BYTES) -> None:
        self._most, self._size = most, size
        self._kept: OrderedDict[tuple[str, str], StoredConversation] = OrderedDict()
        self._total = 0

    def resume(self, body: ResponsesRequest, tenant: str, size: int) -> StoredConversation:
        """Return the conversation that a request of `size` bytes goes on with, and its own items.
        Raises NoSuchResponse if it names a response, or an item of one, that is not kept."""
        before = StoredConversation(tenant)
        if body.previous_response_id is not None:
            found = self._kept.get((tenant, body.previous_response_id))
            if found is None:
                raise NoSuchResponse(f"previous_response_id is {body.previous_response_id!r}", "previous_response_id")
            before = found
        given = [InputMessage(role="user", content=body.input)] if isinstance(body.input, str) else body.input
        new = list[Kept]()
        for each in given:
            if isinstance(each, InputReference):
                conversations = (kept for (owner, _), kept in reversed(self._kept.items()) if owner == tenant)
                if (found := next((kept for kept in conversations if each.id in kept.answered), None)) is None:
                    raise NoSuchResponse(f"input refers to the item {each.id!r}", "input")
                new.append(found.answered[each.id])
            else:
                new.append(each)
        return StoredConversation(tenant, (*before.items, *new), {}, before.size + size)

    def find(self, response: str, tenant: str) -> ResponseAnswer:
        found = self._kept.get((tenant, response))
        if found is None or found.response is None:
            raise NoResponse(f"the response {response!r} is not kept here.", "response_id")
        return found.response

    def drop(self, response: str, tenant: str) -> None:
        self.find(response, tenant)
        self._total -= self._kept.pop((tenant, response)).size

    def keep(self, response: ResponseAnswer, conversation: StoredConversation, answered: dict[str, Kept]) -> None:
        items = (*conversation.items, *answered.values())
        kept = replace(conversation, items=items, answered=answered, response=response)
        self._kept[conversation.tenant, response.id] = kept
        self._total += conversation.size
        while len(self._kept) > self._most or self._total > self._size:
            self._total -= self._kept.popitem(last=False)[1].size
