"""Plots a report: a bar per contender, with the spread over the repetitions; and checks where plots can be written."""

from collections.abc import Callable, Iterable
from pathlib import Path

from slipstream.bench.records import BenchReport, Result
from slipstream.files import Picture, atomic_write, check_writable


def check_plot(file: Path | str, force: bool = False, inputs: Iterable[str] = ()) -> None:
    """Raises ValueError, in one sentence, if no plot can be written there; `inputs` are never replaced."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise ValueError("a plot needs matplotlib: pip install 'slipstream[plot]'.") from None
    kinds = FigureCanvasBase.get_supported_filetypes()
    if Path(file).suffix[1:].lower() not in kinds:
        raise ValueError(f"--plot {file} has no kind of picture at its end: use one of {', '.join(sorted(kinds))}.")
    check_writable(Path(file), Picture(), force, inputs)


def plot(report: BenchReport, path: Path, label: Callable[[Result], str]) -> None:
    from matplotlib.figure import Figure

    races = list(dict.fromkeys((row.batch, row.temperature) for row in report.rows))
    most = max((sum((row.batch, row.temperature) == race for row in report.rows) for race in races), default=1)
    figure = Figure(figsize=(9, max(1, len(races)) * (0.32 * most + 0.9)), layout="constrained")
    panels = figure.subplots(max(1, len(races)), squeeze=False)[:, 0]
    for panel, (batch, temperature) in zip(panels, races, strict=False):
        rows = [row for row in report.rows if (row.batch, row.temperature) == (batch, temperature)]
        middles = [row.tokens_per_second["median"] for row in rows]
        below = [row.tokens_per_second["median"] - row.tokens_per_second["min"] for row in rows]
        above = [row.tokens_per_second["max"] - row.tokens_per_second["median"] for row in rows]
        colors = ["tab:blue" if row.contender.startswith("slipstream") else "tab:gray" for row in rows]
        panel.barh([label(row) for row in rows], middles, xerr=[below, above], color=colors, ecolor="black")
        panel.invert_yaxis()
        panel.set_title(f"batch {batch}, temperature {temperature:g}", loc="left", fontsize=10)
    panels[-1].set_xlabel("tokens per second (median; the line is min to max)")
    facts = report.environment
    figure.suptitle(f"{facts['target']['name']}: {facts['cpu']}, {facts['threads']} threads", fontsize=9)
    with atomic_write(path) as part:
        figure.savefig(part, format=path.suffix[1:].lower())
