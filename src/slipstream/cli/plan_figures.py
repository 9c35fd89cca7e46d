"""`slipstream plan` without models: the speed that alpha, c and the distance of the draft predict."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console

from slipstream.cli.console import console, figures_table
from slipstream.cli.options import own, panel
from slipstream.plan.from_figures import Figures, promise
from slipstream.text.jsontext import json_text

FigureOptions = panel(
    "Without models",
    alpha=own(float | None, None, "Chance that a drafted token is kept.", "X", min=0, max=1),
    cost=own(float | None, None, "A draft step's time over a target step's (c).", "X", min=0),
    operations_cost=own(float | None, None, "The same for operations (c-hat); without: as --cost.", "X", min=0),
    curve=own(str | None, None, "T(rows)/T(1) for 1, 2, .. rows; without: all 1.", "1,X,.."),
    step_ms=own(float | None, None, "Milliseconds of a target step, for --network-ms.", "X", min=0.001),
)
"""The options any of which selects a plan from known figures, without measuring."""

ONLY_FIGURES = {*FigureOptions.__annotations__}


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
        _show(figures, bool(points), step, console())


def _show(figures: Figures, curved: bool, step: float | None, screen: Console) -> None:
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
        rest = (
            f"At least {figures.guaranteed:.2f} (Corollary 3.9); drafting just what will be kept: {figures.oracle:.2f}."
        )
        screen.print(f"{rest}\nA pass over gamma + 1 tokens is taken to cost one step; give --curve if it does not.")


def about_distance(delay: float, longest: float) -> str:
    """Return a sentence on the distance of a draft on another machine; milliseconds there and back."""
    where = f"the draft is {delay:g} ms away, there and back"
    if longest <= 0:
        return f"{where}: it would not pay here either."
    if delay >= longest:
        return f"{where}, which does not pay: it would up to {longest:.3g} ms."
    return f"{where}; up to {longest:.3g} ms it pays."
