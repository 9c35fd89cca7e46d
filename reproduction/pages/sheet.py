"""`Sheet`: a table or figure as one record, which is written as JSON, drawn, printed and put on the page."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slipstream.files import atomic_write
from slipstream.text.jsontext import json_text

Cell = str | float | int | None


@dataclass(frozen=True)
class Column:
    """A column of a table: its heading, and the decimal places of its numbers."""

    name: str
    digits: int = 2


@dataclass(frozen=True)
class Curve:
    """A line of a plot. `group` is the panel it belongs to; a `marked` line shows its points."""

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    dashed: bool = False
    group: str = ""
    marked: bool = False


@dataclass(frozen=True)
class Lane:
    """A row of a timeline: calls as (start, end, kind) in milliseconds."""

    label: str
    calls: tuple[tuple[float, float, str], ...]


@dataclass(frozen=True)
class Sheet:
    """One table or figure with the paper's figures next to ours.

    `notes` are sentences below it, `text` is preformatted, `axes` name x and y of the curves, `command` makes the
    sheet, `environment` describes the machine if anything was measured, and `quick` is True if models and texts were
    small.
    """

    name: str
    title: str
    columns: tuple[Column, ...] = ()
    rows: tuple[tuple[Cell, ...], ...] = ()
    notes: tuple[str, ...] = ()
    text: str = ""
    axes: tuple[str, str] = ("", "")
    curves: tuple[Curve, ...] = ()
    lanes: tuple[Lane, ...] = ()
    command: str = ""
    environment: dict[str, Any] | None = None
    quick: bool = False

    def as_dict(self) -> dict[str, Any]:
        return json.loads(json_text(asdict(self)))

    @property
    def drawn(self) -> bool:
        """Whether the sheet has a picture: curves or a timeline."""
        return bool(self.curves or self.lanes)

    def cells(self) -> list[list[str]]:
        return [
            [shown(cell, column.digits) for cell, column in zip(row, self.columns, strict=True)] for row in self.rows
        ]


def sheet(record: dict[str, Any]) -> Sheet:
    parts = {
        "columns": tuple(Column(**column) for column in record["columns"]),
        "rows": tuple(map(tuple, record["rows"])),
        "curves": tuple(Curve(**{**c, "x": tuple(c["x"]), "y": tuple(c["y"])}) for c in record["curves"]),
        "lanes": tuple(Lane(lane["label"], tuple(map(tuple, lane["calls"]))) for lane in record["lanes"]),
        "notes": tuple(record["notes"]),
        "axes": tuple(record["axes"]),
    }
    return Sheet(**{**record, **parts})


def shown(cell: Cell, digits: int) -> str:
    """Return a cell as text: floats with `digits` decimal places, None as an empty cell."""
    if cell is None:
        return ""
    return f"{cell:.{digits}f}" if isinstance(cell, float) else str(cell)


def ratio(value: float | None, reference: float | None) -> float | None:
    """Return our value over the paper's; None unless both are known and the paper's is not 0."""
    return value / reference if value is not None and reference else None


def markdown(sheet: Sheet) -> list[str]:
    """Return the lines of a Markdown table, with numbers aligned to the right; none without rows."""
    if not sheet.rows:
        return []
    numeric = [all(not isinstance(row[place], str) for row in sheet.rows) for place in range(len(sheet.columns))]
    heads = [column.name for column in sheet.columns]
    marks = ["--:" if right else "---" for right in numeric]
    return ["| " + " | ".join(cells) + " |" for cells in (heads, marks, *sheet.cells())]


def write_json(record: Any, file: Path) -> None:
    """Write a JSON file atomically, and make its folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(file) as part:
        part.write_text(json_text(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read_sheets(folder: Path, names: Sequence[str]) -> list[Sheet]:
    """Return the sheets that exist in a folder, in the order of `names`."""
    files = [folder / f"{name}.json" for name in names]
    return [sheet(json.loads(file.read_text(encoding="utf-8"))) for file in files if file.is_file()]
