"""The command `slipstream generate`, which continues prompts and prints the results."""

from __future__ import annotations

import sys
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, TextIO

import typer

from slipstream.cli import options as opt
from slipstream.cli.app import INTERRUPTED, WRONG, app, flag, say, tell
from slipstream.cli.console import busy, console, progress, steps
from slipstream.cli.settings import call_options, read_form
from slipstream.core.model_options import ModelOptions
from slipstream.core.signals import undisturbed
from slipstream.core.stats import Stats
from slipstream.engine.explain import Explanation, breakdown
from slipstream.engine.plan_file import Plan
from slipstream.text.jsontext import json_text
from slipstream.text.prompts import Item, gather, with_media


@dataclass
class Answers:
    """A stream of JSON lines, one per prompt, in the order in which they finish."""

    stream: TextIO
    written: set[int] = field(default_factory=set)

    def write(self, index: int, answer: dict[str, Any]) -> None:
        line = json_text({"index": index, **answer}, ensure_ascii=False)
        with undisturbed():  # a line is written and counted, or neither
            self.stream.write(f"{line}\n")
            self.stream.flush()
            self.written.add(index)


def answer_as_dict(completion: Completion) -> dict[str, Any]:
    names = ("text", "tokens", "finish_reason", "prompt_tokens", "context_full")
    record = {name: getattr(completion, name) for name in ("error", *names) if name != "error" or completion.error}
    if completion.logprobs is not None:
        record["logprobs"] = [asdict(each) for each in completion.logprobs]
    if completion.score is not None:
        record["score"] = completion.score
    return {**record, "stats": completion.stats.as_dict()}


Media = opt.panel(
    None,
    image=opt.own(list[str] | None, None, "An image that prompts are about, for vision models. Repeatable.", "FILE"),
    audio=opt.own(list[str] | None, None, "A sound that the prompts are about, for audio models. Repeatable.", "FILE"),
)
Output = opt.panel(
    "Output",
    stream=opt.own(bool, False, "Print tokens as they are made."),
    explain=opt.own(bool, False, "Show each round: drafted, kept, corrected."),
    profile=opt.own(bool, False, "Show afterwards where the time went."),
    as_json=opt.own(bool, False, "A JSON line per prompt, as each finishes; index names it.", flag="--json"),
)
LOADED = ("pair", "rounds", "tree", "plan", "shape", "task", "compile", "rows", "threads", "target")


@app.command()
@opt.with_options(
    *(opt.grouped(*LOADED, gamma="auto", verify="block"), opt.grouped("sampling"), opt.Forms),
    *(opt.grouped("samples", "beams", "output"), Output, opt.Asked, Media, opt.Lossless, opt.Plain),
)
def generate(context: typer.Context, prompts: opt.Prompts = None) -> None:
    """Continue prompts; with an encoder-decoder, translate or summarize them.

    A FILE of prompts may also hold JSON lines: objects with "prompt" (text), "messages" (a chat) or "tokens" (ids).

    --json writes each answer as it finishes, in that order; "index" names its prompt, from 0 on (with --n and with
    beams the answer, beside its "prompt" and "sample"). An interrupted run (Ctrl-C, SIGTERM) marks what is unfinished.
    For files of answers, and runs that go on where they were, there is `slipstream batch`.

    Example: slipstream generate "def fibonacci(n):" --max-new-tokens 64 --temperature 0.8 --stream

    Beam search: slipstream generate "def fibonacci(n):" --draft embedded --num-beams 4 --num-return-sequences 2
    """
    params = context.params
    shown = {flag(name): params[name] for name in ("stream", "explain")}
    for together in ({**shown, "--json": params["as_json"]}, {"--num-beams": (params["num_beams"] or 1) > 1, **shown}):
        if len(chosen := [name for name, value in together.items() if value]) > 1:
            raise ValueError(f"{' and '.join(chosen)} exclude each other: choose one.")
    if params["logprobs"] is not None and not params["as_json"]:
        raise ValueError("--logprobs are written as JSON only: add --json.")
    items, engine = gather(prompts or [], params["file"], params["chat"]), None
    with busy("starting"):
        options = call_options(params, opt.written_parameters(context))
    items = [with_media(item, {"images": params["image"] or (), "audio": params["audio"] or ()}) for item in items]
    form = read_form(params)
    with busy("loading"):
        if any(not item.error for item in items):
            from slipstream.engine.load import load

            engine = load(_models(context), progress=say)
            for name, value in form.items():
                options["grammar"] = getattr(engine.grammars, name)(value)
            items, options = [_encoded(engine, item) for item in items], engine.defaults.complete(options)
    options.setdefault("max_new_tokens", params["max_new_tokens"])
    tell(engine.notes if engine else ())
    # Each sample of a prompt is an item of its own; beam search numbers its texts itself.
    samples = options.get("num_return_sequences") or options.pop("n")
    if samples > 1:
        items = [replace(item, where=f"{item.where}, sample {i}") for item in items for i in range(1, samples + 1)]
    work = Work(engine, items, options, params["profile"], samples)
    for item in work.items:
        if item.error:
            say(f"{item.where}: {item.error}")
    shows = {"stream": _show_stream, "explain": _show_rounds, "as_json": _show_json}
    code = next((show for name, show in shows.items() if params[name]), _show_text)(work)
    raise typer.Exit(code or (WRONG if work.failed or any(item.error for item in work.items) else 0))


