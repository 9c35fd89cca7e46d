"""Training for a given time: schedules follow elapsed time, so that a run ends on time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from slipstream.training.optimizers import trapezoid
from slipstream.training.trainer import Checkpoint, Progress, Seconds, Trainer

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WARMUP = 0.02
DECAY = 0.40
SEED = 20
# (fraction of the time, random numbers of the step) -> loss of one batch, and its tokens
LossOf = Callable[[float, np.random.Generator], tuple[torch.Tensor, int]]


class Interrupted(Exception):
    """Raised when the user has stopped the run, after its state was saved."""


def bf16() -> torch.autocast:
    """Return a context of mixed precision in bfloat16 on the device in use."""
    return torch.autocast(DEVICE.type, torch.bfloat16)


def clock(name: str, seconds: float, elapsed: float) -> tqdm:
    """Return a progress bar that counts seconds of the budget."""
    form = "{desc} {percentage:3.0f}% |{bar}| {n}/{total} s{postfix}"
    return tqdm(total=round(seconds), initial=min(round(seconds), round(elapsed)), desc=name, bar_format=form)


def advance(bar: tqdm, elapsed: float, **shown: object) -> None:
    """Move the bar to the time used so far."""
    bar.update(min(bar.total, round(elapsed)) - bar.n)
    bar.set_postfix(shown)


def train(
    model: nn.Module, optims: list[torch.optim.Optimizer], minutes: float, file: Path, loss_of: LossOf
) -> Progress:
    """Train a model for a number of minutes, with its state in `file`; Ctrl-C saves and raises ``Interrupted``."""
    trainer = Trainer(model, optims, trapezoid(WARMUP, DECAY), Seconds(60.0 * minutes), Checkpoint(file))

    def seeded(step: int, used: float) -> tuple[torch.Tensor, int]:
        # The seed depends on the step alone, so a resumed run reads the same data.
        return loss_of(used, np.random.default_rng([SEED, step]))

    def watch(progress: Progress, loss: float) -> None:
        pace = round(progress.tokens / progress.seconds)
        advance(bar, progress.seconds, loss=f"{loss:.3f}", tokens_s=pace, step=progress.steps)

    try:
        with clock(file.stem, 60.0 * minutes, trainer.progress.seconds) as bar:
            trainer.train(seeded, watch)
    except KeyboardInterrupt:
        raise Interrupted(f"{file.stem} stopped at {bar.n} of {bar.total} s") from None
    trainer.save()
    return trainer.progress
