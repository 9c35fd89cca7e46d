"""`python -m reproduction`: the paper's tables and figures from our own runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from slipstream.cli.app import INTERRUPTED, SETTINGS, SingleCommand, say
from slipstream.cli.console import console
from slipstream.cli.options import (
    MODELS,
    OUTPUT,
    Device,
    Dtype,
    declared_option,
    options_of,
    with_options,
)
from slipstream.text.jsontext import json_text

if TYPE_CHECKING:
    from reproduction.lab import Lab
    from reproduction.pages.sheet import Sheet


CORPORA = "Models and corpora"
NAMES = "table1 to table5, figure1 to figure5, gamma (best, and an oracle's), iid, bleu, baselines, or all."


def _option(panel: str | None, metavar: str | None, help: str, *names: str) -> Any:
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel=panel)


What = Annotated[list[str], typer.Argument(metavar="NAME...", help=NAMES)]
Standins = Annotated[
    str | None, _option(CORPORA, "FOLDER", "Trained there if absent: stand-ins for T5 (hours), copies for baselines.")
]
Pairs = Annotated[
    str | None,
    _option(CORPORA, "FOLDER", "Aligned files as Multi30k's: *train*.en, *train*.de, *test*...; or dataset:NAME."),
]
Articles = Annotated[
    str | None, _option(CORPORA, "FILE", 'News to summarize: a JSON list with "article"; or dataset:NAME.')
]
Texts = Annotated[list[str] | None, _option(CORPORA, "FILE", "More text for summaries. Repeatable.", "--texts")]
Own = Annotated[
    str | None, _option(CORPORA, "MODEL", "An encoder-decoder of your own instead of stand-ins: hub name or folder.")
]
Drafts = Annotated[
    list[str] | None, _option(CORPORA, "MODEL", "Its drafts. Repeatable, the smallest first.", "--draft")
]
DraftDtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"] | None,
    _option(MODELS, "NAME", "Of the drafts' weights. Without: as the target's.", "--draft-dtype"),
]
Quick = Annotated[
    bool, _option(None, None, "Tiny models and few texts: minutes instead of hours; labelled so.", "--quick")
]
Again = Annotated[bool, _option(None, None, "Measure again what the folder holds.", "--again")]
Out = Annotated[str | None, _option(OUTPUT, "FOLDER", "Write JSON and plots there, and the page FOLDER.md beside it.")]
Json = Annotated[bool, _option(OUTPUT, None, "The sheets as JSON, nothing else.", "--json")]


Force = Annotated[bool, _option(OUTPUT, None, "Replace an existing file that is of another kind.", "--force")]
Task = Annotated[str | None, declared_option("task")]
Compile = Annotated[bool, declared_option("compile")]
EncoderDtype = Annotated[Literal["float32", "bfloat16", "float16"] | None, declared_option("encoder_dtype")]


app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


@app.command(cls=SingleCommand, context_settings=SETTINGS)
@with_options(options_of(["threads"]))
def reproduce(
    what: What,
    standins: Standins = None,
    pairs: Pairs = None,
    articles: Articles = None,
    texts: Texts = None,
    target: Own = None,
    draft: Drafts = None,
    task: Task = None,
    compile: Compile = False,
    dtype: Dtype = "float32",
    encoder_dtype: EncoderDtype = None,
    draft_dtype: DraftDtype = None,
    device: Device = None,
    quick: Quick = False,
    again: Again = False,
    out: Out = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Reproduce the paper's tables and figures (arXiv 2211.17192), and put the paper's numbers beside ours.

    table1 and figure1 to figure4 need nothing. With --out, what was measured is kept and used again.

    Example: python -m reproduction table1 figure3 --out build/paper

    Example: python -m reproduction baselines --standins build/standins --out reproduction/paper

    Example: python -m reproduction all --standins build/standins --pairs multi30k --out reproduction/paper
    """
    names = _names(what)
    from reproduction.lab import FULL, QUICK, Inputs, Lab
    from reproduction.runs.subjects import Loading

    if target and not draft:
        raise ValueError("--target needs its drafts: give --draft, once or more.")
    folder = Path(standins).expanduser() if standins else None
    inputs = Inputs(folder, pairs, articles, tuple(texts or ()), target, tuple(draft or ()))
    how = Loading(compile, device, dtype, encoder_dtype, draft_dtype, say, task)
    lab = Lab(inputs, QUICK if quick else FULL, how, _folder(out, names, force), again, say)
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
