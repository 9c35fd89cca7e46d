"""`slipstream bench`: measure plain and speculative decoding, ours and transformers', side by side."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from slipstream.cli.app import INTERRUPTED, app, say
from slipstream.cli.options import MODELS, OUTPUT, SAMPLING, Device, Draft, Dtype, File, Target
from slipstream.explain import busy, console
from slipstream.prompts import gather

if TYPE_CHECKING:
    from slipstream.bench import Report, Result, Settings


def _option(panel: str | None, help: str, *names: str, **settings: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, **settings)


Quick = Annotated[bool, _option(None, "A minute or two: 4 prompts, 48 tokens, gamma 5, batch 1.", "--quick")]
Repetitions = Annotated[int | None, _option(None, "How often everything is measured.", metavar="N", min=1)]
Gammas = Annotated[
    list[int] | None, _option(MODELS, "Tokens drafted per round. Repeatable.", "--gamma", metavar="N", min=1)
]
Batches = Annotated[
    list[int] | None, _option(MODELS, "Prompts that run together. Repeatable.", "--batch", metavar="N", min=1)
]
Temperatures = Annotated[
    list[float] | None, _option(SAMPLING, "0 is greedy. Repeatable.", "--temperature", metavar="X", min=0.0)
]
NewTokens = Annotated[int | None, _option(SAMPLING, "Tokens of every completion.", metavar="N", min=1)]
StopAtEos = Annotated[bool, _option(SAMPLING, "End at EOS instead of the same length for all.", "--stop-at-eos")]
Json = Annotated[bool, _option(OUTPUT, "The whole report as one JSON object, nothing else.", "--json")]


@app.command()
def bench(
    quick: Quick = False,
    file: File = None,
    target: Target = None,
    draft: Draft = None,
    gamma: Gammas = None,
    batch: Batches = None,
    temperature: Temperatures = None,
    max_new_tokens: NewTokens = None,
    stop_at_eos: StopAtEos = False,
    repetitions: Repetitions = None,
    dtype: Dtype = "auto",
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Measure speed: plain and speculative, ours and transformers', the same prompts counted by the same code.

    Example: slipstream bench --quick
    """
    from slipstream.bench import FULL, QUICK, measure
    from slipstream.engine import load

    lists = {"gammas": tuple(gamma or ()), "batches": tuple(batch or ()), "temperatures": tuple(temperature or ())}
    given: dict[str, Any] = {**lists, "max_new_tokens": max_new_tokens, "repetitions": repetitions}
    chosen = {name: value for name, value in given.items() if value}
    settings = replace(QUICK if quick else FULL, ignore_eos=not stop_at_eos, **chosen)
    prompts = _prompts(file, max(4, *settings.batches) if quick else None)
    with busy(console(stderr=True), "loading"):
        engine = load(target, draft, dtype=dtype, device=device)
    if target and not draft:
        say("note: without --draft there is only plain decoding to measure.")
    with _progress(console(stderr=True)) as on_run:
        report = measure(engine, prompts, settings, on_run=on_run)
    if as_json:
        print(json.dumps(report.as_dict(), ensure_ascii=False))
    else:
        _show(report, console())
    if report.interrupted:
        say(f"interrupted: {len(report.rows)} rows were measured.")
        raise typer.Exit(INTERRUPTED)


def _prompts(file: str | None, most: int | None) -> list[Any]:
    """The prompts of the file, or the built-in ones. Raises ValueError if one cannot be read."""
    from slipstream.bench import PROMPTS

    items = gather([], file, chat=False)[:most] if file else []
    for item in items:
        if item.error:
            raise ValueError(f"{item.where}: {item.error}")
    return [item.prompt for item in items] or list(PROMPTS[:most])


@contextmanager
def _progress(screen: Console) -> Iterator[Callable[[int, int, str], None]]:
    """A bar of the runs, if somebody watches."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task("")
        yield lambda done, count, name: bar.update(task, description=name, completed=done, total=count)


# ---- printing ---------------------------------------------------------------------------------------------------


SPEED = ("tokens/s", "min-max", "x plain", "x generate", "same text")
ROUND = ("alpha", "kept", "per call", "ms per round", "overhead")
LEGEND = (
    "x: speed / that of our plain decoding and of transformers' generate, the median over repetitions; same text: "
    "prompts with the same tokens as these two; kept: accepted / drafted tokens; per call: tokens per target call; "
    "ms per round: draft + target + accept + rest; overhead: round / (draft + target) - 1."
)


def _show(report: Report, screen: Console) -> None:
    """Two tables per batch and temperature, speed and what happens in our rounds, and what they were measured on."""
    for batch, temperature in dict.fromkeys((row.batch, row.temperature) for row in report.rows):
        rows = [row for row in report.rows if (row.batch, row.temperature) == (batch, temperature)]
        screen.print(f"\nbatch {batch}, temperature {temperature:g}: {_amount(rows[0], report.settings)}", style="bold")
        screen.print(_table(SPEED, {_name(row): _speed(row) for row in rows}))
        screen.print(_table(ROUND, {_name(row): _round(row) for row in rows if row.milliseconds}))
    facts = report.environment
    place = f"{facts['device']}: {facts['cpu']}, {facts['cores']} cores, {facts['threads']} threads"
    versions = f"torch {facts['torch']}, transformers {facts['transformers']}"
    what = f"{facts['rule']} verification, {facts['target'].get('dtype')}"
    screen.print(f"\n{LEGEND}\n{place}; {what}; {versions}", style="dim")
    load = (facts["load_average"] or [0])[0] / (facts["cores"] or 1)
    if load > 0.5:
        screen.print(f"The machine was busy before (load {load:.1f} per core): the figures mean little.", style="bold")


def _amount(row: Result, settings: Settings) -> str:
    end = "" if settings.ignore_eos else "at most "
    return f"{row.prompts} prompts x {end}{settings.max_new_tokens} new tokens x {len(row.speeds)} repetitions"


def _table(names: Sequence[str], rows: dict[str, list[str]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="")
    table.add_column(no_wrap=True)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for name, cells in rows.items():
        table.add_row(name, *cells)
    return table


def _name(row: Result) -> str:
    return row.contender + (f" {row.gamma}" if row.gamma else "")


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _speed(row: Result) -> list[str]:
    speed = row.tokens_per_second
    ratios = [_number(x["median"] if x else None) for x in (row.ratio_to_plain, row.ratio_to_transformers)]
    same = ["-" if same is None else str(same) for same in (row.matches_plain, row.matches_transformers)]
    middle, low, high = (_number(speed[name], int(speed["max"] < 100)) for name in ("median", "min", "max"))
    return [middle, f"{low}-{high}", *ratios, ", ".join(same)]


def _round(row: Result) -> list[str]:
    phases = [_number((row.milliseconds or {})[phase], 1) for phase in ("draft", "target", "accept", "rest")]
    figures = [_number(x) for x in (row.alpha, row.draft_acceptance_rate, row.mean_acceptance_length)]
    return [*figures, " + ".join(phases), f"{row.overhead:.1%}"]
