"""Saving a distilled draft as a plain Hugging Face folder with a model card, which appears only when complete."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from slipstream.files import JsonObject, Name, atomic_folder
from slipstream.text.jsontext import json_text
from slipstream.training.distill import TEMPERATURES, DistillSettings, DraftCosts, Measurement

REPORT = "distillation.json"
"""The file in a draft's folder that describes its training, and marks the folder as written by us."""

FORMAT = "slipstream distilled draft"
KIND = JsonObject("distilled draft", {"format": FORMAT})

_CARD = """\
---
base_model: {target}
library_name: transformers
tags: [speculative-decoding, draft]
---
# A draft for {target}

A small model that guesses what `{target}` says next, for speculative decoding. It was trained for that alone, by
`slipstream distill`, and is of little use by itself.

    slipstream generate "..." --target {target} --draft {name}

{parameters:,} parameters ({size}), {origin}. {steps:,} steps, {tokens:,} tokens read, {seconds:,.0f} seconds; objective
`{objective}`; texts: {data}, and {written:,} tokens that the target wrote.

| temperature | alpha | kept at least 1, 2, ... tokens | best gamma | speed-up by Theorem 3.8 |
|---|---|---|---|---|
{rows}

Measured on {prompts} prompts kept aside, {new_tokens} new tokens each. The speed-ups follow from costs on the machine
that trained it: a drafting step takes {c:.3f} of a step of the target.
"""


@dataclass(frozen=True)
class Distilled:
    """The facts of a distilled draft for its report and card: target, data, size, training and measurements."""

    target: str
    data: tuple[str, ...]
    size: str
    origin: str
    parameters: int
    steps: int
    tokens: int
    seconds: float
    written: int
    prompts: int
    costs: DraftCosts
    settings: DistillSettings
    measured: tuple[Measurement, ...]

    def as_dict(self) -> dict[str, Any]:
        last = self.measured[-1]
        gain = dict(zip(map(str, TEMPERATURES), last.gains, strict=True))
        alpha = dict(zip(map(str, TEMPERATURES), last.alpha, strict=True))
        return {"format": FORMAT, **asdict(self), "alpha": alpha, "speed_up": gain}

    def card(self, name: str) -> str:
        last = self.measured[-1]
        columns = zip(TEMPERATURES, last.alpha, last.kept, last.gammas, last.gains, strict=True)
        rows = [
            f"| {temperature:g} | {alpha:.3f} | {' '.join(f'{one:.2f}' for one in kept)} | {gamma} | {gain:.2f} |"
            for temperature, alpha, kept, gamma, gain in columns
        ]
        facts = {**asdict(self), "data": ", ".join(f"`{one}`" for one in self.data), "rows": "\n".join(rows)}
        how = {"objective": self.settings.objective, "new_tokens": self.settings.new_tokens, "c": self.costs.c}
        return _CARD.format(**{**facts, **how}, name=name)


def check_draft_folder(out: Name) -> None:
    """Check, before any work, that a draft may be written there: to an empty folder, or over a distilled draft."""
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"cannot write {out}: it is a file; give a folder for the draft.")
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    report = folder / REPORT
    if not (report.is_file() and KIND.recognises(report)):
        raise ValueError(
            f"cannot write {out}: it holds files and no draft of `slipstream distill`; give another folder."
        )


def save_draft(model: PreTrainedModel, tokenizer: Any, about: Distilled, out: Name) -> None:
    """Write the draft, its tokenizer, its card and its report, all or nothing. Raises ValueError if it may not."""
    check_draft_folder(out)
    with atomic_folder(out) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / "README.md").write_text(about.card(Path(out).name), encoding="utf-8")
        (folder / REPORT).write_text(json_text(about.as_dict()), encoding="utf-8")
