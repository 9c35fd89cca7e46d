"""`slipstream plan`: does speculation pay here, with which draft and gamma, and does the prediction hold?"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from slipstream.cli import options as opt
from slipstream.cli.app import INTERRUPTED, app, say, tell
from slipstream.cli.console import busy, console, figures_table, steps
from slipstream.core.model_options import ModelOptions
from slipstream.core.options import SHAPES
from slipstream.engine.plan_file import KIND, Plan
from slipstream.files import check_writable
from slipstream.models.loading.pairings import draft_of
from slipstream.plan.from_figures import Figures, promise
from slipstream.text.jsontext import json_text
from slipstream.text.prompts import gather, usable

if TYPE_CHECKING:
    from slipstream.core.protocols import Drafter
    from slipstream.engine.engine import Engine
    from slipstream.plan.planner import MeasuredComparison, PlanReport


QUICK = {"most": 8, "max_new_tokens": 48, "repetitions": 2}
QUICK_PROMPTS, PROMPTS = 8, 32
Work = opt.panel(
    None,
    file=opt.PROMPTS,
    chat=opt.CHAT,
    audio=opt.own(list[Path] | None, None, "Recordings, to plan for transcribe, not for prompts. Repeatable.", "FILE"),
    repetitions=opt.own(int | None, None, "Runs of the choice against plain; 3.", "N", min=1),
    quick=opt.own(bool, False, "Under a minute: 8 prompts, 48 tokens, gamma up to 8."),
    network_ms=opt.own(
        float | None, None, "The draft is to run elsewhere, so many milliseconds away, there and back.", "X", min=0
    ),
)
Planned = opt.panel(
    "Models",
    draft=opt.own(list[str] | None, None, "As for generate. Repeatable: the best is planned.", "DRAFT"),
    gamma=opt.own(list[int] | None, None, "Try only these. Repeatable. Without: 1 to 10.", "N", min=1),
    batch=opt.BATCH,
)
Texts = opt.panel(
    "Sampling",
    max_new_tokens=opt.own(int | None, None, "Tokens of every completion; 128.", "N", min=2),
    sample=opt.own(int | None, None, "Prompts taken, evenly from all; 32.", "N", min=2),
)
FigureOptions = opt.panel(  # options any of which selects a plan from known figures, without measuring
    "Without models",
    alpha=opt.own(float | None, None, "Chance that a drafted token is kept.", "X", min=0, max=1),
    cost=opt.own(float | None, None, "A draft step's time over a target step's (c).", "X", min=0),
    operations_cost=opt.own(float | None, None, "The same for operations (c-hat); without: as --cost.", "X", min=0),
    curve=opt.own(str | None, None, "T(rows)/T(1) for 1, 2, .. rows; without: all 1.", "1,X,.."),
    step_ms=opt.own(float | None, None, "Milliseconds of a target step, for --network-ms.", "X", min=0.001),
)
Output = opt.panel(
    "Output",
    saved_plan=opt.own(str | None, None, "Show this plan; measure nothing.", "FILE", "--plan"),
    save=opt.own(str | None, None, "Write the plan, for generate --plan.", "FILE"),
    force=opt.FORCE,
    as_json=opt.own(bool, False, "The plan with all figures as one JSON object.", flag="--json"),
)


@app.command()
@opt.with_options(
    *(Work, opt.Spoken, Planned, Texts, FigureOptions, opt.options_of(["target", "verify"], verify="block")),
    *(
        opt.grouped("compile", "task", "threads", "target", without=["tp_plan"]),
        opt.options_of([*SHAPES, "seed"]),
        Output,
    ),
)
def plan(context: typer.Context, prompts: opt.Prompts = None) -> None:
    """Measure acceptance and costs, predict the speed of every gamma, choose, and run the choice.

    Example: slipstream plan --target TARGET --draft DRAFT --prompts prompts.jsonl --save plan.json

    Example: slipstream plan --target openai/whisper-small --draft int8 --audio talk.wav --save plan.json

    Example: slipstream plan --alpha 0.8 --cost 0.05
    """
    if _answered_at_once(context):
        return
    from slipstream.decoding.sampling import Sampling
    from slipstream.plan.planner import PlanSettings, make

    params = context.params
    chosen: dict[str, Any] = dict(QUICK) if params["quick"] else {}
    chosen |= {name: params[name] for name in ("max_new_tokens", "repetitions") if params[name]}
    lists = {"gammas": params["gamma"], "batches": params["batch"]}
    chosen |= {name: tuple(sorted(set(values))) for name, values in lists.items() if values}
    sampling = Sampling(**{name: params[name] for name in SHAPES})
    settings = PlanSettings(**chosen, sampling=sampling, seed=params["seed"], network_ms=params["network_ms"])
    if params["save"] is not None:
        check_writable(params["save"], KIND, params["force"], [params["file"]] if params["file"] else [])
    most = params["sample"] or (QUICK_PROMPTS if params["quick"] else PROMPTS)
    of_prompts, of_sound = ("prompts", "file", "chat", "max_new_tokens"), ("language", "translate")
    foreign, what = (of_prompts, "recordings are planned for") if params["audio"] else (of_sound, "prompts are texts")
    opt.refuse_others(context, params.keys() - foreign, what)
    texts = [] if params["audio"] else _prompts(prompts or [], params["file"], params["chat"], most)
    with busy("loading"):
        models = opt.asked_models(context, draft=None, gamma=None)
        engine, drafters = _load(models, params["draft"] or [], settings.sizes)
        options = dict[str, Any]()
        if params["audio"]:
            texts, rows, options = _windows(engine, params, most)
            settings = settings if params["batch"] else replace(settings, batches=rows)
    try:
        with steps() as on_step:
            report = make(engine, drafters, texts, settings, on_step, **options)
    except KeyboardInterrupt:
        say("interrupted: too little was measured for a plan.")
        raise typer.Exit(INTERRUPTED) from None
    made = report.plan(models, engine.decoder.target.vocab)
    print(json_text(made.as_dict(), ensure_ascii=False)) if params["as_json"] else _show(report, console())
    if params["save"]:
        made.save(params["save"])
    if report.interrupted:
        say("interrupted: the choice was not run to the end.")
        raise typer.Exit(INTERRUPTED)


def _answered_at_once(context: typer.Context) -> bool:
    """Answer from figures alone or from a saved plan, if the options say so -> whether they did.
    Raises ValueError for options that do not go together."""
    params = context.params
    if not FigureOptions.keys().isdisjoint(opt.written_parameters(context)):
        allowed = FigureOptions.keys() | {"gamma", "network_ms", "as_json"}
        opt.refuse_others(context, allowed, "a plan from figures alone measures no models")
        from_figures(params)
        return True
    if params["saved_plan"] is None:
        return False
    opt.refuse_others(context, {"saved_plan", "as_json"}, "--plan shows what was measured before")
    _show_plan(Plan.read(params["saved_plan"]), params["as_json"])
    return True


def _prompts(prompts: Sequence[str], file: str | None, chat: bool, most: int) -> list[Any]:
    if not prompts and not file:
        from slipstream.bench.records import PROMPTS as OWN

        if chat:
            raise ValueError("--chat wraps prompts, and there are none: give a PROMPT or --prompts FILE.")
        return list(OWN)
    items = usable(gather(prompts, file, chat))
    return [items[place].prompt for place in _evenly(len(items), most)]


def _evenly(count: int, most: int) -> list[int]:
    chosen = min(most, count)
    return [place * count // chosen for place in range(chosen)]


def _windows(engine: Engine, params: dict[str, Any], most: int) -> tuple[list[Any], tuple[int, ...], dict[str, Any]]:
    """Return windows of the recordings, how many of the shortest and the longest run together, and a call's options."""
    from slipstream.engine.transcription import Transcriber

    transcriber = Transcriber.of(engine.decoder.target, engine.tokenizer)
    options = transcriber.options(params["language"], "translate" if params["translate"] else "transcribe", False)
    with ExitStack() as files:
        sounds = [files.enter_context(transcriber.opened(file)) for file in params["audio"]]
        counts = [transcriber.count(sound) for sound in sounds]
        every = [(sound, number) for sound, count in zip(sounds, counts, strict=True) for number in range(count)]
        chosen = [every[place] for place in _evenly(len(every), most)]
        windows = [next(transcriber.windows(sound, [number])) for sound, number in chosen]
    together = {min(count, engine.decoder.batch_size, len(windows)) for count in (min(counts), max(counts))}
    return windows, tuple(sorted(together)), {**options, "ignore_eos": False}


