"""Running a batch without the server's libraries: lines in our own format go to the engine as they are."""

from collections.abc import Callable, Sequence
from typing import Any

from slipstream.core.options import REQUEST_FIELDS
from slipstream.decoding.rules import COUPLED
from slipstream.decoding.scheduler import Scheduler
from slipstream.engine.engine import Engine
from slipstream.engine.generation import Completion, Generation
from slipstream.serve.batch.lines import PLAIN, BatchLine, Keep, ServerReply, refused
from slipstream.serve.recipe import Recipe

OPTIONS = {field: name for name, field in REQUEST_FIELDS.items()}  # of lines -> the engine's names


def run(
    recipe: Recipe,
    lines: Sequence[BatchLine],
    keep: Keep,
    on_load: Callable[[Engine], object],
    progress: Callable[[str], object],
) -> None:
    """Answer lines of which `beyond` is empty, as `batch.run.run` does, but without an application."""
    engine, room, texts = recipe.engine(progress), recipe.room, list[tuple[BatchLine, list[Generation]]]()
    on_load(engine)
    left = iter(lines)
    with Scheduler(engine.shared_decoder, prefix_cache=room.cache_bytes, memory=room.memory) as scheduler:
        while True:
            while len(texts) < 2 * room.rows and (line := next(left, None)):
                try:
                    texts.append((line, _begin(line, engine, scheduler, recipe.settings.lossless)))
                except Exception as error:  # a chat template may raise anything
                    keep(line, refused(str(error) or type(error).__name__))
            if not texts:
                return
            if round := scheduler.step():
                by_row = {id(each.row): each for _, some in texts for each in some}
                for place, row in enumerate(round.rows):
                    by_row[id(row)].record(round, place)
            running = []
            for line, some in texts:
                if all(each.row and each.row.finish_reason for each in some):
                    keep(line, _reply([each.completion for each in some]))
                else:
                    running.append((line, some))
            texts = running


def beyond(line: BatchLine) -> str:
    if line.error or line.form is not PLAIN:
        return "" if line.error else "OpenAI's batch format"
    others = line.body.keys() - OPTIONS.keys() - {"prompt", "messages", "speculative"}
    speculative, messages = line.body.get("speculative", {}), line.body.get("messages", [])
    if not isinstance(speculative, dict) or speculative.keys() - {"verify", "gamma"}:
        others.add("speculative")
    if any(each.keys() != {"role", "content"} or not isinstance(each["content"], str) for each in messages):
        others.add("messages")
    return ", ".join(sorted(others))


def _begin(line: BatchLine, engine: Engine, scheduler: Scheduler, lossless: bool) -> list[Generation]:
    body = line.body_for(engine)
    options: dict[str, Any] = {OPTIONS[name]: value for name, value in body.items() if name in OPTIONS}
    if biases := options.get("logit_bias"):  # as servers write it: -100 forbids a token
        options["logit_bias"] = {int(token): float("-inf") if bias == -100 else bias for token, bias in biases.items()}
    if options.get("top_k") == -1:  # off, as in vLLM
        del options["top_k"]
    verify = {} if options.get("seed") is None else {"verify": COUPLED}
    options |= {"lossless": lossless, **verify, **line.body.get("speculative", {})}
    prompt = line.body.get("messages") or line.body["prompt"]
    ids = "prompt" in line.body and not isinstance(prompt, str)
    generations = engine.prepare([tuple(prompt) if ids else prompt], options, shared=True).generations
    for each in generations:
        scheduler.check(each.request)  # before any of them is queued
    for each in generations:
        each.row = scheduler.add(each.request)
    return generations


def _reply(completions: Sequence[Completion]) -> ServerReply:
    if error := next((each.error for each in completions if each.error), None):
        return refused(error)
    reasons = ["stop" if each.finish_reason == "stop" else "length" for each in completions]
    choices = [{"text": each.text, "finish_reason": why} for each, why in zip(completions, reasons, strict=True)]
    written = sum(len(each.tokens) for each in completions)
    usage = {"prompt_tokens": completions[0].prompt_tokens, "completion_tokens": written}
    return ServerReply(200, {"choices": choices, "usage": usage})
