"""Trains a model on a budget of tokens or seconds; the learning rate follows the share of the budget that is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from slipstream.training.trainer import Budget, Checkpoint, Progress, Trainer, trapezoid

from . import ranks

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WARMUP, DECAY = 0.02, 0.40  # the shares of the budget in which the learning rate rises and falls
SEED = 20
LossOf = Callable[[float, np.random.Generator], tuple[torch.Tensor, int]]
"""A function of the share of the budget used and the step's random generator that returns the loss of one batch and
its number of tokens."""


class Interrupted(Exception):
    """Raised when the user has stopped the run, after its state was saved."""


def bf16() -> torch.autocast:
    """Return a context of mixed precision in bfloat16 on the device in use."""
    return torch.autocast(DEVICE.type, torch.bfloat16)


@dataclass(frozen=True)
class Tokens:
    """A budget of training tokens, which ends at the same step in every process of a training."""

    total: int
    save_every: int = 1_000_000

    def used(self, progress: Progress) -> float:
        """Return the share of the budget that has been used."""
        return progress.tokens / self.total

    def saves(self, progress: Progress) -> int:
        """Return how many times `save_every` tokens have been read."""
        return progress.tokens // self.save_every


@dataclass(frozen=True)
class Seconds:
    """A budget of seconds spent in steps, so that a training ends on time."""

    total: float
    save_every: float = 120.0

    def used(self, progress: Progress) -> float:
        """Return the share of the budget that has been used."""
        return progress.seconds / self.total

    def saves(self, progress: Progress) -> int:
        """Return how many times `save_every` seconds have passed."""
        return int(progress.seconds / self.save_every)


class _SavedElsewhere(Checkpoint):
    """The checkpoint of another process, which is read to resume and never written."""

    def save(self, tensors: Mapping[str, torch.Tensor], progress: Progress) -> None:
        """Do nothing: the first process saves the state, which is the same in all of them."""


def train(
    model: nn.Module, optims: list[torch.optim.Optimizer], budget: Budget, file: Path, loss_of: LossOf
) -> Progress:
    """Train a model on a budget, or resume from the state in `file`; Ctrl-C saves it and raises ``Interrupted``.

    Among several processes (``ranks.together``), each computes the loss of its own batches, and all take the same
    steps. The first one shows the progress and saves the state.
    """
    checkpoint = (Checkpoint if ranks.first() else _SavedElsewhere)(file)
    trainer = Trainer(model, optims, trapezoid(WARMUP, DECAY), budget, checkpoint)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    ranks.share(weights)

    def seeded(step: int, used: float) -> tuple[torch.Tensor, int]:
        # The seed depends on the step and the process alone, so a resumed run reads the same data.
        loss, tokens = loss_of(used, np.random.default_rng([SEED, step, ranks.number()]))
        return ranks.averaged(loss, weights), ranks.total(tokens)

    def watch(progress: Progress, loss: float) -> None:
        pace = round((progress.tokens - begun.tokens) / (progress.seconds - begun.seconds))
        bar.update(round(1000 * min(1.0, budget.used(progress))) - bar.n)
        bar.set_postfix(loss=f"{loss:.3f}", tokens_s=pace, step=progress.steps)

    begun = trainer.progress
    form = "{desc} {percentage:5.1f}% |{bar}| {elapsed}{postfix}"
    at = round(1000 * min(1.0, budget.used(begun)))
    try:
        with tqdm(
            total=1000, initial=at, desc=file.stem, bar_format=form, disable=not ranks.first(), mininterval=2
        ) as bar:
            trainer.train(seeded, watch)
    except KeyboardInterrupt:
        raise Interrupted(f"{file.stem} stopped after {trainer.progress.tokens:,} tokens") from None
    trainer.save()
    return trainer.progress
