"""`slipstream bench`: measure plain and speculative decoding, ours and transformers', side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from slipstream.cli import options as opt
from slipstream.cli.app import INTERRUPTED, app, say, tell
from slipstream.cli.console import busy, console, figures_table, steps
from slipstream.core.model_options import ModelOptions
from slipstream.models.loading.pairings import draft_of
from slipstream.text.jsontext import json_text
from slipstream.text.prompts import gather, usable

if TYPE_CHECKING:
    from slipstream.bench.contenders import Side
    from slipstream.bench.records import BenchReport, Result
    from slipstream.engine.engine import Engine


Work = opt.panel(
    None,
    quick=opt.own(bool, False, "Two minutes at most: up to 4 prompts, 48 tokens, gamma 5, batch 1."),
    file=opt.PROMPTS,
    repetitions=opt.own(int | None, None, "How often everything is measured.", "N", min=1),
)
Raced = opt.panel(
    "Models",
    draft=opt.own(list[str] | None, None, "As in other commands. Repeatable: each is measured.", "MODEL"),
    gamma=opt.own(list[int] | None, None, "Tokens drafted per round. Repeatable.", "N", min=1),
    verify=opt.own(list[str] | None, None, "Acceptance rule of ours. Repeatable.", "RULE"),
    batch=opt.BATCH,
)
Texts = opt.panel(
    "Sampling",
    temperature=opt.own(list[float] | None, None, "0 is greedy. Repeatable.", "X", min=0.0),
    max_new_tokens=opt.own(int | None, None, "Tokens of every completion.", "N", min=1),
    stop_at_eos=opt.own(bool, False, "End at EOS instead of the same length for all."),
)
Output = opt.panel(
    "Output", as_json=opt.own(bool, False, "The whole report as one JSON object, nothing else.", flag="--json")
)


@app.command()
@opt.with_options(
    *(Work, Raced, Texts, Output, opt.options_of(["target", "compile"])),
    opt.grouped("target", "task", "threads", without=["tp_plan"]),
)
def bench(context: typer.Context) -> None:
    """Measure speed: plain and speculative, ours and transformers', the same prompts counted by the same code.

    Example: slipstream bench --quick
    """
    with busy("starting"):
        from slipstream.bench.contenders import line_up
        from slipstream.bench.race import measure
        from slipstream.bench.records import FULL, PROMPTS, QUICK

    params = context.params
    quick, file, draft = (params[name] for name in ("quick", "file", "draft"))
    lists = {"gammas": "gamma", "batches": "batch", "temperatures": "temperature", "rules": "verify"}
    chosen: dict[str, Any] = {name: params[name] for name in ("max_new_tokens", "repetitions") if params[name]}
    chosen |= {name: tuple(params[own]) for name, own in lists.items() if params[own]}
    settings = replace(QUICK if quick else FULL, ignore_eos=not params["stop_at_eos"], **chosen)
    most = max(4, *settings.batches) if quick else None
    items = usable(gather([], file, chat=False)[:most]) if file else []
    prompts = [item.prompt for item in items] or list(PROMPTS[:most])
    with busy("loading"):
        sizes = settings.gammas if params["compile"] else ()
        models = opt.asked_models(context, draft=None, gamma=None, verify=None, compile=False)
        engine, others = _engines(models, draft or [], sizes)
    tell(engine.notes)
    tell(note for side in others for note in side.engine.notes)
    if not draft and draft_of(models.target) is None:
        say("note: without --draft there is only plain decoding and prompt lookup to measure.")
    with steps() as on_run:
        report = measure(engine, prompts, settings, line_up(engine, settings, others), on_run=on_run)
    if params["as_json"]:
        print(json_text(report.as_dict(), ensure_ascii=False))
    else:
        _show(report, console())
    if report.interrupted:
        say(f"interrupted: {len(report.rows)} rows were measured.")
        raise typer.Exit(INTERRUPTED)


def _engines(models: ModelOptions, drafts: Sequence[str], sizes: tuple[int, ...]) -> tuple[Engine, list[Side]]:
    """Return the engine with the first draft, and those with the other drafts, around the same target.
    With `sizes` there is a compiled one too, whose draft has a graph for chains of each size."""
    from slipstream.bench.contenders import Side
    from slipstream.bench.records import COMPILED
    from slipstream.engine.load import alone, load
    from slipstream.execution.draft_graphs import DraftsInGraphs
    from slipstream.measure.environment import scorers

    first = drafts[0] if drafts else draft_of(models.target)
    engine = load(replace(models, draft=first))
    dtype = alone(models.target, models.dtype)[1]
    # The target that they share is loaded, and quantized, already.
    shared = ModelOptions(
        getattr(engine.decoder.target, "model", None),
        dtype=dtype,
        device=models.device,
        task=models.task,
        tokenizer=engine.tokenizer,
    )
    others = [Side(load(replace(shared, draft=each)), each) for each in drafts[1:]]
    if sizes:
        fast = load(replace(shared, draft=first, gamma=max(sizes), compile=True), progress=say)
        for model in scorers(fast.decoder)[1:]:
            if isinstance(model, DraftsInGraphs):
                model.make_draft_graphs(sizes, say)
        others.append(Side(fast, found[-1].name if (found := scorers(engine.decoder)[1:]) else first, COMPILED))
    return engine, others


SPEED = ("tokens/s", "min-max", "x plain", "x generate", "same")
ROUND = ("alpha", "kept", "per call", "ms per round", "over")
LEGEND = (
    "x: speed / that of our plain decoding and of transformers' generate, the median over repetitions; same: prompts "
    "with the same tokens as these two; kept: accepted / drafted tokens; per call: tokens per target call; ms per "
    "round: draft + target + accept + rest, theirs: wall time / target calls; over: round / (draft + target) - 1; "
    "transformers auto: assisted generation with its own draft length and confidence threshold."
)


def _show(report: BenchReport, screen: Console) -> None:
    from slipstream.engine.explain import number

    name = row_names(report.rows)
    most = report.settings.max_new_tokens
    for batch, temperature in dict.fromkeys((row.batch, row.temperature) for row in report.rows):
        rows = [row for row in report.rows if (row.batch, row.temperature) == (batch, temperature)]
        mean = rows[0].tokens // (rows[0].prompts * len(rows[0].speeds))  # fewer than asked for, if time was short
        tokens = f"{mean} new tokens" if report.settings.ignore_eos else f"at most {most} new tokens"
        amount = f"{rows[0].prompts} prompts x {tokens} x {len(rows[0].speeds)} repetitions"
        screen.print(f"\nbatch {batch}, temperature {temperature:g}: {amount}", style="bold")
        speeds, rounds = figures_table("", *SPEED), figures_table("", *ROUND)
        for row in rows:
            speed = row.tokens_per_second
            ratios = [number(x["median"] if x else None) for x in (row.ratio_to_plain, row.ratio_to_transformers)]
            same = ["-" if same is None else str(same) for same in (row.matches_plain, row.matches_transformers)]
            middle, low, high = (number(speed[each], int(speed["max"] < 100)) for each in ("median", "min", "max"))
            speeds.add_row(name(row), middle, f"{low}-{high}", *ratios, ", ".join(same))
            if row.milliseconds_per_call:
                figures = [number(x) for x in (row.alpha, row.draft_acceptance_rate, row.mean_acceptance_length)]
                parts, overhead = number(row.milliseconds_per_call.get("median"), 1), "-"
                if row.milliseconds is not None:
                    phases = ("draft", "target", "accept", "rest")
                    parts = " + ".join(number(row.milliseconds[phase], 1) for phase in phases)
                    overhead = f"{row.overhead:.0%}"
                rounds.add_row(name(row), *figures, parts, overhead)
        screen.print(speeds)
        screen.print(rounds)
    facts = report.environment
    place = f"{facts['device']}: {facts['cpu']}, {facts['cores']} cores, {facts['threads']} threads"
    versions = f"torch {facts['torch']}, transformers {facts['transformers']}"
    what = f"{facts['rule']} verification, {facts['target'].get('dtype')}"
    screen.print(f"\n{LEGEND}\n{place}; {what}; {versions}", style="dim")
    load = (facts["load_average"] or [0])[0] / (facts["cores"] or 1)
    if load > 0.5:
        screen.print(f"The machine was busy before (load {load:.1f} per core): the figures mean little.", style="bold")
    emulated = facts["device"] == "cpu" and facts["bfloat16"] == "emulated"
    if emulated and "bfloat16" in str(facts["target"].get("dtype")):
        screen.print("This processor does not multiply bfloat16 itself: float32 may be faster.", style="bold")


def row_names(rows: Sequence[Result]) -> Callable[[Result], str]:
    """Return a function that names rows: contender and gamma, and draft, rule and execution where those differ."""
    varying = [
        what for what in ("draft", "rule", "execution") if len({getattr(row, what) for row in rows} - {None}) > 1
    ]

    def name(row: Result) -> str:
        facts = (getattr(row, what) for what in varying)
        return " ".join([row.contender, *(str(row.gamma) for _ in [0] if row.gamma), *(x for x in facts if x)])

    return name
