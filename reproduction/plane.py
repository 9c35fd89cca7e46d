"""The plane of baselines: speed over plain decoding against the distance from the target's law, for all methods."""

from dataclasses import replace
from typing import Any

from reproduction.lab import Lab
from reproduction.pages.sheet import Cell, Column, Curve, Sheet
from reproduction.published import BASELINES, EDITING, WRITING
from reproduction.runs.methods import BLOCKWISE, EXITS, SOURCES
from reproduction.standins.copies import Lessons
from reproduction.tables import TEMPERATURES, about

METHODS_TRAINED = (BLOCKWISE, EXITS, SOURCES)
"""The methods that need trained models, which are kept in the folder of the stand-ins."""


def baselines(lab: Lab) -> Sheet:
    """Return the sheet of all methods at all their settings, on the embedded pair and on the lab's other tasks."""
    rows, curves, measured = list[tuple[Cell, ...]](), list[Curve](), list[dict[str, Any]]()
    trained = lab.inputs.standins is not None
    for task in (WRITING, *([EDITING] if trained else []), *lab.tasks):
        for temperature in TEMPERATURES:
            found = lab.baselines(task, temperature)
            measured.append(found)
            rows += [_row(found, row) for row in found["rows"][1:]]
            curves += _curves(found)
    if not trained:
        rows += [(None, None, name, "not measured", *[None] * 6) for name in METHODS_TRAINED]
    heads = ("subject", "T", "method", "setting", "x plain", "tokens per call")
    last = (Column("greedy texts equal"), Column("BLEU", 1), Column("chrF", 1))
    columns = (*map(Column, heads), Column("total variation per token", 4), *last)
    title = "Baselines: speed over plain decoding, and the distance from the target's law"
    axes = ("mean total variation per token", "x plain")
    notes = _notes(measured, lab.scale.lessons if trained else None)
    made = Sheet("baselines", title, columns, tuple(rows), notes, axes=axes, curves=tuple(curves))
    return replace(made, **about(lab, measured))


def _row(found: dict[str, Any], row: dict[str, Any]) -> tuple[Cell, ...]:
    same = None if row["same"] is None else f"{row['same']} of {row['of']}"
    speed = row["over_plain"]["median"], row["tokens_per_call"], row["distance"]
    layers = f", {row['layers']:.1f} layers" if "layers" in row else ""
    where = found["subject"], found["temperature"], row["method"], f"{row['setting']}{layers}"
    return (*where, *speed, same, row.get("bleu"), row.get("chrf"))


def _curves(found: dict[str, Any]) -> list[Curve]:
    group, lines = f"{found['subject']}, temperature {found['temperature']:g}", []
    for method in dict.fromkeys(row["method"] for row in found["rows"][1:]):
        points = sorted((r["distance"], r["over_plain"]["median"]) for r in found["rows"] if r["method"] == method)
        x, y = zip(*points, strict=True)
        lines.append(Curve(method, x, y, group=group, marked=True))
    return lines


def _notes(measured: list[dict[str, Any]], lessons: Lessons | None) -> tuple[str, ...]:
    first = measured[0]
    untrained = "Blockwise Parallel Decoding, CALM and Shallow Aggressive Decoding need models: give --standins FOLDER."
    return (
        f"By turns, text by text, {first['texts']} texts, {first['repetitions']} repetitions, gamma {first['gamma']} "
        "and the smallest draft for all rules; `x plain` is the median over repetitions of the ratio to plain decoding "
        "in the same one. The exact methods lie on the line of distance 0.",
        "Distance: total variation of the law by which a position's token is emitted from the target's on the same "
        "prefix, averaged over emitted tokens; greedily, the share of tokens that the target would not have chosen.",
        "In the papers of the methods, on their models, tasks and machines: "
        f"{'; '.join(f'{name} {figure}' for name, figure in BASELINES.items() if figure)}.",
        "BLEU and chrF (sacrebleu) of the first repetition: to the references of a task; the embedded pair has none, "
        "and its greedy texts are compared with those of plain decoding, its samples not at all.",
        "Lenience: section A.5. Typical acceptance: Medusa's (2401.10774), on a draft model's chain; greedily it keeps "
        "the target's tokens only. Speculative cascade: 2405.19261, the rule OPT. Committee: 2012.01988 token by "
        "token, the draft's tokens while its most probable one has tau or more. None of them is a rule of the engine "
        "but lenience, which has to be asked for.",
        *((*TRAINED_NOTES, _training_note(lessons)) if lessons else (untrained,)),
    )


def _training_note(lessons: Lessons) -> str:
    """Return a note on how long the copies learned, which limits what their methods can reach."""
    frozen, tuned, exits = lessons.frozen, lessons.tuned, lessons.exits
    return (
        "How long the copies of the embedded target learned limits what their methods reach: heads on the frozen base "
        f"{frozen.steps:,} steps of {frozen.rows * frozen.length:,} tokens, the fine-tuned base {tuned.steps} of "
        f"{tuned.rows * tuned.length:,}, and the exits {exits.steps} of {exits.rows * exits.length:,}."
    )


TRAINED_NOTES = (
    "Blockwise Parallel Decoding (1811.03115), greedy as there: the base and k - 1 heads, trained to say what the "
    "target says one to k tokens on. `frozen base` is the target as it is; the fine-tuned base learned along with the "
    "heads and is another model, whose own texts are exact for it: what it says otherwise than the target is its "
    "distance. Heads are independent, so smaller blocks use the first of five.",
    "CALM (2207.07061): a copy of the target whose layers can all be the last, taught with the sum of the layers' "
    "losses weighted by their numbers; states are copied to the skipped layers. Thresholds fall along a text (eq. 5) "
    "and are the lowest that Learn-then-Test shows, with 95 % confidence, to keep the mean distance (1 - chrF) of "
    "held-out greedy texts from those of all layers at or below the risk; a risk that none keeps has no row. "
    "`no exits` is the copy itself: what lies between it and distance 0 is what it learned otherwise than the target.",
    "Shallow Aggressive Decoding (2106.04970), greedy as there: the broken function is the draft up to the first "
    "difference, and again from where the last output tokens occur at one place of it alone. The published figure is "
    "of an encoder-decoder with a shallow decoder; our causal target reads the source in its prompt and has no decoder "
    "apart. `edits`: functions of Python's standard library with one to three slips, to be written without them, by "
    "copies of the embedded pair that were taught that.",
)
"""Notes that explain the methods that need training."""
