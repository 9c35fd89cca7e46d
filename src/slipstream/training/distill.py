"""Distillation: a draft model learns the law of a frozen target, and is measured by its speed-up.

An objective (`objectives`) is computed at every position of texts (`lessons`): documents, and texts that the target
itself wrote (`writing`). At intervals the draft, as it is, drafts for the target on held-out prompts. From these rounds
and the costs of drafting and verifying, Theorem 3.8 gives its speed-up; when that stops growing, the training ends.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from slipstream.core.stats import Stats
from slipstream.core.values import check_least
from slipstream.decoding.controllers import Fixed
from slipstream.drafters.model import ModelDrafter
from slipstream.engine.engine import Engine
from slipstream.files import atomic_write
from slipstream.models.loading.load import load_scorer
from slipstream.text.jsontext import json_text
from slipstream.theory import best_gamma_by_position, expected_tokens, round_cost
from slipstream.training.lessons import objective_of
from slipstream.training.material import SEQUENCE, Material, target_of
from slipstream.training.trainer import Checkpoint, Diverged, Progress, Steps, Trainer, muon_and_adam, trapezoid

STATE, MEASURED = "training.safetensors", "measured.json"
"""The files of a training: weights and optimizers, and the measurements made during it."""

TEMPERATURES = (0.0, 1.0)  # the temperatures at which drafts are measured
WARM_UP, DECAY = 0.02, 0.40  # the shares of the budget in which the learning rate rises and falls
MUON = 5.0  # the ratio of the learning rate of matrices to that of all other weights


@dataclass(frozen=True)
class DraftCosts:
    """The costs of a round in target steps: `c` of a drafting step, `verify[n]` of a target pass over n + 1 tokens."""

    c: float
    verify: tuple[float, ...]

    def curve(self, rows: int) -> float:
        return self.verify[rows - 1]

    def gain(self, kept: Sequence[float]) -> tuple[int, float]:
        """Return the best gamma and its speed-up over plain decoding (Theorem 3.8); (0, 1.0) if no gamma pays.
        kept[i - 1] is the chance that at least i drafted tokens are accepted."""
        kept = kept[: len(self.verify) - 1]
        gamma = best_gamma_by_position(kept, self.c, self.curve)
        return gamma, expected_tokens(kept[:gamma]) / round_cost(gamma, self.c, self.curve)

    def save(self, file: Path, draft: str) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(file) as part:
            part.write_text(json_text({"draft": draft, **asdict(self)}), encoding="utf-8")

    @staticmethod
    def read(file: Path, draft: str) -> DraftCosts | None:
        """Read the costs of a draft of this name; None without a file. Raises ValueError for those of another one."""
        if not file.exists():
            return None
        try:
            record = json.loads(file.read_text(encoding="utf-8"))
            known, costs = record["draft"], DraftCosts(record["c"], tuple(record["verify"]))
        except (ValueError, TypeError, LookupError) as error:
            raise ValueError(f"{file} is damaged ({error}): delete it, or give another folder.") from error
        if known != draft:
            raise ValueError(f"{file.parent} holds the training of another draft ({known}): give another --work.")
        return costs


@dataclass(frozen=True)
class Measurement:
    """The quality of a draft after `steps` steps on held-out prompts, at each of the TEMPERATURES.

    It has `alpha`, the shares of rounds that `kept` at least 1, 2, ... tokens, the best `gammas`, and the speed-ups
    (`gains`) that follow.
    """

    steps: int
    alpha: tuple[float, ...]
    kept: tuple[tuple[float, ...], ...]
    gammas: tuple[int, ...]
    gains: tuple[float, ...]

    @property
    def gain(self) -> float:
        return sum(self.gains) / len(self.gains)

    @staticmethod
    def read(record: dict[str, Any]) -> Measurement:
        tuples = {name: tuple(value) for name, value in record.items() if isinstance(value, list)}
        return Measurement(record["steps"], **{**tuples, "kept": tuple(map(tuple, record["kept"]))})


def stopped_growing(found: Sequence[Measurement], patience: int) -> int | None:
    """Return the step at which `patience` measurements in a row had brought no greater speed-up; None if none did."""
    best, since = 0.0, 0
    for one in found:
        best, since = (one.gain, 0) if one.gain > best else (best, since + 1)
        if since >= patience:
            return one.steps
    return None


@dataclass(frozen=True)
class WhilePaying:
    """A budget of steps that is cut short when speed-ups have stopped growing.

    Only the fall of the learning rate is left then, in which most drafts still gain. `found` grows during the training.
    """

    steps: Steps
    patience: int
    found: Sequence[Measurement]

    def used(self, progress: Progress) -> float:
        total, stopped = float(self.steps.total), stopped_growing(self.found, self.patience)
        if stopped is not None:
            total = min(total, stopped / (1 - DECAY))
        return progress.steps / total

    def saves(self, progress: Progress) -> int:
        return self.steps.saves(progress)


@dataclass(frozen=True)
class DistillSettings:
    """The settings of a distillation: a step reads `rows` texts of `length` tokens.

    With probability `written` these are texts of the target, else documents. `rate` is the learning rate of all but
    matrices, whose rate is MUON times that. After every `measure_every` steps the draft is measured with `gamma` tokens
    a round on `new_tokens` after each of the held-out prompts. Raises ValueError for impossible values.
    """

    steps: int = 2000
    rows: int = 16
    length: int = 256
    rate: float = 4e-3
    objective: str = "kl-tv"
    written: float = 0.75
    measure_every: int = 100
    patience: int = 5
    gamma: int = 5
    new_tokens: int = 48
    seed: int = 0
    bfloat16: bool = False  # multiply in bfloat16: faster where the processor can

    def __post_init__(self) -> None:
        if self.objective != SEQUENCE:
            objective_of(self.objective)
        check_least(self, steps=1, rows=1, length=8, measure_every=1, patience=1, gamma=1)
        if not 0 < self.rate < 1:
            raise ValueError(f"rate={self.rate} is not possible: it must be between 0 and 1.")
        if not 0 <= self.written <= 1:
            raise ValueError(f"written={self.written} is not possible: it is a share, from 0 to 1.")


class Distiller:
    """Trains a draft model for the target of an engine.
    `train` resumes after an interruption, also in a new process, and ends with the same weights as without one."""

    def __init__(
        self,
        engine: Engine,
        student: PreTrainedModel,
        material: Material,
        costs: DraftCosts,
        settings: DistillSettings,
        folder: Path,
    ) -> None:
        """Begin a training, or resume it from its state in `folder`; the student is trained in place, in float32."""
        if not len(material.read) + len(material.written):
            raise ValueError("there is no text to distil on: give documents of two tokens or more.")
        self.engine, self.student, self.material, self.costs = engine, student.train(), material, costs
        self.settings, self.folder = settings, folder
        self._dtype = target_of(engine).model.dtype
        self._objective = objective_of("kl" if settings.objective == SEQUENCE else settings.objective)
        known = {**asdict(settings), "parameters": student.num_parameters()}
        for name in ("patience", "measure_every"):
            del known[name]  # a training may be resumed with other values
        self.found: list[Measurement] = []
        self._trainer = Trainer(
            student,
            muon_and_adam(student, muon=MUON * settings.rate, adam=settings.rate),
            trapezoid(WARM_UP, DECAY),
            WhilePaying(Steps(settings.steps, settings.measure_every), settings.patience, self.found),
            Checkpoint(folder / STATE, known),
        )
        if (file := folder / MEASURED).exists():
            try:
                known_ones = map(Measurement.read, json.loads(file.read_text(encoding="utf-8")))
                self.found += [one for one in known_ones if one.steps <= self.progress.steps]
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(f"{file} is damaged ({error}): delete it, or give another folder.") from error

    @property
    def progress(self) -> Progress:
        return self._trainer.progress

    def train(
        self,
        watch: Callable[[Progress, float], object] = lambda progress, loss: None,
        measured: Callable[[Measurement], object] = lambda measurement: None,
    ) -> Measurement:
        """Take the steps that are left -> the last measurement.

        `watch` is called after every step, `measured` with every measurement. If interrupted, as by Ctrl-C, it saves
        its state first. Raises FloatingPointError if the loss is not finite.
        """

        def after(progress: Progress, loss: float) -> None:
            watch(progress, loss)
            if progress.steps % self.settings.measure_every == 0:
                measured(self.measure())

        if not self.found:
            measured(self.measure())
        try:
            self._trainer.train(self._loss, after)
        except Diverged as fault:
            raise FloatingPointError(f"{fault} The rate was {self.settings.rate:g}.") from fault
        if self.found[-1].steps < self.progress.steps:
            measured(self.measure())
        self._trainer.save()
        return self.found[-1]

    def measure(self) -> Measurement:
        """Measure the draft as it is, drafting for the target in the dtype of its later use, and store the result."""
        decoder = self.engine.decoder
        scorer = load_scorer(self.as_used())
        drafting = replace(
            decoder, drafter=ModelDrafter(scorer, decoder.target.vocab), controller=Fixed(self.settings.gamma)
        )
        engine = Engine(drafting, self.engine.tokenizer, self.engine.eos, self.engine.rule)
        stats = []
        for temperature in TEMPERATURES:
            texts = engine.generate(
                self.material.prompts, temperature=temperature, max_new_tokens=self.settings.new_tokens, seed=0
            )
            stats.append(sum((one.stats for one in texts), Stats()))
        gains = [self.costs.gain(one.acceptance_by_position) for one in stats]
        measurement = Measurement(
            self.progress.steps,
            tuple(one.alpha or 0.0 for one in stats),
            tuple(tuple(one.acceptance_by_position) for one in stats),
            *(tuple(part) for part in zip(*gains, strict=True)),
        )
        self.found.append(measurement)
        self.folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(self.folder / MEASURED) as part:
            part.write_text(json_text([asdict(one) for one in self.found]), encoding="utf-8")
        return measurement

    def as_used(self) -> PreTrainedModel:
        """Return a copy of the student in the target's dtype, in which it is saved and used."""
        return copy.deepcopy(self.student).eval().to(self._dtype)

    def _loss(self, step: int, used: float) -> tuple[Tensor, int]:
        settings, material = self.settings, self.material
        rng, device = np.random.default_rng([settings.seed, step]), self.student.device
        lessons = material.written if rng.random() < settings.written else material.read
        lessons = lessons if len(lessons) else material.written if len(material.written) else material.read
        batch = lessons.pick(rng.integers(0, len(lessons), settings.rows), device)
        with torch.autocast(device.type, torch.bfloat16, enabled=settings.bfloat16):
            logits = self.student(input_ids=batch.tokens, use_cache=False).logits[:, :-1]
        log_q = functional.log_softmax(logits.float(), -1).gather(-1, batch.ids)
        losses = self._objective(batch.log_p, log_q, torch.tensor(used, device=device))
        return losses[batch.real].mean(), batch.tokens.numel()
