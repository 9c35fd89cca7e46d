"""Codes that are chosen for what a layer is given, one input after another (GPTQ, arXiv 2210.17323).

The error of a rounded weight is taken back by those that are not rounded yet, as far as their inputs go together in the
text that a model reads. Scales and codes are stored as those of the nearest rounding are; only the choice differs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from slipstream.kernels.quantization import Codes, Precision, quantize

DAMPING = 0.01
"""What is added to the products of every input with itself, as a part of their mean: text never shows all there is."""


def spreading(products: Tensor) -> Tensor:
    """How an input's error is taken back by later ones: the upper factor (inputs, inputs) of the inverse of their
    `products`, the sum of x x^T over the tokens of a text."""
    full, diagonal = products.clone(), products.diagonal()
    full.diagonal().add_(DAMPING * float(diagonal.mean()) + (diagonal == 0).to(full.dtype))
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(full))
    return torch.linalg.cholesky(inverse, upper=True)


@torch.no_grad()
def quantize_for(weight: Tensor, precision: Precision, factor: Tensor) -> Codes:
    """Quantize a weight (features, inputs) group by group, with a `factor` by which errors spread."""
    left = pad(weight.float(), (0, -weight.shape[1] % precision.group))
    factor = _filled(factor, left.shape[1])
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
    """The codes (features, inputs) of a group, whose weights change on the way, and the errors that spread from it."""
    codes, errors = torch.empty(group.shape, dtype=torch.uint8), torch.empty_like(group)
    inverse = torch.where(scale == 0, 0, 1 / scale)[:, 0]
    for place in range(group.shape[1]):
        number = (group[:, place] * inverse).round().clamp_(-middle, middle - 1)
        errors[:, place] = (group[:, place] - number * scale[:, 0]) / factor[place, place]
        group[:, place + 1 :] -= errors[:, place, None] * factor[place, place + 1 :]
        codes[:, place] = (number + middle).to(torch.uint8)
    return codes, errors


def _filled(factor: Tensor, size: int) -> Tensor:
    """The factor for inputs that fill up the last group: they are zero, and take nothing back."""
    more = size - len(factor)
    return torch.block_diag(factor, torch.eye(more)) if more else factor