def _load(models: ModelOptions, drafts: Sequence[str], sizes: tuple[int, ...]) -> tuple[Engine, dict[str, Drafter]]:
    from slipstream.drafters.build_context import BuildContext
    from slipstream.drafters.specification import drafter, paths_shape
    from slipstream.engine.load import alone, load
    from slipstream.execution.passes import Mode

    if not (drafts := drafts or [each for each in [draft_of(models.target)] if each]):
        raise ValueError("there is nothing to plan without a draft: give --draft.")
    place, dtype = alone(models.target, models.dtype)
    engine = load(replace(models, target=place, dtype=dtype), progress=say)
    mode = Mode(models.compile, ahead=sizes, progress=say)
    paths = engine.rule.paths
    shape = paths_shape(paths, max(sizes)) if paths else None
    context = BuildContext(
        *(engine.decoder.target, engine.tokenizer, dtype, models.device, shape), mode=mode, independent=bool(paths)
    )
    drafters = {name: drafter(name, context) for name in drafts}
    tell(context.notes)
    return engine, drafters


def _show_plan(made: Plan, as_json: bool) -> None:
    if as_json:
        print(json_text(made.as_dict(), ensure_ascii=False))
    else:
        gammas = ", ".join(f"{gamma} for {rows}" for rows, gamma in sorted(made.gammas.items()))
        what = f"draft {made.models.draft}, gamma by rows: {gammas}" if made.speculates else "do not speculate"
        how = f"{made.models.verify} verification, temperature {made.temperature:g}, {made.models.dtype}"
        target, date = made.models.target or "the embedded pair", made.machine.get("date", "elsewhere")
        print(f"{target}: {what}\n{how}; measured {date}")


