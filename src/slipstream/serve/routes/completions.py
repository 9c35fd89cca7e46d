"""The /v1/completions endpoint: continues prompts (of an encoder-decoder: sources), and takes the best of several."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.concurrency import run_in_threadpool

from slipstream.core.options import OPTIONS, REQUEST_FIELDS
from slipstream.engine.generation import Completion, Piece, TokenLogprobs
from slipstream.serve import answers
from slipstream.serve.call import Call, Heading, unless_gone
from slipstream.serve.faults import BadRequest
from slipstream.serve.grammars import constraint
from slipstream.serve.infill import infill_of
from slipstream.serve.json_route import JsonRoute, Once, off_loop
from slipstream.serve.logprobs import TextTokens
from slipstream.serve.options import engine_options, speculation
from slipstream.serve.output import ERRORS, answered, completed, finish_reason, streams, with_choices
from slipstream.serve.schema import UNLIMITED, CompletionRequest
from slipstream.serve.settings import Limits, ServeSettings
from slipstream.serve.state import ServerState, state_of, tenant_of
from slipstream.serve.stream import ChunkAnswering, reply

OF_BEAMS = tuple(name for name in REQUEST_FIELDS if OPTIONS[name].group == "beams")


def count_written(body: CompletionRequest, settings: ServeSettings) -> int:
    """Return how many texts are generated for every prompt. Raises BadRequest for an impossible best_of."""
    asked, most = body.n or 1, settings.limits.samples
    if body.best_of is None:
        return asked
    if body.best_of > most:
        raise BadRequest(f"best_of asks for {body.best_of}, but this server gives at most {most}.", "best_of")
    if body.best_of < asked:
        raise BadRequest(f"best_of={body.best_of} is below n={asked}: of so many, no more can be answered.", "best_of")
    if body.stream and body.best_of > asked:
        raise BadRequest(
            "best_of is known when all texts are written: leave out stream, or give no best_of.", "best_of"
        )
    return body.best_of


def most_probable(completions: Sequence[Completion], written: int, asked: int) -> list[int]:
    """Return the indices of the texts to answer with, the best first.

    Of every `written` texts, these are the `asked` ones with the highest mean log-probability of their tokens. Texts
    that failed come last.
    """
    chosen = list[int]()
    for start in range(0, len(completions), written):
        places = range(start, start + written)
        chosen += sorted(places, key=lambda place: mean_logprob(completions[place]), reverse=True)[:asked]
    return chosen


def mean_logprob(completion: Completion) -> float:
    """Return the mean log-probability of a text's tokens; minus infinity for one that failed or is empty."""
    known = [] if completion.error else [one.logprob for one in completion.logprobs or ()]
    return sum(known) / len(known) if known else float("-inf")


# ---- beam search -----------------------------------------------------------------------------------------------------


def refuse_beam_fields(body: CompletionRequest) -> None:
    """Raises BadRequest for fields of beam search without use_beam_search, and for fields that it does not support."""
    if not body.use_beam_search:
        for name in OF_BEAMS:
            if getattr(body, name) is not None:
                raise BadRequest(f"{name} is for beam search: give use_beam_search=true as well.", name)
        return
    for name, why in (
        ("suffix", "beams do not fill in"),
        ("stream", "no text is known before the search has ended"),
        ("response_format", "beams and grammars do not go together"),
        ("structured_outputs", "beams and grammars do not go together"),
    ):
        if getattr(body, name):
            raise BadRequest(f"use_beam_search excludes {name}: {why}.", name)


def beam_options(body: CompletionRequest, settings: ServeSettings, tenant: str, written: int) -> dict[str, Any]:
    """Return the engine's options for a request with beam search, with `written` as the number of beams.

    Raises BadRequest for fewer than two.
    """
    if written < 2:
        raise BadRequest("use_beam_search needs beams: give best_of, or n, of 2 or more.", "use_beam_search")
    options = engine_options(body, settings, tenant)
    options.pop("n", None)
    if speculation(body).verify is None:
        options.pop("verify", None)  # the rule that a seed selects is for drafts that are drawn, which beams are not
    if body.temperature is None:
        options["temperature"] = 0.0
    return options | {"num_beams": written, "num_return_sequences": body.n or 1}


DEFAULT_TOKENS = 16
"""The default length of a completion in tokens, as in OpenAI's interface."""

router = APIRouter(tags=["text"], route_class=JsonRoute)

OUTCOMES = {**ERRORS, 200: streams(answers.CompletionAnswer)}


@router.post(
    "/v1/completions",
    responses=OUTCOMES,
    response_model=answers.CompletionAnswer,
)
async def completions(body: Once[CompletionRequest], request: Request) -> Response:
    """Continue one or several prompts."""
    state = state_of(request)
    state.check_model(body.model)
    refuse_beam_fields(body)
    if body.use_beam_search:
        return answered(await unless_gone(request, _searched(state, body, request)))
    options = await run_in_threadpool(_options, body, state, tenant_of(request))  # compiling grammars may take long
    prompts = _prompts(body, state.settings.limits)
    if body.suffix:
        prompts, options = await off_loop(request, _between, prompts, body, options, state)
    call = await state.call(request, prompts, options, "prompt")
    answer = await off_loop(request, _CompletionAnswer, state, body, call)
    return await reply(request, answer, body.stream)