def _models(context: typer.Context) -> ModelOptions:
    """Return the models that the options ask for, with the plan read, and a note if it is for another temperature."""
    models, temperature = opt.asked_models(context), context.params["temperature"]
    if models.plan is None:
        return models
    plan = Plan.read(models.plan)
    if plan.temperature != temperature:
        say(f"note: the plan is measured at temperature {plan.temperature:g}; at {temperature:g} others may be better.")
    return replace(models, plan=plan)


def _encoded(engine: Engine, item: Item) -> Item:
    if item.error:
        return item
    from slipstream.engine.requests import modalities, read_prompt

    try:
        ids = engine.encode(item.prompt)
    except Exception as error:  # a chat template may raise anything
        return replace(item, error=str(error).replace("prompt 0", "the prompt", 1) or type(error).__name__)
    if modalities(read_prompt(item.prompt)):  # images and sounds are not in the ids
        return item
    given_ids = isinstance(item.prompt[0], int)
    return replace(item, prompt=ids, shown=engine.decode(ids) if given_ids else item.shown)


if TYPE_CHECKING:
    from slipstream.engine.engine import Engine
    from slipstream.engine.generation import Completion, Piece


@dataclass
class Work:
    """The work of `generate`: an item for each answer, of which `samples` side by side have the same prompt.
    The engine is None if no prompt can be used; `failed` is True once a text could not go on."""

    engine: Any
    items: list[Item]
    options: dict[str, Any]
    profile: bool = False
    samples: int = 1
    failed: bool = False

    @property
    def good(self) -> list[Item]:
        return [item for item in self.items if not item.error]

    def run(self, **listeners: Any) -> tuple[list[Completion], int]:
        """Generate all good prompts -> completions, and INTERRUPTED or 0."""
        from slipstream.engine.engine import Interrupted

        # A beam search gives several answers for a prompt.
        prompts = [item.prompt for item in self.good[:: self.options.get("num_return_sequences") or 1]]
        if not prompts:
            return [], 0
        try:
            return self.engine.generate(prompts, **listeners, **self.options), 0
        except Interrupted as stop:
            return stop.completions, INTERRUPTED

    def run_watched(
        self, on_completion: Callable[[int, Completion], object] | None = None
    ) -> tuple[list[Completion], int]:
        """Generate with a progress bar: of tokens, or of texts for beams, whose tokens are known only at the end."""
        listener = {} if on_completion is None else {"on_completion": on_completion}
        done, most = set[int](), len(self.good)
        if self.options.get("num_beams", 1) == 1:
            with progress(most, self.options["max_new_tokens"]) as on_round:
                return self.run(on_round=on_round, **listener)
        with steps() as tell_done:

            def show(place: int, completion: Completion) -> None:
                done.add(place)
                tell_done(len(done), most, "texts")
                if on_completion is not None:
                    on_completion(place, completion)

            tell_done(0, most, "texts")
            return self.run(on_completion=show)

    def begin(self, item: Item) -> None:
        """Print a heading if there are several prompts, and the prompt unless the answer echoes it."""
        if len(self.items) > 1:
            gap = "" if item is self.good[0] else "\n"
            print(f"{gap}==> {item.where} <==")
        if not self.options["echo"]:
            # An encoder-decoder's answer does not continue its source, so it begins on a new line.
            print(item.shown, end="\n" if self.engine.frame else "", flush=True)

    def close(self, completions: Sequence[Completion], figures: bool = False) -> None:
        """Print on standard error: figures on a terminal, failures, full contexts, and times if `profile` is set."""
        screen, stats = console(stderr=True), sum((completion.stats for completion in completions), Stats())
        if figures and screen.is_terminal and completions:
            length, rate = stats.mean_acceptance_length or 0, stats.tokens_per_second or 0
            screen.print(f"{stats.emitted} tokens, {length:.2f} per target call, {rate:.1f} per second", style="dim")
        full = []
        for item, completion in zip(self.good, completions, strict=False):
            if completion.error:
                self.failed = True
                say(f"{item.where}: {completion.error}")
            full += [item.where] if completion.context_full else []
        if full:
            names, target = ", ".join([*full[:3], *["..."][: len(full) - 3]]), self.engine.decoder.target
            count = f"{len(full)} answers" if len(full) > 1 else "the answer"
            say(f"note: {count} ({names}) ended early, at the {target.context} tokens that {target.name} holds.")
        if self.profile:
            screen.print(breakdown(stats))


