"""/infill: the text between a prefix and a suffix, as llama.cpp's server and its editor plugins have it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.concurrency import run_in_threadpool

from slipstream.engine.generation import Completion, Piece
from slipstream.serve.answers import FilledIn
from slipstream.serve.call import Call
from slipstream.serve.infill import Infill, infill_of
from slipstream.serve.json_route import JsonRoute, Once, off_loop
from slipstream.serve.options import constraint, engine_options
from slipstream.serve.output import ERRORS, answered, completed, finish_reason, streams
from slipstream.serve.schema import InfillRequest
from slipstream.serve.state import ServerState, state_of, tenant_of
from slipstream.serve.stream import Answering, event

router = APIRouter(tags=["text"], route_class=JsonRoute)


@router.post("/infill", responses={**ERRORS, 200: streams(FilledIn)}, response_model=FilledIn)
async def infill(body: Once[InfillRequest], request: Request) -> Response:
    """Fill in the text between a prefix and a suffix."""
    state = state_of(request)
    fill = infill_of(state, "input_suffix")
    options = await run_in_threadpool(_options, body, state, tenant_of(request), fill)
    files = [text for file in body.input_extra or () for text in (file.filename, file.text)]
    state.check_length("input_prefix", body.input_prefix, body.input_suffix, body.prompt, *files)
    before = (body.input_prefix or "") + (body.prompt or "")
    prompt = await off_loop(request, fill.prompt, before, body.input_suffix or "", body.input_extra or ())
    call = await state.call(request, [prompt], options, "input_prefix")
    return await _FilledIn(state, body, call).reply(request)


def _options(body: InfillRequest, state: ServerState, tenant: str, fill: Infill) -> dict[str, Any]:
    options = engine_options(body, state.settings, tenant)
    options.setdefault("max_new_tokens", state.longest)
    options["stop_token_ids"] = [*(body.stop_token_ids or ()), *fill.ends]
    if body.t_max_predict_ms:
        options["max_time"] = body.t_max_predict_ms / 1e3
    return options | constraint(body, state)


class _FilledIn(Answering):
    def __init__(self, state: ServerState, body: InfillRequest, call: Call) -> None:
        super().__init__(state, body, call)
        self.fields, self.times_tokens = body.response_fields, body.timings_per_token

    def whole(self, texts: Sequence[Sequence[Piece]]) -> Response:
        completion = completed(texts[0])
        answer = self._last(completion, completion.text)
        return answered(answer if self.fields is None else answer.picked(self.fields))

    async def events(self) -> AsyncIterator[str]:
        async for _, pieces in self.call.rounds():
            if text := "".join(piece.text for piece in pieces):
                timings = self.call.timings() if self.times_tokens else None
                yield event(FilledIn(content=text, stop=False, timings=timings))
            if pieces[-1].completion is not None:
                yield event(self._last(pieces[-1].completion, ""))

    def _last(self, completion: Completion, text: str) -> FilledIn:
        cut = finish_reason(completion) == "length"
        eos = completion.tokens[-1:] and completion.tokens[-1] in self.call.tickets[0].generation.request.eos
        return FilledIn(
            content=text,
            stop=True,
            model=self.state.model,
            stop_type="limit" if cut else "eos" if eos else "word",
            truncated=False,
            tokens_predicted=len(completion.tokens),
            tokens_evaluated=completion.prompt_tokens,
            tokens_cached=self.call.usage.prompt_tokens_details.cached_tokens,
            timings=self.call.timings(),
        )
