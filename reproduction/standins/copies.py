"""The copies of the embedded target that the plane of baselines measures, trained in a folder if they are missing."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reproduction.baselines.heads import FILE
from reproduction.standins import edits, tuning
from reproduction.standins import python_prompts as writing
from reproduction.standins.corpora import Pairs
from reproduction.standins.heads import HeadTrainer, TrainingSettings
from reproduction.standins.tuning import Lesson, Say, Teaching
from slipstream.models.loading.load import load_model, load_tokenizer
from slipstream.models.loading.pairings import EMBEDDED
from slipstream.training.trainer import Progress

HEADS = 5
"""The number of parallel heads in addition to the base's own head, for blocks of up to six tokens."""


@dataclass(frozen=True)
class Lessons:
    """The training settings of every copy. On two cores, all of them take about an hour and a half."""

    frozen: TrainingSettings = field(
        default_factory=lambda: TrainingSettings(
            HEADS, 0, 1_500, rows=8, length=128, rate=2e-3, bfloat16=True, save_every=25
        )
    )
    tuned: Lesson = field(default_factory=lambda: Lesson(800))
    exits: Lesson = field(default_factory=lambda: Lesson(800))
    editing: Mapping[str, Lesson] = field(
        default_factory=lambda: {"target": Lesson(240, 16, rate=1e-3), "draft": Lesson(300, 16, rate=3e-3)}
    )


QUICK_LESSONS = Lessons(
    TrainingSettings(HEADS, 0, 100, rows=4, length=128, rate=2e-3, bfloat16=True, save_every=25),
    *(Lesson(60, 4, rate=1e-3), Lesson(60, 4, rate=1e-3)),
    {"target": Lesson(120, 8, rate=1e-3), "draft": Lesson(120, 8, rate=3e-3)},
)
"""Settings that take a few minutes in all: the methods work, but would be better with more training."""


@dataclass
class Copies:
    """Copies of the embedded target in a folder, each trained at its first use; an interrupted training is resumed."""

    folder: Path
    lessons: Lessons
    say: Say

    @property
    def frozen_heads(self) -> Path:
        folder = self.folder / "blockwise-frozen"
        if not (folder / FILE).is_file():
            settings, text = self.lessons.frozen, self._text.numpy()
            HeadTrainer(self._model, "slipstream embedded target", text, folder, settings).train(self._watch(settings))
        return folder

    @property
    def blockwise(self) -> Path:
        """The folder of a fine-tuned base and the heads trained with it."""
        return tuning.blockwise(self.folder / "blockwise-tuned", self._teaching, self.lessons.tuned, HEADS)

    @property
    def exits(self) -> Path:
        return tuning.exits(self.folder / "exits", self._teaching, self.lessons.exits)

    def editing(self, pairs: Pairs) -> dict[str, Path]:
        """Return the folders of a target and a draft that write corrected functions, by role."""
        folders = {role: self.folder / edits.NAME / role for role in self.lessons.editing}
        if not all((folder / "config.json").is_file() for folder in folders.values()):
            editing = edits.Editing.of(pairs.train, self._tokenizer)
            for role, folder in folders.items():
                model = load_model(EMBEDDED / role, "float32")
                edits.train(model, self._tokenizer, editing, self.lessons.editing[role], folder, self.say)
        return folders

    @property
    def _teaching(self) -> Teaching:
        return Teaching(self._model, self._tokenizer, self._text, self.say)

    @cached_property
    def _model(self) -> Any:
        return load_model(EMBEDDED / "target", "float32")

    @cached_property
    def _tokenizer(self) -> Any:
        return load_tokenizer(EMBEDDED / "target")

    @cached_property
    def _text(self) -> Tensor:
        ids = self._tokenizer(list(writing.texts()), verbose=False)["input_ids"]
        return torch.tensor([token for text in ids for token in text])

    def _watch(self, settings: TrainingSettings) -> Callable[[Progress, float], None]:
        def watch(progress: Progress, loss: float) -> None:
            if progress.steps % 20 == 0 or progress.steps == settings.steps:
                self.say(f"blockwise, base frozen: step {progress.steps} of {settings.steps}, loss {loss:.3f}")

        return watch