async def _searched(state: ServerState, body: CompletionRequest, request: Request) -> answers.CompletionAnswer:
    options = beam_options(body, state.settings, tenant_of(request), count_written(body, state.settings))
    options.setdefault("max_new_tokens", DEFAULT_TOKENS)
    options |= _for_texts(body, state.settings.limits)
    heading = Heading.new("cmpl", state.model)
    texts = await state.search(request, _prompts(body, state.settings.limits), options, "prompt")
    choices = [
        answers.TextChoice(index=index, text=one.text, finish_reason=finish_reason(one), score=one.score)
        for index, one in enumerate(texts)
    ]
    prompt = sum(one.prompt_tokens for one in texts[:: body.n or 1])  # counted once per prompt
    written = sum(len(one.tokens) for one in texts)
    usage = answers.Usage(prompt_tokens=prompt, completion_tokens=written, total_tokens=prompt + written)
    return answers.CompletionAnswer(**heading.fields, choices=choices, usage=usage)


def _prompts(body: CompletionRequest, limits: Limits) -> list[Any]:
    value: Any = body.prompt
    prompts = [value] if isinstance(value, str) or (value and isinstance(value[0], int)) else value
    if not 1 <= len(prompts) <= limits.prompts:
        raise BadRequest(f"prompt holds {len(prompts)} prompts, but 1 to {limits.prompts} are possible.", "prompt")
    return [prompt if isinstance(prompt, str) else tuple(prompt) for prompt in prompts]


def _between(
    prompts: list[Any], body: CompletionRequest, options: dict[str, Any], state: ServerState
) -> tuple[list[Any], dict[str, Any]]:
    fill = infill_of(state, "suffix")
    if body.echo or not all(isinstance(prompt, str) for prompt in prompts):
        raise BadRequest("suffix is for prompts that are texts, without echo: leave it out.", "suffix")
    state.check_length("prompt", body.suffix, *prompts)
    ends = [*options.get("stop_token_ids", ()), *fill.ends]
    return [fill.prompt(prompt, body.suffix or "") for prompt in prompts], {**options, "stop_token_ids": ends}


def _options(body: CompletionRequest, state: ServerState, tenant: str) -> dict[str, Any]:
    options = engine_options(body, state.settings, tenant)
    options.setdefault("max_new_tokens", state.longest if body.n_predict == UNLIMITED else DEFAULT_TOKENS)
    if (written := count_written(body, state.settings)) > (body.n or 1):
        options |= {"n": written, "logprobs": 0}  # log-probabilities decide which texts are in the answer
    return options | _for_texts(body, state.settings.limits) | _scoring(body, state) | constraint(body, state)


def _for_texts(body: CompletionRequest, limits: Limits) -> dict[str, Any]:
    options: dict[str, Any] = {"echo": True} if body.echo else {}
    if body.max_tokens == 0 and not body.echo:
        raise BadRequest("max_tokens=0 scores a prompt: it needs echo=true.", "max_tokens")
    if body.logprobs is None:
        return options
    if body.logprobs > limits.logprobs:
        raise BadRequest(f"logprobs={body.logprobs} is above the {limits.logprobs} that this server gives.", "logprobs")
    return options | {"logprobs": body.logprobs}


def _scoring(body: CompletionRequest, state: ServerState) -> dict[str, Any]:
    """Return the option that scores the prompt: for echo with logprobs, or without a token to write.

    The text of an encoder-decoder is not continued from its prompt, so it has no scores.
    """
    wanted = 0 if body.logprobs is None and body.max_tokens == 0 else body.logprobs
    return {"prompt_logprobs": wanted} if body.echo and wanted is not None and state.engine.frame is None else {}


class _CompletionAnswer(ChunkAnswering):
    """Converts the results of a call to the response, as one answer or as streamed chunks."""

    def __init__(self, state: ServerState, body: CompletionRequest, call: Call) -> None:
        super().__init__("cmpl", answers.CompletionAnswer, state, body, call)
        self.tokens = [TextTokens(state.spelling, body.logprobs or 0, ticket.generation) for ticket in call.tickets]

    def whole(self, texts: Sequence[Sequence[Piece]]) -> Response:
        choices = []
        written, asked = self.call.samples, self.body.n or 1
        places = most_probable(list(map(completed, texts)), written, asked) if written > asked else range(len(texts))
        for index, place in enumerate(places):
            pieces = texts[place]
            completion = completed(pieces)
            choices.append(
                answers.TextChoice(
                    index=index,
                    text=completion.text,
                    logprobs=self._logprobs(place, completion.logprobs),
                    finish_reason=finish_reason(completion),
                    explained=self.explained(pieces),
                )
            )
        about = self.call.about(self.speculation)
        return with_choices(answers.CompletionAnswer(**self.heading.fields, choices=[], **about), choices)

    async def events(self) -> AsyncIterator[str]:
        """Yield server-sent events as tokens arrive, then the usage if it was requested."""
        async for index, pieces in self.call.rounds():
            chunk, ended = self._chunk(index, pieces), pieces[-1].completion is not None
            if chunk.text or ended or chunk.logprobs or chunk.explained:
                yield self.event([chunk], self.stream.continuous_usage_stats, ended)
        for each in self.last_events():
            yield each

    def _chunk(self, index: int, pieces: Sequence[Piece]) -> answers.TextChoice:
        completion = pieces[-1].completion
        logprobs = tuple(piece.logprobs for piece in pieces if piece.logprobs)
        return answers.TextChoice(
            index=index,
            text="".join(piece.text for piece in pieces),
            logprobs=self._logprobs(index, logprobs if logprobs or completion else None),
            finish_reason=finish_reason(completion) if completion else None,
            explained=self.explained(pieces),
        )

    def _logprobs(self, index: int, found: tuple[TokenLogprobs, ...] | None) -> answers.TextLogprobs | None:
        return None if found is None or self.body.logprobs is None else self.tokens[index].read(found)
