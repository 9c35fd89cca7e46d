"""Choosing codes for the inputs that a layer receives in a text, one input after another (GPTQ, arXiv 2210.17323).

The error of a rounded weight is compensated by those that are not rounded yet, as far as their inputs are correlated in
the text that a model reads. Scales and codes are stored as with nearest rounding; only the choice differs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from slipstream.kernels.quantization import Codes, Precision, quantize

ALGORITHM = 1
"""The version of the codes that come out, which changes with this file and with `models/calibration`: codes that were
kept by another version are chosen again."""
DAMPING = 0.01
"""The number added to each input's product with itself, as a part of their mean, since no text shows all inputs."""


def spreading(products: Tensor) -> Tensor:
    """Return the factor (inputs, inputs) by which later inputs compensate the errors of earlier ones.

    It is the upper Cholesky factor of the inverse of `products`, the sum of x x^T over the tokens of a text.
    """
    full, diagonal = products.clone(), products.diagonal()
    full.diagonal().add_(DAMPING * float(diagonal.mean()) + (diagonal == 0).to(full.dtype))
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(full))
    return torch.linalg.cholesky(inverse, upper=True)


@torch.no_grad()
def quantize_for(weight: Tensor, precision: Precision, factor: Tensor) -> Codes:
    """Quantize a weight (features, inputs) group by group, with the `factor` of `spreading`."""
    left = pad(weight.float(), (0, -weight.shape[1] % precision.group))
    if more := left.shape[1] - len(factor):  # inputs that fill up the last group are zero, and compensate nothing
        factor = torch.block_diag(factor, torch.eye(more))
    parts, scales = list[Tensor](), list[Tensor]()
    for start in range(0, left.shape[1], precision.group):
        end = start + precision.group
        inside, group = factor[start:end, start:end], left[:, start:end].clone()
        scale = quantize(group, precision).scales
        codes, errors = _rounded(group, scale.float(), inside, precision.middle)
        left[:, end:] -= errors @ factor[start:end, end:]
        parts, scales = [*parts, codes], [*scales, scale]
    return Codes(precision, torch.cat(parts, 1), torch.cat(scales, 1))


def _rounded(group: Tensor, scale: Tensor, factor: Tensor, middle: int) -> tuple[Tensor, Tensor]:
    """Return the codes (features, inputs) of a `group`, which is changed, and the errors that later ones compensate."""
    codes, errors = torch.empty(group.shape, dtype=torch.uint8), torch.empty_like(group)
    inverse = torch.where(scale == 0, 0, 1 / scale)[:, 0]
    for place in range(group.shape[1]):
        number = (group[:, place] * inverse).round().clamp_(-middle, middle - 1)
        errors[:, place] = (group[:, place] - number * scale[:, 0]) / factor[place, place]
        group[:, place + 1 :] -= errors[:, place, None] * factor[place, place + 1 :]
        codes[:, place] = (number + middle).to(torch.uint8)
    return codes, errors
