"""The optimizers and the learning-rate schedule that all trainings of whole networks share."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from slipstream.training.trainer import Schedule


def muon_and_adam(model: nn.Module, muon: float, adam: float) -> list[torch.optim.Optimizer]:
    """Make optimizers of a model's trainable weights: Muon for matrices inside layers, AdamW for all others.

    `muon` and `adam` are their learning rates. An optimizer without weights is left out.
    """
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

    Over the last share `decay` it falls linearly to 0.
    """

    def factor(step: int, used: float) -> float:
        return max(0.0, min(1.0, first + used / warm_up, (1.0 - used) / decay))

    return factor
