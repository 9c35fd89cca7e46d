"""/v1/chat/completions: the messages of a chat in, the assistant's message out."""

from collections.abc import Sequence

from fastapi import APIRouter, Request, Response

from slipstream.engine.generation import Completion, Piece, TokenLogprobs
from slipstream.serve import answers
from slipstream.serve.call import Call
from slipstream.serve.chats import begun
from slipstream.serve.json_route import JsonRoute, Once, off_loop
from slipstream.serve.logprobs import for_chat
from slipstream.serve.output import ERRORS, ChunkAnswering, completed, finish_reason, streams
from slipstream.serve.readers import as_message, read_all
from slipstream.serve.schema import ChatRequest
from slipstream.serve.state import ServerState, state_of
from slipstream.serve.tools import Tools

router = APIRouter(tags=["text"], route_class=JsonRoute)
OUTCOMES = {**ERRORS, 200: streams(answers.ChatChunk)}


@router.post("/v1/chat/completions", responses=OUTCOMES, response_model=answers.ChatAnswer)
async def chat_completions(body: Once[ChatRequest], request: Request) -> Response:
    """Answer a chat."""
    call, tools = await begun(body, request)
    answer = await off_loop(request, _ChatAnswer, state_of(request), body, call, tools)
    return await answer.reply(request)


class _ChatAnswer(ChunkAnswering):
    prefix, answer, chunk = "chatcmpl", answers.ChatAnswer, answers.ChatChunk

    def __init__(self, state: ServerState, body: ChatRequest, call: Call, tools: Tools) -> None:
        super().__init__(state, body, call)
        self.wants_logprobs = body.logprobs
        self.readers = [tools.reader(ticket.generation.request.prompt) for ticket in call.tickets]
        self.called = [False] * len(call.tickets)  # whether the answer has a call so far
        self.begun = set[int]()

    def choices(self, texts: Sequence[Sequence[Piece]]) -> list[answers.ChatChoice]:
        choices = []
        for index, pieces in enumerate(texts):
            completion = completed(pieces)
            message = as_message(self._read(index, pieces))
            about = {"logprobs": self._logprobs(completion.logprobs), "explained": self.explained(pieces)}
            reason = self._reason(index, completion)
            choices.append(answers.ChatChoice(index=index, message=message, finish_reason=reason, **about))
        return choices

    def chunks(self, index: int, pieces: Sequence[Piece]) -> list[answers.ChatChunkChoice]:
        deltas = self._read(index, pieces)
        completion = pieces[-1].completion
        reason = self._reason(index, completion) if completion else None
        logprobs = self._logprobs(tuple(piece.logprobs for piece in pieces if piece.logprobs) or None)
        explained = self.explained(pieces)
        if not deltas and (reason or logprobs or explained):
            deltas = [answers.Delta()]
        choices = [answers.ChatChunkChoice(index=index, delta=delta) for delta in deltas]
        if choices:
            choices[0].logprobs, choices[0].explained = logprobs, explained
            choices[-1].finish_reason = reason
        if index in self.begun:
            return choices
        # The role comes with the first token. Nothing is sent for requests that wait, so that they can be sent to
        # another server if this one ends.
        self.begun.add(index)
        return [answers.ChatChunkChoice(index=index, delta=answers.Delta(role="assistant", content="")), *choices]

    def _read(self, index: int, pieces: Sequence[Piece]) -> list[answers.Delta]:
        deltas = read_all(self.readers[index], pieces)
        self.called[index] |= any(delta.tool_calls for delta in deltas)
        return deltas

    def _reason(self, index: int, completion: Completion) -> str:
        reason = finish_reason(completion)
        return "tool_calls" if reason == "stop" and self.called[index] else reason

    def _logprobs(self, logprobs: tuple[TokenLogprobs, ...] | None) -> answers.ChatLogprobs | None:
        return for_chat(logprobs, self.state.spelling) if logprobs is not None and self.wants_logprobs else None
