"""The plane of baselines: speed over plain decoding against the distance from the target's law, ours among them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slipstream.paper.lab import Lab
from slipstream.paper.pages.sheet import Cell, Column, Curve, Sheet
from slipstream.paper.published import BASELINES, WRITING
from slipstream.paper.tables import TEMPERATURES, about

MISSING = {
    "CALM": "exits that were trained with the target",
    "Shallow Aggressive Decoding": "a target that corrects its source, and a shallow decoder",
    "Blockwise Parallel Decoding": "heads that were trained with the target",
}
"""Methods that are not measured, and what they would need."""


def baselines(lab: Lab) -> Sheet:
    """All methods over their settings, on the embedded pair and on the tasks that were given."""
    rows, curves, measured = list[tuple[Cell, ...]](), list[Curve](), list[dict[str, Any]]()
    for task in (WRITING, *lab.tasks):
        for temperature in TEMPERATURES:
            found = lab.baselines(task, temperature)
            measured.append(found)
            rows += [_row(found, row) for row in found["rows"][1:]]
            curves += _curves(found)
    rows += [(None, None, method, "not measured", BASELINES[method], *[None] * 6) for method in MISSING]
    heads = ("subject", "T", "method", "setting", "published", "x plain", "tokens per call")
    last = (Column("greedy texts equal"), Column("BLEU", 1), Column("chrF", 1))
    columns = (*map(Column, heads), Column("total variation per token", 4), *last)
    title = "Baselines: speed over plain decoding, and the distance from the target's law"
    axes, notes = ("mean total variation per token", "x plain"), _notes(measured)
    made = Sheet("baselines", title, columns, tuple(rows), notes, axes=axes, curves=tuple(curves))
    return replace(made, **about(lab, measured))


def _row(found: dict[str, Any], row: dict[str, Any]) -> tuple[Cell, ...]:
    same = None if row["same"] is None else f"{row['same']} of {row['of']}"
    speed = row["over_plain"]["median"], row["tokens_per_call"], row["distance"]
    where = found["subject"], found["temperature"], row["method"], row["setting"]
    return (*where, BASELINES.get(row["method"], ""), *speed, same, row.get("bleu"), row.get("chrf"))


def _curves(found: dict[str, Any]) -> list[Curve]:
    """A line for each method, from setting to setting."""
    group, lines = f"{found['subject']}, temperature {found['temperature']:g}", []
    for method in dict.fromkeys(row["method"] for row in found["rows"][1:]):
        points = sorted((r["distance"], r["over_plain"]["median"]) for r in found["rows"] if r["method"] == method)
        x, y = zip(*points, strict=True)
        lines.append(Curve(method, x, y, group=group))
    return lines


def _notes(measured: list[dict[str, Any]]) -> tuple[str, ...]:
    first = measured[0]
    missing = "; ".join(f"{method} needs {what}" for method, what in MISSING.items())
    return (
        f"By turns, text by text, {first['texts']} texts, {first['repetitions']} repetitions, gamma {first['gamma']} "
        "and the smallest draft for all; `x plain` is the median over repetitions of the ratio to plain decoding in "
        "the same one. The exact methods lie on the line of distance 0.",
        "Distance: total variation of the law by which a position's token is emitted from the target's on the same "
        "prefix, averaged over emitted tokens; greedily, the share of tokens that the target would not have chosen.",
        "BLEU and chrF (sacrebleu) of the first repetition: to the references of a task; the embedded pair has none, "
        "and its greedy texts are compared with those of plain decoding, its samples not at all.",
        "Lenience: section A.5. Typical acceptance: Medusa's (2401.10774), on a draft model's chain; greedily it keeps "
        "the target's tokens only. Speculative cascade: 2405.19261, the rule OPT. Committee: 2012.01988 token by "
        "token, the draft's tokens while its most probable one has tau or more. None of them is a rule of the engine "
        "but lenience, which has to be asked for.",
        f"Not measured: {missing}. Their published figures stand for themselves.",
    )
