"""The terminal: colours, spinners, progress bars and lists of steps."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from slipstream.cli.app import say

if TYPE_CHECKING:
    from slipstream.core.round import Round

EVERY = 30.0  # seconds between two lines about a batch, where there is no terminal


def console(stderr: bool = False) -> Console:
    """Return a Console that prints text as it is: no markup, and no styles with NO_COLOR or outside a terminal."""
    colours: Literal["auto"] | None = None if os.environ.get("NO_COLOR") else "auto"
    return Console(stderr=stderr, color_system=colours, highlight=False, markup=False, emoji=False)


def busy(text: str) -> AbstractContextManager[Any]:
    """Return a context manager that shows a spinner with this text on standard error, on a terminal only."""
    screen = console(stderr=True)
    return screen.status(text) if screen.is_terminal else nullcontext()


@contextmanager
def steps() -> Iterator[Callable[[int, int, str], None]]:
    """Show a progress bar of steps, on a terminal only -> a function of done, total and the next step's name."""
    screen = console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task("")
        yield lambda done, count, name: bar.update(task, description=name, completed=done, total=count)


@contextmanager
def countdown(total: int) -> Iterator[Callable[[int, int], None]]:
    """Show how many prompts are answered, how many failed and the time left -> a function of the first two numbers.
    On a terminal this is a bar; elsewhere, a line every EVERY seconds."""
    screen = console(stderr=True)
    columns = (TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}", markup=False))
    times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(compact=True))
    with Progress(*columns, *times, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task, shown, first = bar.add_task("", total=total), monotonic(), None

        def show(done: int, failed: int) -> None:
            nonlocal shown, first
            failures = f"{failed} failed" if failed else ""
            bar.update(task, completed=done, description=failures)
            first = first or (done, monotonic())
            if not screen.is_terminal and monotonic() - shown >= EVERY and done < total:
                shown = monotonic()
                pace = (shown - first[1]) / max(1, done - first[0])
                left = timedelta(seconds=round(pace * (total - done)))
                say(f"{done} of {total} prompts{', ' if failed else ''}{failures}, about {left} left")

        yield show


@contextmanager
def progress(count: int, max_new_tokens: int) -> Iterator[Callable[[Round], None]]:
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.completed:.0f} tokens"))
    ended, total = 0, count * max_new_tokens
    screen = console(stderr=True)
    how: dict[str, Any] = {"transient": True, "disable": not screen.is_terminal, "redirect_stdout": False}
    with Progress(*columns, TimeElapsedColumn(), console=screen, **how) as bar:
        task = bar.add_task(f"0 of {count} prompts", total=total)

        def on_round(round: Round) -> None:
            nonlocal ended, total
            done = [row for row in round.rows if row.finish_reason]
            ended, total = ended + len(done), total - sum(row.room for row in done)
            bar.update(task, total=total, description=f"{ended} of {count} prompts")
            bar.advance(task, sum(map(len, round.tokens)))

        yield on_round


def figures_table(*heads: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="")
    for number, head in enumerate(heads):
        table.add_column(head, justify="right" if number else "left", no_wrap=True)
    return table
