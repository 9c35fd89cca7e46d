"""The plan file: what `slipstream plan` chose and measured, as JSON that `generate`, `load` and people read."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.core.model_options import MODEL_OPTIONS, ModelOptions
from slipstream.files import JsonObject, atomic_write
from slipstream.text.jsontext import json_text

FORMAT, VERSION = "slipstream plan", 1
KIND = JsonObject("plan", {"format": FORMAT})  # the format that tells a plan file from other JSON files

KINDS: dict[str, Any] = {"vocab": (int,), "temperature": (int, float), "machine": (dict,), "figures": (dict,)}
"""The fields of the file besides `gammas` and the options of models, and the types they may have."""

ALWAYS = ("target", "draft", "verify", "dtype", "compile", "quantize")
"""The options of models that the file names even if they have their defaults."""


@dataclass(frozen=True)
class Plan:
    """A plan: the chosen draft and gammas, and the measurements that they rest on.

    `models` are the options to load them with, written as they were given; without a target it is the embedded pair,
    without a draft nothing drafts. `gammas` holds tokens drafted per round by the number of rows that run together; 0
    is plain decoding. `vocab` is the size of the target's logits. `machine` and `figures` are for the reader: what it
    was measured on, and what was measured, predicted and verified.
    """

    models: ModelOptions
    gammas: Mapping[int, int]
    vocab: int
    temperature: float = 0.0
    machine: Mapping[str, Any] = field(default_factory=dict)
    figures: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.gammas or min(self.gammas) < 1 or min(self.gammas.values()) < 0:
            raise ValueError(f"gammas={dict(self.gammas)} is no plan: give a gamma of 0 or more for 1 and more rows.")

    @property
    def speculates(self) -> bool:
        return self.models.draft is not None and any(self.gammas.values())

    def check_target(self, name: str | None, vocab: int | None = None) -> None:
        ours, target = Path(self.models.target or "target").name, self.models.target or "the embedded pair"
        if name is not None and Path(name).name != ours:
            raise ValueError(f"the plan is for {target}, not for {name}: make one for that.")
        if vocab is not None and vocab != self.vocab:
            raise ValueError(f"the plan is for a target of {self.vocab} token ids, this one has {vocab}: make another.")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file; it appears under its name only once it is whole."""
        with atomic_write(path) as part:
            part.write_text(json_text(self.as_dict(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    def as_dict(self) -> dict[str, Any]:
        gammas = {str(rows): gamma for rows, gamma in sorted(self.gammas.items())}
        rest = {name: getattr(self, name) for name in KINDS}
        models = {name: getattr(self.models, name) for name in MODEL_OPTIONS if name in ALWAYS}
        models |= {name: value for name, value in self.models.given().items() if MODEL_OPTIONS[name].changes}
        return {"format": FORMAT, "version": VERSION, **models, "gammas": gammas, **rest}

    @staticmethod
    def read(path: str | os.PathLike[str]) -> Plan:
        try:
            contents = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"cannot read the plan {path}: {error.strerror}.") from error
        except ValueError as error:
            raise ValueError(f"{path} is no plan: it is no JSON. `slipstream plan --save FILE` writes one.") from error
        if not isinstance(contents, dict) or contents.get("format") != FORMAT:
            raise ValueError(f"{path} is no plan: `slipstream plan --save FILE` writes one.")
        if contents.get("version") != VERSION:
            version = contents.get("version")
            raise ValueError(f"{path} is a plan of version {version}, this release reads {VERSION}: make it again.")
        try:
            contents = {"quantize": None, **contents}  # older files lack this field
            asked = MODEL_OPTIONS.items()
            kept = [each for name, each in asked if name in ALWAYS or (each.changes and name in contents)]
            models = {each.name: contents[each.name] for each in kept}
            for each in kept:
                missing = models[each.name] is None and each.default is None
                if not missing and not isinstance(models[each.name], bool if each.kind is bool else str):
                    raise TypeError(f"{each.name} is {models[each.name]!r}")
            for name, kinds in KINDS.items():
                if not isinstance(contents[name], kinds):
                    raise TypeError(f"{name} is {contents[name]!r}")
            gammas = {int(rows): gamma for rows, gamma in contents["gammas"].items()}
            if not all(isinstance(gamma, int) for gamma in gammas.values()):
                raise TypeError(f"gammas is {contents['gammas']!r}")
            return Plan(ModelOptions(**models), gammas, **{name: contents[name] for name in KINDS})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"the plan {path} is damaged ({type(error).__name__}: {error}): make it again.") from error
