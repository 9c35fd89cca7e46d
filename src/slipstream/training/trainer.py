"""`Trainer`, which trains a model on a loss: schedule, clipping, optimizers, progress, and a state for resuming."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from slipstream.files import TensorFileKind, load_tensors, save_tensors
from slipstream.text.jsontext import json_text

KIND = TensorFileKind(
    "state of a training", "slipstream training", "1", "delete it, or give another place, to begin again"
)


@dataclass(frozen=True)
class Progress:
    """The progress of a training: the number of steps taken, their seconds, and the tokens they read."""

    steps: int = 0
    seconds: float = 0.0
    tokens: int = 0


class Budget(Protocol):
    """The length of a training, and how often its state is saved."""

    def used(self, progress: Progress) -> float:
        """Return the share of the budget that is used; at 1 the training ends."""

    def saves(self, progress: Progress) -> int:
        """Return how many times the state should have been saved by now."""


@dataclass(frozen=True)
class Steps:
    """A budget of `total` steps; the state is saved after every `save_every` of them."""

    total: int
    save_every: int

    def used(self, progress: Progress) -> float:
        return progress.steps / self.total

    def saves(self, progress: Progress) -> int:
        return progress.steps // self.save_every


Loss = Callable[[int, float], tuple[Tensor, int]]
"""A function (step from 0, share of the budget used) -> the loss of that step's batch, and the tokens it reads.

It should depend on the step and a seed alone: then an interrupted and resumed training ends with the same weights.
"""

Schedule = Callable[[int, float], float]
"""A function (step from 0, share of the budget used) -> the factor of every learning rate in that step."""

Watch = Callable[[Progress, float], object]  # a function (progress, loss) that is called after every step


class Diverged(FloatingPointError):
    """Raised when a training cannot go on, since its loss or gradient is not finite."""


class Checkpoint:
    """The file with the state of a training, and the `settings` (for JSON) of that training."""

    def __init__(self, file: Path, settings: Mapping[str, Any] | None = None) -> None:
        self.file, self.settings = file, dict(settings or {})

    def save(self, tensors: Mapping[str, Tensor], progress: Progress) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        about = {"settings": json_text(self.settings), "progress": json_text(asdict(progress))}
        save_tensors(self.file, KIND, {name: one.detach().cpu().contiguous() for name, one in tensors.items()}, about)

    def load(self) -> tuple[dict[str, Tensor], Progress] | None:
        if not self.file.exists():
            return None
        tensors, about = load_tensors(self.file, KIND)
        saved = json.loads(about["settings"])
        ours = json.loads(json_text(self.settings))  # as JSON gives them back: tuples are lists
        differ = [name for name in ours if name not in saved or ours[name] != saved[name]]
        if differ:
            raise ValueError(
                f"{self.file} belongs to a training with another {', '.join(differ)}: "
                "give the same settings to resume it, or another folder."
            )
        return tensors, Progress(**json.loads(about["progress"]))


class Trainer:
    """Trains a model for a budget. `train` resumes after an interruption, also in a new process."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        schedule: Schedule,
        budget: Budget,
        checkpoint: Checkpoint,
    ) -> None:
        """Resume the training from its checkpoint, if there is one.

        `schedule` multiplies the optimizers' learning rates. Weights of the model that require no gradient stay as they
        are, and are not saved. Raises ValueError if the checkpoint belongs to another training.
        """
        self.model, self.optimizers = model, list(optimizers)
        self.schedule, self.budget, self.checkpoint = schedule, budget, checkpoint
        self.progress = Progress()
        self._rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in self.optimizers]
        if (state := checkpoint.load()) is None:
            return
        tensors, self.progress = state
        with torch.no_grad():
            for name, weight in self._trained():
                weight.copy_(tensors[f"model.{name}"])
        states: list[dict[int, dict[str, Tensor]]] = [{} for _ in self.optimizers]
        for name, value in tensors.items():
            if name.startswith("optimizer."):
                _, number, place, key = name.split(".")
                states[int(number)].setdefault(int(place), {})[key] = value
        for optimizer, known in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict({"state": known, "param_groups": optimizer.state_dict()["param_groups"]})

    def train(self, loss_of: Loss, watch: Watch = lambda progress, loss: None) -> Progress:
        """Take the steps that are left in the budget. If interrupted, as by Ctrl-C, it saves its state first.

        At the end of the budget the caller has to call `save`, perhaps after examining the model. Raises `Diverged`,
        and saves nothing, if a loss or its gradient is not finite, since resuming would end there again.
        """
        try:
            while (used := self.budget.used(self.progress)) < 1:
                saves = self.budget.saves(self.progress)
                loss = self._step(loss_of, used)
                watch(self.progress, loss)
                if self.budget.saves(self.progress) > saves:
                    self.save()
        except FloatingPointError:
            raise
        except BaseException:
            self.save()
            raise
        return self.progress

    def save(self) -> None:
        tensors = {f"model.{name}": weight for name, weight in self._trained()}
        for number, optimizer in enumerate(self.optimizers):
            for place, state in optimizer.state_dict()["state"].items():
                tensors |= {f"optimizer.{number}.{place}.{name}": value for name, value in state.items()}
        self.checkpoint.save(tensors, self.progress)

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, weight) for name, weight in self.model.named_parameters() if weight.requires_grad]

    def _step(self, loss_of: Loss, used: float) -> float:
        began, weights = perf_counter(), [weight for _, weight in self._trained()]
        loss, tokens = loss_of(self.progress.steps, used)
        loss.backward(inputs=weights)  # other models in the loss get no gradient
        steepness = nn.utils.clip_grad_norm_(weights, 1.0)
        if not torch.isfinite(loss.detach() + steepness):
            fault = f"its loss is {loss.item():g} and the length of its gradient {steepness.item():g}"
            raise Diverged(
                f"the training diverged after {self.progress.steps} steps: {fault}. "
                "Give a lower learning rate, and another place to begin again."
            )
        factor = self.schedule(self.progress.steps, used)
        for optimizer, rates in zip(self.optimizers, self._rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        value = loss.item()  # waits for the device, so the time below is that of the whole step
        done = self.progress
        self.progress = replace(
            done, steps=done.steps + 1, seconds=done.seconds + perf_counter() - began, tokens=done.tokens + tokens
        )
        return value


def muon_and_adam(model: nn.Module, muon: float, adam: float) -> list[torch.optim.Optimizer]:
    """Make optimizers of a model's trainable weights: Muon for matrices inside layers, AdamW for all others.
    `muon` and `adam` are their learning rates. An optimizer without weights is left out."""
    matrices: list[Tensor] = []
    others: list[Tensor] = []
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            layered = any(part.isdecimal() for part in name.split("."))
            (matrices if layered and weight.ndim == 2 else others).append(weight)
    optimizers: list[torch.optim.Optimizer] = []
    if matrices:
        optimizers.append(torch.optim.Muon(matrices, lr=muon, weight_decay=0.05))
    if others:
        optimizers.append(torch.optim.AdamW(others, lr=adam, betas=(0.9, 0.95), weight_decay=0.0))
    return optimizers


def trapezoid(warm_up: float, decay: float, first: float = 0.0) -> Schedule:
    """Return a schedule that rises from the factor `first` over the share `warm_up` of the budget, and stays at 1.
    Over the last share `decay` it falls linearly to 0."""

    def factor(step: int, used: float) -> float:
        return max(0.0, min(1.0, first + used / warm_up, (1.0 - used) / decay))

    return factor
