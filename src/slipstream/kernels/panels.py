"""The layout of weights that the kernels read: panels of features, with the inputs one after the other in memory."""

from __future__ import annotations

import torch
from torch import Tensor

PANEL = 32  # features that lie side by side; lanes.h has the same number
STEP = {torch.float32: 1, torch.bfloat16: 2}  # inputs of a feature that lie side by side


def fits_panels(weight: Tensor) -> bool:
    """Whether `into_panels` accepts a weight: float32, or bfloat16 with an even number of inputs."""
    return weight.dtype in STEP and weight.shape[1] % STEP[weight.dtype] == 0


def panel_bytes(weight: Tensor) -> int:
    return -(-weight.shape[0] // PANEL) * PANEL * weight.shape[1] * weight.element_size()


def into_panels(weight: Tensor) -> Tensor:
    """Reorder (features, inputs) -> (panels, inputs / STEP, PANEL, STEP), with the last panel filled up with zeros."""
    features, inputs = weight.shape
    if not fits_panels(weight):
        raise ValueError(f"a weight of {features} x {inputs} in {weight.dtype} has no packed form.")
    step = STEP[weight.dtype]
    full = torch.nn.functional.pad(weight, (0, 0, 0, -features % PANEL))
    return full.view(-1, PANEL, inputs // step, step).permute(0, 2, 1, 3).contiguous()
