"""/v1/chat/completions: the messages of a chat in, the assistant's message out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from fastapi import APIRouter, Request, Response

from slipstream.engine.generation import Completion, Piece, TokenLogprobs
from slipstream.serve import answers
from slipstream.serve.call import Call, Heading, unless_gone
from slipstream.serve.chats import begun
from slipstream.serve.explain import Explainer
from slipstream.serve.json_route import JsonRoute, Once, off_loop
from slipstream.serve.logprobs import for_chat
from slipstream.serve.options import speculation
from slipstream.serve.output import ERRORS, completed, finish_reason, streams, with_choices
from slipstream.serve.readers import as_message, joined
from slipstream.serve.schema import ChatRequest, StreamOptions
from slipstream.serve.state import ServerState, state_of
from slipstream.serve.stream import LAST, EventStream, event
from slipstream.serve.tools import Tools

router = APIRouter(tags=["text"], route_class=JsonRoute)

BEGIN = answers.Delta(role="assistant", content="")
"""The first chunk of an answer, sent with its first token.

Nothing is sent for requests that wait, so that they can be sent to another server if this one ends.
"""

OUTCOMES = {**ERRORS, 200: streams(answers.ChatChunk)}


@router.post("/v1/chat/completions", responses=OUTCOMES, response_model=answers.ChatAnswer)
async def chat_completions(body: Once[ChatRequest], request: Request) -> Response:
    """Answer a chat."""
    state = state_of(request)
    state.check_model(body.model)
    call, tools = await begun(body, request)
    answer = await off_loop(request, _ChatAnswer, state, body, call, tools)
    if body.stream:
        return EventStream(answer.events(), call)
    texts = await unless_gone(request, call.collect())
    return await off_loop(request, answer.whole, texts)


class _ChatAnswer:
    """Makes the answer from a call, as a whole or in chunks."""

    def __init__(self, state: ServerState, body: ChatRequest, call: Call, tools: Tools) -> None:
        self.state, self.body, self.call = state, body, call
        self.heading = Heading.new("chatcmpl", state.model)
        self.explainer = Explainer(state.spell, speculation(body).explain)
        self.readers = [tools.reader(ticket.generation.request.prompt) for ticket in call.tickets]
        self.called = [False] * len(call.tickets)  # whether the answer has a call so far

    def whole(self, texts: Sequence[Sequence[Piece]]) -> Response:
        """Return the answer for the pieces of all texts."""
        choices = []
        for index, pieces in enumerate(texts):
            completion = completed(pieces)
            deltas = [delta for piece in pieces for delta in self._read(index, piece)]
            choices.append(
                answers.ChatChoice(
                    index=index,
                    message=as_message(deltas),
                    logprobs=self._logprobs(completion.logprobs),
                    finish_reason=self._reason(index, completion),
                    explained=self.explainer(pieces),
                )
            )
        about = self.call.about(speculation(self.body))
        return with_choices(answers.ChatAnswer(**self.heading.fields, choices=[], **about), choices)

    async def events(self) -> AsyncIterator[str]:
        """Yield chunks as tokens come, then the usage if it was requested."""
        stream = self.body.stream_options or StreamOptions()
        begun = set[int]()
        async for index, pieces in self.call.rounds():
            if index not in begun:
                begun.add(index)
                yield self._event([answers.ChatChunkChoice(index=index, delta=BEGIN)])
            for choice in self._chunks(index, pieces):
                yield self._event([choice], usage=stream.continuous_usage_stats, ended=choice.finish_reason is not None)
        if stream.include_usage:
            yield self._event([], usage=True, ended=True)
        yield LAST

    def _event(self, choices: list[answers.ChatChunkChoice], usage: bool = False, ended: bool = False) -> str:
        """Return a chunk of the stream: with usage, or with all further fields if the answer has ended."""
        wanted = {"usage": usage, "timings": ended or self.body.timings_per_token}
        about = self.call.about(speculation(self.body)) if ended or any(wanted.values()) else {}
        further = {name: value for name, value in about.items() if wanted.get(name, ended)}
        return event(answers.ChatChunk(**self.heading.fields, choices=choices, **further))

    def _read(self, index: int, piece: Piece) -> list[answers.Delta]:
        deltas = self.readers[index].read(piece)
        self.called[index] |= any(delta.tool_calls for delta in deltas)
        return deltas

    def _chunks(self, index: int, pieces: Sequence[Piece]) -> list[answers.ChatChunkChoice]:
        deltas = joined([delta for piece in pieces for delta in self._read(index, piece)])
        completion = pieces[-1].completion
        reason = self._reason(index, completion) if completion else None
        logprobs = self._logprobs(tuple(piece.logprobs for piece in pieces if piece.logprobs) or None)
        explained = self.explainer(pieces)
        if not deltas and (reason or logprobs or explained):
            deltas = [answers.Delta()]
        choices = [answers.ChatChunkChoice(index=index, delta=delta) for delta in deltas]
        if choices:
            choices[0].logprobs, choices[0].explained = logprobs, explained
            choices[-1].finish_reason = reason
        return choices

    def _reason(self, index: int, completion: Completion) -> str:
        reason = finish_reason(completion)
        return "tool_calls" if reason == "stop" and self.called[index] else reason

    def _logprobs(self, logprobs: tuple[TokenLogprobs, ...] | None) -> answers.ChatLogprobs | None:
        return for_chat(logprobs, self.state.spelling) if logprobs is not None and self.body.logprobs else None
