"""The tables of a race (`race.py`): speeds, bars, first tokens and memory, and what plans predicted."""

from collections.abc import Callable, Iterator, Mapping
from statistics import median
from typing import Any

OURS, PLAIN = "slipstream", "plain"
Found = Mapping[str, Any]
Cell = tuple[int, float]
"""The rows that run together, and the temperature."""


class Speeds:
    """The speeds of a race's ways on one model, in laps."""

    def __init__(self, found: Found, model: str) -> None:
        self.laps: dict[tuple[str, str], dict[Cell, dict[int, float]]] = {}
        self.runs = [run for run in found["runs"] if run["model"] == model]
        for run in self.runs:
            cells = self.laps.setdefault((run["program"], run["way"]), {})
            laps = cells.setdefault((run["rows"], run["temperature"]), {})
            laps[run["lap"]] = run["tokens"] / run["seconds"]
        self.cells = sorted({(run["rows"], run["temperature"]) for run in self.runs})

    def of(self, program: str, way: str, cell: Cell) -> float | None:
        """Return the median speed in a cell; None if it was not measured."""
        laps = self.laps.get((program, way), {}).get(cell)
        return median(laps.values()) if laps else None

    def best(self, cell: Cell, mine: bool, plain: bool | None = None) -> float | None:
        """Return the best median in a cell, of our ways or of the others', of plain or drafted decoding, or of any."""
        kinds = [
            (program, way)
            for program, way in self.laps
            if (program == OURS) == mine and plain in (None, way == PLAIN) and (not mine or not way.endswith("auto"))
        ]
        speeds = [speed for kind in kinds if (speed := self.of(*kind, cell)) is not None]
        return max(speeds, default=None)


def markdown(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rows))


def speed_table(found: Found, model: str) -> str:
    """Return tokens per second by program and way, a column for each cell; the ratio is to the best of the others."""
    speeds, rows = Speeds(found, model), []
    head = [f"T = {heat:g}, {rows} text{'s' if rows > 1 else ''}" for rows, heat in speeds.cells]
    for program, way in speeds.laps:
        row = [f"{program}, {said(way)}"]
        for cell in speeds.cells:
            own, best = speeds.of(program, way, cell), speeds.best(cell, False)
            over = f" ({own / best:.2f})" if own and best and program == OURS else ""
            row.append("-" if own is None else f"{own:.0f}{over}")
        rows.append(row)
    return markdown([f"{model}: tokens/s (over the best of the others)", *head], rows)


def said(way: str) -> str:
    """Return a way for readers."""
    draft, _, gamma = way.partition("@")
    return PLAIN if draft == PLAIN else f"{draft.replace('|', ' or ')}, gamma {gamma}"


def bars(found: Found, model: str) -> Iterator[list[str]]:
    """Yield the bars of a model: what, where, its limit and what was measured."""
    speeds = Speeds(found, model)
    automatic = [way for program, way in speeds.laps if program == OURS and way.endswith("auto")]
    for cell in speeds.cells:
        plain, others = speeds.best(cell, True, True), speeds.best(cell, False)
        figures = [
            ("plain / the others' best plain", 1.0, plain, speeds.best(cell, False, True)),
            ("best draft / the others' best of any kind", 1.3, speeds.best(cell, True, False), others),
        ]
        for way in automatic:
            figures.append((f"{said(way)} / plain", 0.98, speeds.of(OURS, way, cell), plain))
            # Of the gammas that raced, 0 (plain) among them: another draft is another choice.
            ways = [
                other for program, other in speeds.laps if program == OURS and other.startswith(way[: -len("auto")])
            ]
            fixed = [plain, *(speeds.of(OURS, other, cell) for other in ways if other != way)]
            best = max((each for each in fixed if each), default=None)
            figures.append((f"{said(way)} / best fixed gamma", 0.95, speeds.of(OURS, way, cell), best))
        where = f"{model}, {cell[0]} text{'s' if cell[0] > 1 else ''}, T = {cell[1]:g}"
        for what, least, value, over in figures:
            if value and over:
                yield [what, where, f">= {least:g}", f"{value / over:.2f}", "yes" if value / over >= least else "no"]