def _show_text(work: Work) -> int:
    """Print prompts and their completions in order, each as soon as it and all before it are finished."""
    waiting: dict[int, Completion] = {}
    shown = 0

    def show(place: int, completion: Completion) -> None:
        nonlocal shown
        waiting[place] = completion
        while shown in waiting:
            work.begin(work.good[shown])
            print(waiting[shown].text, flush=True)
            shown += 1

    # On a terminal, answers and a progress bar would mix; a single answer is printed only at the end.
    watched = len(work.good) == 1 or not sys.stdout.isatty()
    listeners: dict[str, Any] = {"on_completion": show} if len(work.good) > 1 else {}
    completions, code = (work.run_watched if watched else work.run)(**listeners)
    for place, completion in enumerate(completions[shown:], shown):
        if completion.tokens or not code:
            work.begin(work.good[place])
            print(completion.text, flush=True)
    work.close(completions, figures=True)
    return code


def _show_stream(work: Work) -> int:
    """Print the texts token by token, one after the other; tokens of later texts are held back until their turn."""
    if not work.good:
        return 0
    completions: list[Completion] = []
    held: dict[int, deque[Piece]] = defaultdict(deque)
    work.begin(work.good[0])
    try:
        for place, piece in work.engine.stream_batch([item.prompt for item in work.good], **work.options):
            held[place].append(piece)
            while next_pieces := held[len(completions)]:
                shown = next_pieces.popleft()
                print(shown.text, end="", flush=True)
                if shown.completion:
                    print()
                    completions.append(shown.completion)
                    if len(completions) < len(work.good):
                        work.begin(work.good[len(completions)])
    except KeyboardInterrupt:
        print()
        return INTERRUPTED
    work.close(completions, figures=True)
    return 0


def _show_rounds(work: Work) -> int:
    if not work.good:
        return 0
    prompts = [] if work.engine.frame else [item.shown for item in work.good]
    explanation = Explanation(work.engine.decode, console(), [item.where for item in work.good], prompts)
    completions, code = work.run(on_round=explanation)
    explanation.finish()
    work.close(completions)
    return code


def _show_json(work: Work) -> int:
    out = Answers(sys.stdout)

    def write(index: int, answer: dict[str, Any]) -> None:
        sample = {"prompt": index // work.samples, "sample": index % work.samples} if work.samples > 1 else {}
        out.write(index, {**sample, **answer})

    for index, item in enumerate(work.items):
        if item.error:
            write(index, {"error": f"{item.where}: {item.error}"})
    places = [index for index, item in enumerate(work.items) if not item.error]

    def show(place: int, completion: Completion) -> None:
        write(places[place], answer_as_dict(completion))

    watched = not sys.stdout.isatty()  # on a terminal, lines and a progress bar would mix
    completions, code = (work.run_watched if watched else work.run)(on_completion=show)
    for place, completion in enumerate(completions):
        if places[place] not in out.written:
            show(place, completion)
    work.close(completions)
    return code
