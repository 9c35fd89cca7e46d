"""/v1/chat/completions: the messages of a chat in, the assistant's message out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.concurrency import run_in_threadpool

from slipstream.engine.generation import Completion, Piece, TokenLogprobs
from slipstream.engine.requests import Chat
from slipstream.serve import answers
from slipstream.serve.call import Call, Heading, unless_gone
from slipstream.serve.explain import Explainer
from slipstream.serve.faults import BadRequest
from slipstream.serve.grammars import constraint, tool_constraint
from slipstream.serve.json_route import JsonRoute, Once, off_loop
from slipstream.serve.logprobs import for_chat
from slipstream.serve.media import with_open_media
from slipstream.serve.options import engine_options, speculation
from slipstream.serve.output import ERRORS, answered, completed, finish_reason, streams
from slipstream.serve.readers import as_message, joined
from slipstream.serve.schema import ChatRequest, StreamOptions
from slipstream.serve.state import ServerState, state_of, tenant_of
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
    answer = _Answer(state, body, call, tools)
    if body.stream:
        return EventStream(answer.events(), call)
    return answered(await unless_gone(request, answer.whole()))


async def begun(body: ChatRequest, request: Request) -> tuple[Call, Tools]:
    """Queue a chat -> the call and its tools. Raises a ServeError for a chat that is refused."""
    state = state_of(request)
    tools = Tools.of(body, state)
    options = await run_in_threadpool(_options, body, tools, state, tenant_of(request))  # grammars may take a while
    return await state.call(request, [await chat_of(body, tools, request)], options, "messages"), tools


async def chat_of(body: ChatRequest, tools: Tools, request: Request) -> Chat:
    """Return the chat of a request, with its images and sounds opened. Raises BadRequest for those that are refused."""
    state = state_of(request)
    messages = await off_loop(request, _messages, body, state)
    return Chat(messages, tools.for_template(), _variables(body, state, request))


def _messages(body: ChatRequest, state: ServerState) -> list[dict[str, Any]]:
    """Return the messages as chat templates take them, with their images and sounds opened."""
    messages = [message.model_dump(exclude_none=True, by_alias=True) for message in body.messages]
    return with_open_media(messages, state)


def _options(body: ChatRequest, tools: Tools, state: ServerState, tenant: str) -> dict[str, Any]:
    """Return the engine's options for a chat. Raises BadRequest for fields that do not go together."""
    options = engine_options(body, state.settings, tenant)
    options.setdefault("max_new_tokens", state.longest)
    if body.top_logprobs and not body.logprobs:
        raise BadRequest("top_logprobs needs logprobs=true.", "top_logprobs")
    if body.logprobs:
        wanted, most = body.top_logprobs or 0, state.settings.limits.logprobs
        if wanted > most:
            raise BadRequest(f"top_logprobs={wanted} is above the {most} that this server gives.", "top_logprobs")
        options["logprobs"] = wanted
    return options | constraint(body, state) | tool_constraint(tools, state)


def _variables(body: ChatRequest, state: ServerState, request: Request) -> dict[str, Any]:
    """Return the variables of the chat template. Those that the template does not have are noted as without effect."""
    media = state.engine.media
    owners = (state.engine.tokenizer, media.processor if media else None)
    template = " ".join(str(getattr(owner, "chat_template", None)) for owner in owners)
    named = {f"chat_template_kwargs.{name}": name for name in body.chat_template_kwargs or ()}
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        named["reasoning_effort"] = "reasoning_effort" if "reasoning_effort" in template else "enable_thinking"
        own = {"reasoning_effort": body.reasoning_effort, "enable_thinking": body.reasoning_effort != "none"}
        variables = own | variables
    request.state.ignored += [field for field, name in named.items() if name not in template]
    if body.continue_final_message:
        if body.add_generation_prompt:
            raise BadRequest(
                "add_generation_prompt and continue_final_message exclude each other.", "add_generation_prompt"
            )
        return {**variables, "continue_final_message": True, "add_generation_prompt": False}
    return {"add_generation_prompt": body.add_generation_prompt is not False, **variables}


class _Answer:
    """Makes the answer from a call, as a whole or in chunks."""

    def __init__(self, state: ServerState, body: ChatRequest, call: Call, tools: Tools) -> None:
        self.state, self.body, self.call = state, body, call
        self.heading = Heading.new("chatcmpl", state.model)
        self.explainer = Explainer(state.spell, speculation(body).explain)
        self.readers = [tools.reader(ticket.generation.request.prompt) for ticket in call.tickets]
        self.called = [False] * len(call.tickets)  # whether the answer has a call so far

    async def whole(self) -> answers.ChatAnswer:
        """Wait for all texts -> the whole answer."""
        choices = []
        for index, pieces in enumerate(await self.call.collect()):
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
        return answers.ChatAnswer(**self.heading.fields, choices=choices, **self.call.about(speculation(self.body)))

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
        """Return the parts that the pieces of a round add to one of the answers."""
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
