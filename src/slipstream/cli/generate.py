"""`slipstream generate`: continue prompts and print what came of it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import typer

from slipstream.cli.app import INTERRUPTED, WRONG, app, flag, say, tell
from slipstream.cli.options import (
    BatchSize,
    Chat,
    Compile,
    Device,
    Draft,
    Dtype,
    ExactShape,
    Explain,
    File,
    FrequencyPenalty,
    Gamma,
    Json,
    Lossless,
    MaxNewTokens,
    MinP,
    Plain,
    PlanFile,
    PresencePenalty,
    Profile,
    Prompts,
    RepetitionPenalty,
    Seed,
    Stop,
    Stream,
    Target,
    Task,
    Temperature,
    TopK,
    TopP,
    Tree,
    TypicalP,
    Verify,
    shaped,
)
from slipstream.explain import Explanation, breakdown, busy, console, progress
from slipstream.jsontext import json_text
from slipstream.planfile import Plan
from slipstream.prompts import Item, gather
from slipstream.stats import Stats

if TYPE_CHECKING:
    from slipstream.engine import Completion, Engine
    from slipstream.records import Round


@app.command()
def generate(
    context: typer.Context,
    prompts: Prompts = None,
    file: File = None,
    chat: Chat = False,
    target: Target = None,
    draft: Draft = None,
    gamma: Gamma = 5,
    tree: Tree = None,
    verify: Verify = "block",
    plan: PlanFile = None,
    lossless: Lossless = False,
    exact_shape: ExactShape = False,
    plain: Plain = False,
    task: Task = None,
    dtype: Dtype = "auto",
    device: Device = None,
    batch_size: BatchSize = 8,
    compile: Compile = False,
    max_new_tokens: MaxNewTokens = 128,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    typical_p: TypicalP = 1.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    presence_penalty: PresencePenalty = 0.0,
    frequency_penalty: FrequencyPenalty = 0.0,
    seed: Seed = 0,
    stop: Stop = None,
    stream: Stream = False,
    explain: Explain = False,
    profile: Profile = False,
    as_json: Json = False,
) -> None:
    """Continue prompts; with an encoder-decoder, translate or summarize them.

    A FILE of prompts may also hold JSON lines: objects with "prompt" (text), "messages" (a chat) or "tokens" (ids).

    Example: slipstream generate "def fibonacci(n):" --max-new-tokens 64 --temperature 0.8 --stream
    """
    _one_at_most({"--stream": stream, "--explain": explain, "--json": as_json})
    items, stops, engine = gather(prompts or [], file, chat), [_unescape(text) for text in stop or ()], None
    with busy(console(stderr=True), "loading"):
        options = {**_sampling(context.params), **_limits(context.params), "stop": stops}
        if any(not item.error for item in items):
            from slipstream.engine import load

            engine = load(target, draft, progress=say, **_how(context))
            items = [_encoded(engine, item) for item in items]
    tell(engine.notes if engine else ())
    for item in items:
        if item.error:
            say(f"{item.where}: {item.error}")
    show = _show_stream if stream else _show_rounds if explain else _show_json if as_json else _show_text
    code = show(Work(engine, items, options, profile))
    raise typer.Exit(code or (WRONG if any(item.error for item in items) else 0))


@dataclass(frozen=True)
class Work:
    """What `generate` has to do. The engine is None if no prompt can be used."""

    engine: Any
    items: list[Item]
    options: dict[str, Any]
    profile: bool = False

    @property
    def good(self) -> list[Item]:
        """The prompts that can be used."""
        return [item for item in self.items if not item.error]

    def run(self, on_round: Callable[[Round], None]) -> tuple[list[Completion], int]:
        """Generate all at once -> completions of the good prompts, and INTERRUPTED or 0."""
        from slipstream.engine import Interrupted

        if not self.good:
            return [], 0
        prompts = [item.prompt for item in self.good]
        try:
            return self.engine.generate(prompts, on_round=on_round, **self.options), 0
        except Interrupted as stop:
            return stop.completions, INTERRUPTED

    def run_watched(self) -> tuple[list[Completion], int]:
        """The same under a progress bar."""
        with progress(console(stderr=True), len(self.good), self.options["max_new_tokens"]) as on_round:
            return self.run(on_round)


def _how(context: typer.Context) -> dict[str, Any]:
    """How to load; a plan stands in for a gamma and a rule that were not given."""
    params = context.params
    names = ("verify", "dtype", "device", "batch_size", "compile", "exact_shape", "task")
    how = {**shaped(context), **{name: params[name] for name in names}}
    if not params["plan"]:
        return how
    plan, temperature = Plan.read(params["plan"]), params["temperature"]
    if plan.temperature != temperature:
        say(
            f"note: the plan was measured at temperature {plan.temperature:g}; at {temperature:g} others may be better."
        )
    sources = {name: context.get_parameter_source(name) for name in ("gamma", "verify")}
    return {**how, "plan": plan, **{name: None for name, given in sources.items() if given and given.name == "DEFAULT"}}


def _encoded(engine: Engine, item: Item) -> Item:
    """The item with token ids that the target can take, or with an error."""
    if item.error:
        return item
    try:
        ids = engine.encode(item.prompt)
    except Exception as error:  # a chat template may raise anything
        return replace(item, error=str(error).replace("prompt 0", "the prompt", 1) or type(error).__name__)
    given_ids = isinstance(item.prompt[0], int)
    return replace(item, prompt=ids, shown=engine.decode(ids) if given_ids else item.shown)


def _show_text(work: Work) -> int:
    """Prompts and their completions."""
    completions, code = work.run_watched()
    for item, completion in zip(work.good, completions, strict=True):
        if completion.tokens or not code:
            _begin(work, item)
            print(completion.text)
    _summarize(completions)
    _show_times(work, completions)
    return code


def _show_stream(work: Work) -> int:
    """The same, token by token, one prompt after the other."""
    completions = []
    for item in work.good:
        _begin(work, item)
        try:
            for piece in work.engine.stream(item.prompt, **work.options):
                print(piece.text, end="", flush=True)
        except KeyboardInterrupt:
            print()
            return INTERRUPTED
        print()
        completions.append(piece.completion)
    _summarize(completions)
    _show_times(work, completions)
    return 0


def _show_rounds(work: Work) -> int:
    """What happened in every round."""
    if not work.good:
        return 0
    explanation = Explanation(work.engine.decode, console(), [item.where for item in work.good])
    completions, code = work.run(explanation)
    explanation.finish()
    _show_times(work, completions)
    return code


def _show_json(work: Work) -> int:
    """An object per prompt, in order."""
    completions, code = work.run_watched()
    done = iter(completions)
    for index, item in enumerate(work.items):
        rest = {"error": f"{item.where}: {item.error}"} if item.error else _as_dict(next(done))
        print(json_text({"index": index, **rest}, ensure_ascii=False))
    _show_times(work, completions)
    return code


def _as_dict(completion: Completion) -> dict[str, Any]:
    names = ("text", "tokens", "finish_reason", "prompt_tokens")
    return {**{name: getattr(completion, name) for name in names}, "stats": completion.stats.as_dict()}


def _begin(work: Work, item: Item) -> None:
    """A heading if there are several prompts, and the prompt."""
    if len(work.items) > 1:
        gap = "" if item is work.good[0] else "\n"
        print(f"{gap}==> {item.where} <==")
    print(item.shown, end="\n" if work.engine.frame else "", flush=True)  # what answers a source does not continue it


def _show_times(work: Work, completions: Sequence[Completion]) -> None:
    """Where the time went, for one who asked; beside the output, not in it."""
    if work.profile:
        console(stderr=True).print(breakdown(sum((completion.stats for completion in completions), Stats())))


def _summarize(completions: Sequence[Completion]) -> None:
    """One line of figures for a person who watches."""
    screen = console(stderr=True)
    if not screen.is_terminal or not completions:
        return
    stats = sum((completion.stats for completion in completions), Stats())
    length, rate = stats.mean_acceptance_length or 0, stats.tokens_per_second or 0
    screen.print(f"{stats.emitted} tokens, {length:.2f} per target call, {rate:.1f} per second", style="dim")


def _one_at_most(flags: dict[str, bool]) -> None:
    given = [name for name, value in flags.items() if value]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} exclude each other: choose one.")


def _sampling(params: dict[str, Any]) -> dict[str, Any]:
    """Those parameters of a command that are settings of `Sampling`, checked before anything is loaded."""
    from slipstream.sampling import Sampling

    off = {field.name: field.default for field in fields(Sampling) if field.name in params}
    settings = {name: params[name] for name in off}
    for name, value in settings.items():
        if not math.isfinite(value):
            raise ValueError(f"{flag(name)} {value} is not a finite number.")
    idle = [flag(name) for name in ("top_k", "top_p", "min_p", "typical_p") if settings[name] != off[name]]
    if Sampling(**settings).greedy and idle:
        say(f"note: --temperature 0 is greedy and ignores {', '.join(idle)}.")
    return settings


def _limits(params: dict[str, Any]) -> dict[str, Any]:
    """The other options of a call."""
    return {name: params[name] for name in ("seed", "plain", "max_new_tokens", "lossless")}


def _unescape(text: str) -> str:
    r"""The escapes \n, \t, \r and \\ -> their characters."""
    if not text:
        raise ValueError("--stop is empty: give the text to end before.")
    return re.sub(r"\\([ntr\\])", lambda escape: {"n": "\n", "t": "\t", "r": "\r"}.get(escape[1], "\\"), text)
