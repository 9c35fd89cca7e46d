"""/v1/messages: a chat in the form of Anthropic's Messages API, and the number of its tokens."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any

from fastapi import APIRouter, Request, Response

from slipstream.engine.generation import Completion, Piece
from slipstream.serve.answers import ToolCallAnswer
from slipstream.serve.call import Call
from slipstream.serve.chats import begun, chat_of
from slipstream.serve.faults import MESSAGES, ServeError, for_path
from slipstream.serve.json_route import JsonRoute, Once, off_loop
from slipstream.serve.messages import (
    ContentBlock,
    Counted,
    CountRequest,
    MessageAnswer,
    MessageEvent,
    MessageFault,
    MessagesRequest,
    MessageUsage,
)
from slipstream.serve.output import ERRORS, Answering, answered, completed, event, finish_reason, streams
from slipstream.serve.readers import as_message, parts_of, read_all
from slipstream.serve.schema import ChatRequest
from slipstream.serve.state import ServerState, state_of
from slipstream.serve.tools import Tools
from slipstream.text.jsontext import json_text

router = APIRouter(tags=["text"], route_class=JsonRoute)
FAULTS = {status: {**error, "model": MessageFault} for status, error in ERRORS.items()}
OUTCOMES = {**FAULTS, 200: streams(MessageEvent)}


@router.post("/v1/messages", responses=OUTCOMES, response_model=MessageAnswer)
async def messages(body: Once[MessagesRequest], request: Request) -> Response:
    """Answer a chat."""
    chat = await off_loop(request, body.as_chat)
    call, tools = await begun(chat, request)
    answer = await off_loop(request, _MessageAnswer, state_of(request), chat, call, tools)
    return await answer.reply(request)


@router.post("/v1/messages/count_tokens", responses=FAULTS, response_model=Counted)
async def count_tokens(body: Once[CountRequest], request: Request) -> Response:
    """Count the tokens of a chat."""
    state = state_of(request)
    chat = await off_loop(request, body.as_chat)
    prompt = await chat_of(chat, Tools(chat, state), request)
    return answered(Counted(input_tokens=len(await off_loop(request, state.encode, prompt, "messages"))))


class _MessageAnswer(Answering):
    prefix = "msg"

    def __init__(self, state: ServerState, body: ChatRequest, call: Call, tools: Tools) -> None:
        super().__init__(state, body, call)
        self.reader = tools.reader(call.tickets[0].generation.request.prompt)

    def whole(self, texts: Sequence[Sequence[Piece]]) -> Response:
        [pieces] = texts
        message = as_message(read_all(self.reader, pieces))
        blocks = []
        if message.reasoning_content:
            blocks.append(ContentBlock(type="thinking", thinking=message.reasoning_content, signature=""))
        if message.content or not message.tool_calls:
            blocks.append(ContentBlock(type="text", text=message.content or ""))
        for call in message.tool_calls or ():
            arguments: Any = None
            with suppress(json.JSONDecodeError):  # the call was cut
                arguments = json.loads(call.function.arguments)
            known = arguments if isinstance(arguments, dict) else {}
            blocks.append(ContentBlock(type="tool_use", id=call.id, name=call.function.name, input=known))
        reason, stop = self._reason(completed(pieces), bool(message.tool_calls))
        times = {"metrics": self.call.metrics(), "timings": self.call.timings()}
        return answered(self._message(content=blocks, stop_reason=reason, stop_sequence=stop, **times))

    def _message(self, **fields: Any) -> MessageAnswer:
        about = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": self._usage, **fields}
        return MessageAnswer(id=self.heading["id"], model=self.heading["model"], **about)

    @property
    def _usage(self) -> MessageUsage:
        usage = self.call.usage
        cached = usage.prompt_tokens_details.cached_tokens
        return MessageUsage(
            input_tokens=usage.prompt_tokens - cached,
            output_tokens=usage.completion_tokens,
            cache_read_input_tokens=cached,
        )

    def _reason(self, completion: Completion, called: bool) -> tuple[str, str | None]:
        """Return why the text ended, and the stop sequence if it was one."""
        if finish_reason(completion) == "length":
            return "model_context_window_exceeded" if completion.context_full else "max_tokens", None
        if called:
            return "tool_use", None
        return ("stop_sequence" if completion.stop else "end_turn"), completion.stop

    async def events(self) -> AsyncIterator[str]:
        try:
            yield _event("message_start", message=self._message())
            index, open_kind, called, completion = -1, "", False, None
            async for _, pieces in self.call.rounds():
                completion = pieces[-1].completion
                for delta in read_all(self.reader, pieces):
                    for kind, text, call in parts_of(delta):
                        if kind != open_kind or call:
                            if open_kind:
                                yield block_end(open_kind, index)
                            index, open_kind, called = index + 1, kind, called or kind == "call"
                            yield _event("content_block_start", index=index, content_block=_opened(kind, call))
                        name, field = CHANGES[kind]
                        yield _event("content_block_delta", index=index, delta={"type": name, field: text})
            if open_kind:
                yield block_end(open_kind, index)
            assert completion is not None, "the last piece has the completion"
            reason, stop = self._reason(completion, called)
            yield _event("message_delta", delta={"stop_reason": reason, "stop_sequence": stop}, usage=self._usage)
            yield _event("message_stop")
        except ServeError as error:
            yield f"event: error\ndata: {json_text(for_path(error.body(), error.status, MESSAGES))}\n\n"


CHANGES = {  # by the kind of a part of a message: the event's delta, and its field
    "reasoning": ("thinking_delta", "thinking"),
    "content": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


def _opened(kind: str, call: ToolCallAnswer | None) -> ContentBlock:
    if call is not None:
        return ContentBlock(type="tool_use", id=call.id, name=call.function.name, input={})
    if kind == "content":
        return ContentBlock(type="text", text="")
    return ContentBlock(type="thinking", thinking="", signature="")


def block_end(kind: str, index: int) -> str:
    """Return the events that end a block. Some clients send a thought back only if it came with a signature."""
    signature = {"type": "signature_delta", "signature": ""}
    signed = _event("content_block_delta", index=index, delta=signature) if kind == "reasoning" else ""
    return signed + _event("content_block_stop", index=index)


def _event(kind: str, **fields: Any) -> str:
    return event(MessageEvent(type=kind, **fields), kind)
