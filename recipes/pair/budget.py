"""Training against the clock: schedules follow elapsed time, so a run ends when promised."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from slipstream.files import whole

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SAVE_EVERY = 120.0
WARMUP = 0.02
DECAY = 0.40
SEED = 20
# (fraction of the time, learning-rate factor for the step) -> loss of one batch
LossOf = Callable[[float, np.random.Generator], tuple[torch.Tensor, int]]


class Interrupted(Exception):
    """The run was stopped by the user after its state was saved."""


@dataclass
class Progress:
    """How far a run is: what a resumed run continues from."""

    elapsed: float = 0.0
    steps: int = 0
    tokens: int = 0


def bf16() -> torch.autocast:
    """Mixed precision on whichever device is in use."""
    return torch.autocast(DEVICE.type, torch.bfloat16)


def rate(fraction: float) -> float:
    """Learning-rate factor: a short warmup, flat, then linear to zero."""
    return max(0.0, min(1.0, fraction / WARMUP, (1.0 - fraction) / DECAY))


def optimizers(model: nn.Module, muon: float, adam: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for the embedding and the norms."""
    named = list(model.named_parameters())
    matrices = [p for n, p in named if p.ndim == 2 and "layers" in n]
    others = [p for n, p in named if not (p.ndim == 2 and "layers" in n)]
    return [
        torch.optim.Muon(matrices, lr=muon, weight_decay=0.05),
        torch.optim.AdamW(others, lr=adam, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def clock(name: str, seconds: float, elapsed: float) -> tqdm:
    """A progress bar that counts seconds of the budget."""
    form = "{desc} {percentage:3.0f}% |{bar}| {n}/{total} s{postfix}"
    return tqdm(total=round(seconds), initial=min(round(seconds), round(elapsed)), desc=name, bar_format=form)


def advance(bar: tqdm, elapsed: float, **shown: object) -> None:
    """Move the bar to the time used so far."""
    bar.update(min(bar.total, round(elapsed)) - bar.n)
    bar.set_postfix(shown)


class TimedRun:
    """Optimises a model for a number of minutes, saving its state now and then."""

    def __init__(
        self,
        model: nn.Module,
        optims: list[torch.optim.Optimizer],
        minutes: float,
        file: Path,
    ) -> None:
        self.model = model
        self.optims = optims
        self.seconds = minutes * 60.0
        self.file = file
        self.progress = Progress()
        self.base = [[group["lr"] for group in optim.param_groups] for optim in optims]
        if file.exists():
            self._load()

    def fit(self, loss_of: LossOf) -> Progress:
        """Step until the time is used up; Ctrl-C saves and raises ``Interrupted``."""
        saved = self.progress.elapsed
        bar = clock(self.file.stem, self.seconds, saved)
        try:
            with bar:
                while self.progress.elapsed < self.seconds:
                    self._timed_step(loss_of, bar)
                    if self.progress.elapsed - saved > SAVE_EVERY:
                        self.save()
                        saved = self.progress.elapsed
        except KeyboardInterrupt:
            self.save()
            raise Interrupted(f"{self.file.stem} stopped at {bar.n} of {bar.total} s") from None
        self.save()
        return self.progress

    def _timed_step(self, loss_of: LossOf, bar: tqdm) -> None:
        began = time.perf_counter()
        progress = self.progress
        fraction = progress.elapsed / self.seconds
        # Seeding by step keeps a resumed run on the data it would have seen.
        rng = np.random.default_rng([SEED, progress.steps])
        loss, tokens = loss_of(fraction, rng)
        self._apply(loss, rate(fraction))
        value = loss.item()
        took = time.perf_counter() - began
        progress.elapsed += took
        progress.steps += 1
        progress.tokens += tokens
        advance(bar, progress.elapsed, loss=f"{value:.3f}", tokens_s=round(tokens / took), step=progress.steps)

    def _apply(self, loss: torch.Tensor, factor: float) -> None:
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optim, bases in zip(self.optims, self.base, strict=True):
            for group, base in zip(optim.param_groups, bases, strict=True):
                group["lr"] = base * factor
            optim.step()
            optim.zero_grad(set_to_none=True)

    def save(self) -> None:
        """Write the state beside the old one and swap: a kill never leaves half a file."""
        state = {
            "model": self.model.state_dict(),
            "optims": [optim.state_dict() for optim in self.optims],
            "progress": vars(self.progress),
        }
        with whole(self.file) as part:
            torch.save(state, part)

    def _load(self) -> None:
        state = torch.load(self.file, map_location=DEVICE, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optim, saved in zip(self.optims, state["optims"], strict=True):
            optim.load_state_dict(saved)
        self.progress = Progress(**state["progress"])
