"""Draws sheets as pictures: curves in panels, and timelines."""

from pathlib import Path
from typing import Any

from reproduction.pages.sheet import Sheet
from slipstream.files import atomic_write

COLOURS = {"once": "tab:gray", "draft": "tab:green", "target": "tab:blue", "rest": "tab:orange"}
SETTINGS = {"svg.hashsalt": "slipstream", "font.size": 9.0}


def check_drawing() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError("the figures need matplotlib: pip install 'slipstream[paper]'.") from None


def draw(sheet: Sheet, file: Path) -> None:
    """Write an SVG file; the same sheet gives the same bytes."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(SETTINGS), atomic_write(file) as part:
        groups = list(dict.fromkeys(curve.group for curve in sheet.curves)) or [""]
        figure = Figure(figsize=(1 + 5 * len(groups), 2.6 if sheet.lanes else 4), layout="constrained")
        panels = figure.subplots(1, len(groups), squeeze=False)[0]
        for group, panel in zip(groups, panels, strict=True):
            _lanes(sheet, panel) if sheet.lanes else _curves(sheet, group, panel)
        figure.suptitle(sheet.title, fontsize=10)
        figure.savefig(part, format="svg", metadata={"Date": None})


def _curves(sheet: Sheet, group: str, panel: Any) -> None:
    colours: dict[str, Any] = {}
    for curve in sheet.curves:
        if curve.group == group:
            pair = curve.label.split(", ")[-1]  # a dashed curve takes the colour of the solid one of the same pair
            style = f"{'o' if curve.marked else ''}{'--' if curve.dashed else '-'}"
            (line,) = panel.plot(curve.x, curve.y, style, label=curve.label, color=colours.get(pair), markersize=4)
            if any(each.dashed for each in sheet.curves):
                colours.setdefault(pair, line.get_color())
    panel.set(xlabel=sheet.axes[0], ylabel=sheet.axes[1], title=group)
    panel.grid(alpha=0.3)
    panel.legend(fontsize=7)


def _lanes(sheet: Sheet, panel: Any) -> None:
    for place, lane in enumerate(sheet.lanes):
        for start, end, who in lane.calls:
            panel.barh(place, end - start, left=start, height=0.6, color=COLOURS[who], edgecolor="white", linewidth=0.3)
    for who, colour in COLOURS.items():
        panel.barh(0, 0, color=colour, label=who)
    panel.set_yticks(range(len(sheet.lanes)), [lane.label for lane in sheet.lanes])
    panel.invert_yaxis()
    panel.set_xlabel("milliseconds")
    panel.legend(fontsize=7, ncols=4, loc="lower right")