def from_figures(params: dict[str, Any]) -> None:
    """Print the predictions from the figures among a command's parameters. Raises ValueError if some are missing."""
    alpha, cost, curve = params["alpha"], params["cost"], params["curve"]
    if alpha is None or cost is None:
        raise ValueError("--alpha and --cost go together: give both, or neither to measure them.")
    try:
        points = [float(part) for part in curve.split(",")] if curve is not None else []
    except ValueError:
        raise ValueError(f"--curve {curve!r} is not a list of costs, such as 1,1.1,1.3.") from None
    network, step = params["network_ms"], params["step_ms"]
    if (network is None) != (step is None):
        raise ValueError("--network-ms and --step-ms go together here: give the time of a target step as well.")
    delay = None if network is None else network / step  # to the draft and back, in target steps
    figures = promise(alpha, cost, params["operations_cost"], params["gamma"] or [], points, delay)
    if params["as_json"]:
        print(json_text(asdict(figures)))
    else:
        _show_figures(figures, bool(points), step, console())


def _show_figures(figures: Figures, curved: bool, step: float | None, screen: Console) -> None:
    table = figures_table("gamma", "tokens per call", "x plain", "operations x plain")
    for line in figures.lines:
        mark = "*" if line.gamma == figures.best.gamma else " "
        cells = (f"{line.tokens_per_call:.2f}", f"{line.walltime_factor:.2f}", f"{line.operations_factor:.2f}")
        table.add_row(f"{mark} {line.gamma}", *cells)
    screen.print(table)
    if not figures.best.gamma:
        screen.print("\ndo not speculate: no gamma is faster than plain decoding with these figures.", style="bold")
    else:
        best = f"gamma {figures.best.gamma}: {figures.best.walltime_factor:.2f} x plain"
        screen.print(f"\nbest: {best} if rounds are alike (Theorem 3.8).", style="bold")
    if figures.delay is not None and figures.longest_delay is not None and step is not None:
        screen.print(about_distance(figures.delay * step, figures.longest_delay * step))
    elif figures.best.gamma and not curved:
        rest = f"At least {figures.guaranteed:.2f} (Corollary 3.9); drafting just what is kept: {figures.oracle:.2f}."
        screen.print(f"{rest}\nA pass over gamma + 1 tokens is taken to cost one step; give --curve if it does not.")


def about_distance(delay: float, longest: float) -> str:
    """Return a sentence on the distance of a draft on another machine; milliseconds there and back."""
    where = f"the draft is {delay:g} ms away, there and back"
    if longest <= 0:
        return f"{where}: it would not pay here either."
    if delay >= longest:
        return f"{where}, which does not pay: it would up to {longest:.3g} ms."
    return f"{where}; up to {longest:.3g} ms it pays."


