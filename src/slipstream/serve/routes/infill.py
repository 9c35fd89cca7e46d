"""/infill: the text between a prefix and a suffix, as llama.cpp's server and its editor plugins have it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.concurrency import run_in_threadpool

from slipstream.engine.generation import Completion
from slipstream.serve.answers import FilledIn
from slipstream.serve.call import Call, unless_gone
from slipstream.serve.grammars import constraint
from slipstream.serve.infill import Infill, infill_of
from slipstream.serve.json_route import JsonRoute, Once, off_loop
from slipstream.serve.options import engine_options
from slipstream.serve.output import ERRORS, answered, completed, finish_reason, streams
from slipstream.serve.schema import InfillRequest
from slipstream.serve.state import ServerState, state_of, tenant_of
from slipstream.serve.stream import EventStream, event

router = APIRouter(tags=["text"], route_class=JsonRoute)


@router.post("/infill", responses={**ERRORS, 200: streams(FilledIn)}, response_model=FilledIn)
async def infill(body: Once[InfillRequest], request: Request) -> Response:
    """Fill in the text between a prefix and a suffix."""
    state = state_of(request)
    state.check_model(body.model)
    fill = infill_of(state, "input_suffix")
    options = await run_in_threadpool(_options, body, state, tenant_of(request), fill)
    files = [text for file in body.input_extra or () for text in (file.filename, file.text)]
    state.check_length("input_prefix", body.input_prefix, body.input_suffix, body.prompt, *files)
    before = (body.input_prefix or "") + (body.prompt or "")
    prompt = await off_loop(request, fill.prompt, before, body.input_suffix or "", body.input_extra or ())
    call = await state.call(request, [prompt], options, "input_prefix")
    if body.stream:
        return EventStream(_events(body, call, state), call)
    [pieces] = await unless_gone(request, call.collect())
    answer = _answer(call, state, completed(pieces))
    return answered(answer if body.response_fields is None else answer.picked(body.response_fields))


def _options(body: InfillRequest, state: ServerState, tenant: str, fill: Infill) -> dict[str, Any]:
    options = engine_options(body, state.settings, tenant)
    options.setdefault("max_new_tokens", state.longest)
    options["stop_token_ids"] = [*(body.stop_token_ids or ()), *fill.ends]
    if body.t_max_predict_ms:
        options["max_time"] = body.t_max_predict_ms / 1e3
    return options | constraint(body, state)


async def _events(body: InfillRequest, call: Call, state: ServerState) -> AsyncIterator[str]:
    """Yield the text as it is written, then what a whole answer has, without its text."""
    async for _, pieces in call.rounds():
        if text := "".join(piece.text for piece in pieces):
            timings = call.timings() if body.timings_per_token else None
            yield event(FilledIn(content=text, stop=False, timings=timings))
        if pieces[-1].completion is not None:
            yield event(_answer(call, state, pieces[-1].completion, ""))


def _answer(call: Call, state: ServerState, completion: Completion, text: str | None = None) -> FilledIn:
    cut = finish_reason(completion) == "length"
    eos = completion.tokens[-1:] and completion.tokens[-1] in call.tickets[0].generation.request.eos
    return FilledIn(
        content=completion.text if text is None else text,
        stop=True,
        model=state.model,
        stop_type="limit" if cut else "eos" if eos else "word",
        truncated=False,
        tokens_predicted=len(completion.tokens),
        tokens_evaluated=completion.prompt_tokens,
        tokens_cached=call.usage.prompt_tokens_details.cached_tokens,
        timings=call.timings(),
    )
