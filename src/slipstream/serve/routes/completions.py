"""The /v1/completions endpoint: continues prompts (of an encoder-decoder: sources), and takes the best of several."""

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.concurrency import run_in_threadpool

from slipstream.core.options import OPTIONS, REQUEST_FIELDS
from slipstream.engine.generation import Completion, Piece, TokenLogprobs
from slipstream.serve import answers
from slipstream.serve.call import Call, new_heading, unless_gone
from slipstream.serve.faults import BadRequest
from slipstream.serve.json_route import JsonRoute, Once, off_loop
from slipstream.serve.logprobs import TextTokens
from slipstream.serve.options import constraint, engine_options, speculation
from slipstream.serve.output import ERRORS, ChunkAnswering, answered, completed, finish_reason, streams
from slipstream.serve.routes.infill import infill_of
from slipstream.serve.schema import CompletionRequest
from slipstream.serve.settings import ServeSettings
from slipstream.serve.state import ServerState, state_of, tenant_of

DEFAULT_TOKENS = 16  # default length of a completion in tokens, as in OpenAI's interface
router = APIRouter(tags=["text"], route_class=JsonRoute)
OUTCOMES = {**ERRORS, 200: streams(answers.CompletionAnswer)}


@router.post("/v1/completions", responses=OUTCOMES, response_model=answers.CompletionAnswer)
async def completions(body: Once[CompletionRequest], request: Request) -> Response:
    """Continue one or several prompts."""
    state = state_of(request)
    refuse_beam_fields(body)
    if body.use_beam_search:
        return answered(await unless_gone(request, _searched(state, body, request)))
    options = await run_in_threadpool(_options, body, state, tenant_of(request))  # compiling grammars may take long
    prompts = _prompts(body, state.settings.limits.prompts)
    if body.suffix:
        prompts, options = await off_loop(request, _between, prompts, body, options, state)
    call = await state.call(request, prompts, options, "prompt")
    answer = await off_loop(request, _CompletionAnswer, state, body, call)
    return await answer.reply(request)


def _prompts(body: CompletionRequest, most: int) -> list[Any]:
    value: Any = body.prompt
    prompts = [value] if isinstance(value, str) or (value and isinstance(value[0], int)) else value
    if not 1 <= len(prompts) <= most:
        raise BadRequest(f"prompt holds {len(prompts)} prompts, but 1 to {most} are possible.", "prompt")
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
    options = engine_options(body, state, tenant)
    options.setdefault("max_new_tokens", DEFAULT_TOKENS)
    if (written := count_written(body, state.settings)) > (body.n or 1):
        options |= {"n": written, "logprobs": 0}  # log-probabilities decide which texts are in the answer
    options |= _of_output(body, state.settings.limits.logprobs)
    # The prompt is scored for echo with logprobs, or without a token to write; but the text of an encoder-decoder is
    # not continued from its prompt.
    scored = 0 if body.logprobs is None and body.max_tokens == 0 else body.logprobs
    if body.echo and scored is not None and state.engine.frame is None:
        options["prompt_logprobs"] = scored
    return options | constraint(body, state)


def _of_output(body: CompletionRequest, most: int) -> dict[str, Any]:
    if body.max_tokens == 0 and not body.echo:
        raise BadRequest("max_tokens=0 scores a prompt: it needs echo=true.", "max_tokens")
    if body.logprobs is not None and body.logprobs > most:
        raise BadRequest(f"logprobs={body.logprobs} is above the {most} that this server gives.", "logprobs")
    logprobs = {} if body.logprobs is None else {"logprobs": body.logprobs}
    return {**logprobs, "echo": True} if body.echo else logprobs


def count_written(body: CompletionRequest, settings: ServeSettings) -> int:
    """Return how many texts are written for every prompt."""
    asked, most = body.n or 1, settings.limits.samples
    if body.best_of is None:
        return asked
    if body.best_of > most:
        raise BadRequest(f"best_of asks for {body.best_of}, but this server gives at most {most}.", "best_of")
    if body.best_of < asked:
        raise BadRequest(f"best_of={body.best_of} is below n={asked}: of so many, no more can be answered.", "best_of")
    if body.stream and body.best_of > asked:
        raise BadRequest("best_of is known when all texts are written: leave out stream or best_of.", "best_of")
    return body.best_of