LEGEND = (
    "iid, per call: tokens per target call, by Equation 1 with one alpha and from what was measured by position; "
    "T(n)/T(1): the target's pass over gamma + 1 tokens; c: time of a drafted token over T(1); round: time of a round "
    "over that of a plain step; x plain: predicted speed with its 95 % interval over prompts and rounds; long: the "
    "same for endless texts."
)


def _show(report: PlanReport, screen: Console) -> None:
    from slipstream.plan.predict import spread

    settings = report.settings
    for rows, by_draft in report.outlooks.items():
        for name, outlook in by_draft.items():
            head = f"\ndraft {name}, {rows} {'rows' if rows > 1 else 'row'}, temperature "
            screen.print(f"{head}{settings.sampling.temperature:g}", style="bold")
            _, low, high = spread(outlook.alphas).values()
            screen.print(f"alpha {outlook.alpha:.2f}; half of the prompts lie between {low:.2f} and {high:.2f}")
            screen.print("kept at least i tokens: " + " ".join(f"{chance:.2f}" for chance in outlook.survival))
            plain = f"plain step {1000 * outlook.costs.step:.1f} ms, T(1) {1000 * outlook.costs.single:.1f} ms"
            startup = 1000 * outlook.costs.startup
            read = f", the target its source: {1000 * outlook.costs.source:.1f} ms" if outlook.costs.source else ""
            screen.print(f"{plain}; once per text the draft reads the prompt: {startup:.1f} ms{read}")
            table = figures_table("gamma", "iid", "per call", "T(n)/T(1)", "c", "round", "x plain", "95 %", "long")
            for each in outlook.predictions:
                mark = "*" if each is outlook.best else " "
                figures = (each.iid, each.tokens_per_call, each.curve, each.c, each.round, each.factor)
                interval = f"{each.low:.2f}-{each.high:.2f}"
                table.add_row(f"{mark} {each.gamma}", *(f"{x:.2f}" for x in figures), interval, f"{each.long:.2f}")
            screen.print(table)
    screen.print(f"\n{LEGEND}", style="dim")
    for rows, gamma in report.gammas.items():
        outlook, where = report.outlooks[rows][report.draft], f"{rows} rows" if rows > 1 else "1 row"
        best, farthest = outlook.best, outlook.longest_delay
        predicted = f"{best.factor:.2f} x plain ({best.low:.2f}-{best.high:.2f})"
        choice = f"draft {report.draft}, gamma {gamma}: {predicted} is predicted."
        if not gamma:
            doubt = f"would be {predicted}" if best.factor <= 1 else f"may be {predicted}, but that is not certain"
            choice = f"do not speculate: the best, gamma {best.gamma}, {doubt}."
        screen.print(f"\n{where}: {choice}", style="bold")
        if settings.network_ms is not None and farthest is not None:  # it was not run there: nothing was verified
            away = about_distance(settings.network_ms, 1000 * farthest)
            screen.print(f"{away} Measured here, predicted for there.")
        for run in report.verifications:
            if run.rows == rows:
                screen.print(_outcome(run))
    facts = report.environment
    place = f"{facts['device']}: {facts['cpu']}, {facts['cores']} cores, {facts['threads']} threads"
    screen.print(f"\n{place}; torch {facts['torch']}; {facts['rule']} verification; {report.texts}", style="dim")


def _outcome(each: MeasuredComparison) -> str:
    low, high = min(each.factors), max(each.factors)
    text = (
        f"measured with gamma {each.gamma}: {each.factor:.2f} x plain ({low:.2f}-{high:.2f}), {each.difference:+.1%} "
        f"against the prediction; {each.tokens_per_call:.2f} tokens per call (predicted "
        f"{each.predicted.tokens_per_call:.2f}), a round {each.round:.2f} plain steps ({each.predicted.round:.2f})."
    )
    if not each.off:
        return text
    tokens = abs(each.tokens_per_call / each.predicted.tokens_per_call - 1)
    times = abs(each.round / each.predicted.round - 1)
    why = (
        "acceptance differed: give more prompts"
        if tokens > times
        else "rounds took another time: measure on a quiet machine"
    )
    return f"{text}\nThat is off by more than 10 %, mostly because {why}."
