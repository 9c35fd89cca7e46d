"""`python -m reproduction`: the paper's tables and figures from our own runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from slipstream.cli import options as opt
from slipstream.cli.app import INTERRUPTED, SETTINGS, SingleCommand, say
from slipstream.cli.console import console
from slipstream.text.jsontext import json_text

if TYPE_CHECKING:
    from reproduction.lab import Lab
    from reproduction.pages.sheet import Sheet


NAMES = "table1 to table5, figure1 to figure5, gamma (best, and an oracle's), iid, bleu, baselines, or all."
What = Annotated[list[str], typer.Argument(metavar="NAME...", help=NAMES)]
Inputs = opt.panel(
    "Models and corpora",
    standins=opt.own(
        *(str | None, None, "Trained there if absent: stand-ins for T5 (hours), copies for baselines.", "FOLDER")
    ),
    pairs=opt.own(
        *(str | None, None, "Aligned files as Multi30k's: *train*.en, *train*.de, *test*...; or dataset:NAME."),
        metavar="FOLDER",
    ),
    articles=opt.own(
        str | None, None, 'News to summarize: a JSON list with "article"; or dataset:NAME.', metavar="FILE"
    ),
    texts=opt.own(list[str] | None, None, "More text for summaries. Repeatable.", "FILE"),
    target=opt.own(
        *(str | None, None, "An encoder-decoder of your own instead of stand-ins: hub name or folder.", "MODEL")
    ),
    draft=opt.own(list[str] | None, None, "Its drafts. Repeatable, the smallest first.", "MODEL"),
)
Models = opt.panel(
    "Models",
    draft_dtype=opt.own(
        Literal["auto", "float32", "bfloat16", "float16"] | None,
        *(None, "Of the drafts' weights. Without: as the target's.", "NAME"),
    ),
)
Runs = opt.panel(
    None,
    quick=opt.own(bool, False, "Tiny models and few texts: minutes instead of hours; labelled so."),
    again=opt.own(bool, False, "Measure again what the folder holds."),
)
Output = opt.panel(
    "Output",
    out=opt.own(str | None, None, "Write JSON and plots there, and the page FOLDER.md beside it.", "FOLDER"),
    force=opt.own(bool, False, "Replace an existing file that is of another kind."),
    as_json=opt.own(bool, False, "The sheets as JSON, nothing else.", flag="--json"),
)
LOADING = ("task", "compile", "dtype", "encoder_dtype", "device", "threads")

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


@app.command(cls=SingleCommand, context_settings=SETTINGS)
@opt.with_options(Inputs, opt.options_of(LOADING, dtype="float32"), Models, Runs, Output)
def reproduce(context: typer.Context, what: What) -> None:
    """Reproduce the paper's tables and figures (arXiv 2211.17192), and put the paper's numbers beside ours.

    table1 and figure1 to figure4 need nothing. With --out, what was measured is kept and used again.

    Example: python -m reproduction table1 figure3 --out build/paper

    Example: python -m reproduction baselines --standins build/standins --out reproduction/paper

    Example: python -m reproduction all --standins build/standins --pairs multi30k --out reproduction/paper
    """
    names, params = _names(what), context.params
    from reproduction import lab as labs
    from reproduction.runs.subjects import Loading

    target, draft, standins = params["target"], params["draft"], params["standins"]
    if target and not draft:
        raise ValueError("--target needs its drafts: give --draft, once or more.")
    folder = Path(standins).expanduser() if standins else None
    texts, drafts = tuple(params["texts"] or ()), tuple(draft or ())
    inputs = labs.Inputs(folder, params["pairs"], params["articles"], texts, target, drafts)
    loading = ("compile", "device", "dtype", "encoder_dtype", "draft_dtype", "task")
    how = Loading(**{name: params[name] for name in loading}, progress=say)
    out = _folder(params["out"], names, params["force"])
    lab = labs.Lab(inputs, labs.QUICK if params["quick"] else labs.FULL, how, out, params["again"], say)
    as_json = params["as_json"]
    try:
        sheets = _made(names, lab, as_json)
    except KeyboardInterrupt:
        say("interrupted: what was finished is kept; the same command goes on from there.")
        raise typer.Exit(INTERRUPTED) from None
    if as_json:
        print(json_text([sheet.as_dict() for sheet in sheets], ensure_ascii=False))


def _names(what: Sequence[str]) -> list[str]:
    from reproduction.catalogue import ALL, MAKERS

    unknown = [name for name in what if name not in (*MAKERS, ALL)]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is no table or figure of the paper: use {', '.join(MAKERS)} or {ALL}.")
    return list(MAKERS) if ALL in what else list(dict.fromkeys(what))


def _folder(out: str | None, names: Sequence[str], force: bool) -> Path | None:
    """Return the folder for files, created if needed; it is checked before anything is measured. None without --out."""
    from reproduction.catalogue import outputs
    from reproduction.pages.draw import check_drawing
    from reproduction.pages.page import KIND, page_file
    from slipstream.files import check_folder

    if out is None:
        return None
    check_drawing()
    folder = Path(out).expanduser()
    check_folder(folder, outputs(names), force)
    check_folder(folder.parent, {page_file(folder).name: KIND}, force)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _made(names: Sequence[str], lab: Lab, as_json: bool) -> list[Sheet]:
    from reproduction.catalogue import make

    sheets = []
    for name in names:
        sheets.append(make(name, lab))
        if not as_json:
            _show(sheets[-1])
    return sheets


def _show(sheet: Sheet) -> None:
    screen = console()
    screen.print(f"\n{sheet.title}{' (quick: tiny models, few texts)' if sheet.quick else ''}", style="bold")
    heads, cells = [column.name for column in sheet.columns], sheet.cells()
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    for line in (heads, *cells):  # as wide as it is: a terminal that is too narrow wraps whole lines
        screen.print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)), soft_wrap=True)
    if sheet.text:
        screen.print(f"\n{sheet.text}", soft_wrap=True)
    for note in sheet.notes:
        screen.print(note, style="dim")