def most_probable(completions: Sequence[Completion], written: int, asked: int) -> list[int]:
    """Return the indices of the texts to answer with, the best first.

    Of every `written` texts, these are the `asked` ones with the highest mean log-probability of their tokens. Texts
    that failed, or are empty, come last.
    """

    def mean_logprob(place: int) -> float:
        completion = completions[place]
        known = [] if completion.error else [one.logprob for one in completion.logprobs or ()]
        return sum(known) / len(known) if known else float("-inf")

    starts = range(0, len(completions), written)
    ranked = (sorted(range(start, start + written), key=mean_logprob, reverse=True) for start in starts)
    return [place for places in ranked for place in places[:asked]]


def refuse_beam_fields(body: CompletionRequest) -> None:
    """Raises BadRequest for fields of beam search without use_beam_search, and for fields that it does not support."""
    if not body.use_beam_search:
        for name in REQUEST_FIELDS:
            if OPTIONS[name].group == "beams" and getattr(body, name) is not None:
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


async def _searched(state: ServerState, body: CompletionRequest, request: Request) -> answers.CompletionAnswer:
    beams = count_written(body, state.settings)
    if beams < 2:
        raise BadRequest("use_beam_search needs beams: give best_of, or n, of 2 or more.", "use_beam_search")
    options = engine_options(body, state, tenant_of(request))
    options.pop("n", None)
    if speculation(body).verify is None:
        options.pop("verify", None)  # the rule that a seed selects is for drafts that are drawn, which beams are not
    if body.temperature is None:
        options["temperature"] = 0.0
    options.setdefault("max_new_tokens", DEFAULT_TOKENS)
    options |= _of_output(body, state.settings.limits.logprobs)
    options |= {"num_beams": beams, "num_return_sequences": body.n or 1}
    heading, prompts = new_heading("cmpl", state.model), _prompts(body, state.settings.limits.prompts)
    texts = await state.search(request, prompts, options, "prompt")
    choices = [
        answers.TextChoice(index=index, text=one.text, finish_reason=finish_reason(one), score=one.score)
        for index, one in enumerate(texts)
    ]
    return answers.CompletionAnswer(**heading, choices=choices, usage=request.state.call.usage)


class _CompletionAnswer(ChunkAnswering):
    prefix, answer, chunk = "cmpl", answers.CompletionAnswer, answers.CompletionAnswer

    def __init__(self, state: ServerState, body: CompletionRequest, call: Call) -> None:
        super().__init__(state, body, call)
        self.asked, self.top = body.n or 1, body.logprobs
        self.tokens = [TextTokens(state.spelling, body.logprobs or 0, ticket.generation) for ticket in call.tickets]

    def choices(self, texts: Sequence[Sequence[Piece]]) -> list[answers.TextChoice]:
        written, done = self.call.samples, list(map(completed, texts))
        places = most_probable(done, written, self.asked) if written > self.asked else range(len(texts))
        return [
            answers.TextChoice(
                index=index,
                text=done[place].text,
                logprobs=self._logprobs(place, done[place].logprobs),
                finish_reason=finish_reason(done[place]),
                explained=self.explained(texts[place]),
            )
            for index, place in enumerate(places)
        ]

    def chunks(self, index: int, pieces: Sequence[Piece]) -> list[answers.TextChoice]:
        completion = pieces[-1].completion
        logprobs = tuple(piece.logprobs for piece in pieces if piece.logprobs)
        chunk = answers.TextChoice(
            index=index,
            text="".join(piece.text for piece in pieces),
            logprobs=self._logprobs(index, logprobs if logprobs or completion else None),
            finish_reason=finish_reason(completion) if completion else None,
            explained=self.explained(pieces),
        )
        return [chunk] if chunk.text or completion or chunk.logprobs or chunk.explained else []

    def _logprobs(self, index: int, found: tuple[TokenLogprobs, ...] | None) -> answers.TextLogprobs | None:
        return None if found is None or self.top is None else self.tokens[index].read(found)