def first_table(found: Found) -> str:
    """Return the seconds from the imports to the first token in fresh processes, and the memory then."""
    groups: dict[tuple[str, str], list[Found]] = {}
    for run in found["first"]:
        groups.setdefault((run["model"], run["program"]), []).append(run)
    rows = []
    for (model, program), runs in groups.items():
        first = median(run["loading"] + run["token"] for run in runs)
        times = [f"{first:.2f}", f"{median(run['imports'] for run in runs):.1f}"]
        rows.append(
            [model, program, *times, *(f"{median(run[key] for run in runs):.0f}" for key in ("resident", "peak"))]
        )
    return markdown(["model", "program", "imports to first token, s", "imports, s", "resident, MB", "peak, MB"], rows)


def plan_table(found: Found) -> str:
    """Return the speed-ups that plans predicted beside those of the race, the target's prefill left out of both."""
    rows = []
    for plan in found["plans"]:
        speeds: dict[str, list[float]] = {
            way: [
                run["tokens"] / (sum(run["own"]["seconds"].values()) - run["own"]["seconds"].get("prefill", 0))
                for run in found["runs"]
                if run["program"] == OURS and run["way"] == way and run["rows"] == 1
                and all(run[name] == plan[name] for name in ("model", "temperature"))
            ]
            for way in (PLAIN, plan["way"])
        }  # fmt: skip
        if not all(speeds.values()):
            continue  # the race has not come to it
        measured = median(speeds[plan["way"]]) / median(speeds[PLAIN])
        interval = f"{plan['predicted']:.2f} ({plan['low']:.2f}-{plan['high']:.2f})"
        difference = f"{100 * (measured / plan['predicted'] - 1):+.0f} %"
        rows.append(
            [plan["model"], said(plan["way"]), f"{plan['temperature']:g}", interval, f"{measured:.2f}", difference]
        )
    return markdown(["model", "draft", "T", "predicted, x plain", "measured", "difference"], rows)


def texts(found: Found) -> str:
    """Return how many greedy texts of ours are those of our plain decoding, by way."""
    lines = []
    for model in models(found):
        runs = [run for run in Speeds(found, model).runs if run["program"] == OURS and run["temperature"] == 0]
        plain = next((run["texts"] for run in runs if run["way"] == PLAIN), None)
        drafted = [run["texts"] for run in runs if run["way"] != PLAIN]
        if plain and drafted:
            same = sum(left == right for each in drafted for left, right in zip(each, plain, strict=True))
            lines.append(
                f"{model}: {same} of {len(plain) * len(drafted)} drafted texts of ours are those of plain decoding."
            )
    return "\n".join(lines)


def models(found: Found) -> list[str]:
    """Return the models of a race, in its order."""
    return list(dict.fromkeys(run["model"] for run in found["runs"]))


def programs(found: Found, laps: int) -> str:
    """Return what raced, and how busy the machine was."""
    about = "; ".join(dict.fromkeys(found["about"].values()))
    return f"Medians of up to {laps} laps; load at most {max(run['busy'] for run in found['runs']):g}. {about}."


def bar_table(found: Found) -> str:
    rows = [row for model in models(found) for row in bars(found, model)]
    return markdown(["what", "where", "bar", "measured", "reached"], rows)


def first_speed_table(found: Found) -> str:
    """Return the speeds of the first model, without what `speed_tables` has of dequantized models in float32 too."""
    runs = [run for run in found["runs"] if "float32" not in run["program"]]
    return speed_table({**found, "runs": runs}, models(found)[0])


def speed_tables(found: Found) -> str:
    """Return the speeds of every model, what raced, and how many of our texts are the same."""
    laps = 1 + max(run["lap"] for run in found["runs"])
    return "\n\n".join((*(speed_table(found, model) for model in models(found)), programs(found, laps), texts(found)))


def table(make: Callable[[Found], str]) -> Callable[[Found], str]:
    """Return the function that makes a table from the record of a race."""
    return lambda record: make(record["figures"][0])


TABLES = {
    "speed": table(first_speed_table),
    "race": table(speed_tables),
    "race-bars": table(bar_table),
    "first-tokens": table(first_table),
    "race-plans": table(plan_table),
}
"""The tables by their names in documents; each is made from the record of a race."""


def report(record: Found) -> str:
    """Return all tables."""
    return "\n\n".join(make(record) for name, make in TABLES.items() if name != "speed")
