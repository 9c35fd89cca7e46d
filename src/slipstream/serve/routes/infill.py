"""/infill: the text between a prefix and a suffix, as llama.cpp's server and its editor plugins have it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.concurrency import run_in_threadpool

from slipstream.engine.generation import Completion, Piece
from slipstream.serve.answers import FilledIn
from slipstream.serve.call import Call
from slipstream.serve.faults import BadRequest
from slipstream.serve.json_route import JsonRoute, Once, off_loop
from slipstream.serve.options import constraint, engine_options
from slipstream.serve.output import ERRORS, Answering, answered, completed, event, finish_reason, streams
from slipstream.serve.schema import ExtraFile, InfillRequest
from slipstream.serve.state import ServerState, state_of, tenant_of

# The tokens before the prefix, the suffix and the middle. Without the last, the suffix comes before the prefix.
MARKS: tuple[tuple[str, str, str | None], ...] = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite, SmolLM
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    ("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"),  # Seed
    ("<PRE>", "<SUF>", "<MID>"),
    ("[PREFIX]", "[SUFFIX]", "[MIDDLE]"),
    ("[PREFIX]", "[SUFFIX]", None),  # Codestral
)
REPOSITORY = ("<|repo_name|>", "<reponame>", "<repo_name>", "<|repo|>")
FILE = ("<|file_sep|>", "<file_sep>", "<filename>")  # before the name of another file of the context
ENDS = (*FILE, *REPOSITORY, "<|fim_pad|>", "<fim_pad>", "▁<EOT>", "<EOT>")  # of what is filled in
SNIPPET = "\n\n--- snippet ---\n\n"  # line before a text of another file, for models without a token for that


@dataclass(frozen=True)
class Infill:
    """How a tokenizer marks the parts of a prompt for filling in; `begin` are the tokens before every text."""

    tokenizer: Any
    marks: tuple[int, int, int | None]
    begin: tuple[int, ...]
    repository: int | None
    file: int | None
    ends: tuple[int, ...]

    @staticmethod
    @lru_cache(maxsize=1)
    def of(tokenizer: Any) -> Infill | None:
        ids = tokenizer.get_vocab()
        known = next((marks for marks in MARKS if all(mark is None or mark in ids for mark in marks)), None)
        if known is None:
            return None
        marks = ids[known[0]], ids[known[1]], None if known[2] is None else ids[known[2]]
        text = tokenizer.encode("x", add_special_tokens=False)
        whole = tokenizer.encode("x")
        begin = whole[: len(whole) - len(text)] if text and whole[-len(text) :] == text else []
        repository, file = (next((ids[name] for name in names if name in ids), None) for names in (REPOSITORY, FILE))
        ends = tuple(ids[name] for name in ENDS if name in ids)
        return Infill(tokenizer, marks, tuple(begin), repository, file, ends)

    def prompt(self, prefix: str, suffix: str, extra: Sequence[ExtraFile] = ()) -> tuple[int, ...]:
        before, after, middle = self.marks
        parts = ([before, *self._ids(prefix)], [after, *self._ids(suffix)])
        ordered = [*parts[1], *parts[0]] if middle is None else [*parts[0], *parts[1], middle]
        context = []
        if extra and self.repository is not None:
            context += [self.repository, *self._ids("project\n")]
        for file in extra:
            context += [*self._named(file.filename or "file"), *self._ids(file.text)]
        if extra and self.file is not None:
            context += self._named("this file")
        return (*self.begin, *context, *ordered)

    def _named(self, name: str) -> list[int]:
        return self._ids(SNIPPET) if self.file is None else [self.file, *self._ids(f"{name}\n")]

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))


def infill_of(state: ServerState, field: str) -> Infill:
    """Return how the served model fills in. Raises BadRequest, which names `field`, for a model that does not."""
    found = Infill.of(state.engine.tokenizer) if state.engine.tokenizer is not None else None
    if found is None:
        without = f"the tokenizer of {state.model} has no tokens for that"
        raise BadRequest(f"{field} needs a model that fills in, and {without}: leave it out.", field)
    return found


router = APIRouter(tags=["text"], route_class=JsonRoute)


@router.post("/infill", responses={**ERRORS, 200: streams(FilledIn)}, response_model=FilledIn)
async def infill(body: Once[InfillRequest], request: Request) -> Response:
    """Fill in the text between a prefix and a suffix."""
    state = state_of(request)
    fill = infill_of(state, "input_suffix")
    options = engine_options(body, state, tenant_of(request))
    options.setdefault("max_new_tokens", state.longest)
    options["stop_token_ids"] = [*(body.stop_token_ids or ()), *fill.ends]
    if body.t_max_predict_ms:
        options["max_time"] = body.t_max_predict_ms / 1e3
    options |= await run_in_threadpool(constraint, body, state)  # grammars may take a while
    files = [text for file in body.input_extra or () for text in (file.filename, file.text)]
    state.check_length("input_prefix", body.input_prefix, body.input_suffix, body.prompt, *files)
    before = (body.input_prefix or "") + (body.prompt or "")
    prompt = await off_loop(request, fill.prompt, before, body.input_suffix or "", body.input_extra or ())
    call = await state.call(request, [prompt], options, "input_prefix")
    return await _FilledIn(state, body, call).reply(request)


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
