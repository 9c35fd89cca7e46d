"""What a round asks of laws over a whole vocabulary, by our kernel: each in one reading, without copies.

The kernel serves float32 on CPUs once it is loaded, as it is for packed weights; `laws_fit` tells whether it does. A
position's results do not depend on the rows and positions beside it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def laws_fit(*laws: Tensor) -> bool:
    """Whether the kernel is loaded and takes these laws or logits (rows, positions, vocab)."""
    return hasattr(torch.ops.slipstream, "overlap") and all(
        law.dtype == torch.float32 and law.device.type == "cpu" and law.stride(-1) == 1 for law in laws
    )


def overlap(p: Tensor, q: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Compare laws p and q (rows, n, vocab) with weights w (rows, n) in float64.

    Returns sum_v min(p(v), q(v)) in float32 and sum_v max(w p(v) - q(v), 0) in float64, both (rows, n).
    """
    found: tuple[Tensor, Tensor] = torch.ops.slipstream.overlap(p, q, weights.contiguous())
    return found


def following(p: Tensor, q: Tensor, accepted: Tensor, refused: Tensor, weights: Tensor) -> Tensor:
    """Return the law (rows, 1, vocab) after `accepted` (rows,) tokens of a draft with the law q (rows, n, vocab).

    It is p there, or in rows that are `refused` (rows,) the residual norm(max(w p - q, 0)) with weights w (rows,) in
    float64, and p again where the residual is nothing.
    """
    found: Tensor = torch.ops.slipstream.following(p, q, accepted, refused, weights.contiguous())
    return found


def greatest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the greatest of the logits (rows, n, vocab) in float32, and the first index with it, both (rows, n).

    It is NaN if any of them is.
    """
    found: tuple[Tensor, Tensor] = torch.ops.slipstream.greatest(logits)
    return found


# ---- registration and the check of the kernels ----------------------------------------------------------------------


def register_shapes() -> None:
    """Register the shapes of the kernels' results with torch, for graphs."""
    shapes: dict[str, Callable[..., object]] = {
        "overlap": lambda p, q, weights: (q.new_empty(q.shape[:2]), q.new_empty(q.shape[:2], dtype=torch.float64)),
        "following": lambda p, *_: p.new_empty((p.shape[0], 1, p.shape[2])),
        "greatest": lambda logits: (
            logits.new_empty(logits.shape[:2], dtype=torch.float32),
            logits.new_empty(logits.shape[:2], dtype=torch.long),
        ),
    }
    for name, shape in shapes.items():
        torch.library.register_fake(f"slipstream::{name}", shape, allow_override=True)


def samples() -> list[tuple[Tensor, Tensor]]:
    """Run every kernel on two small laws -> pairs of its result and the expected one."""
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.randn(1, count, 77, generator=generator).softmax(-1) for count in (3, 2))
    weights, (accepted, refused) = torch.tensor([[0.7, 0.4]]).double(), (torch.tensor([1]), torch.tensor([True]))
    shared, excess = overlap(p, q, weights)
    rest = (0.4 * p[:, 1] - q[:, 1]).clamp(min=0)
    values, indices = greatest(p)
    return [
        (shared, torch.minimum(p[:, :2], q).sum(-1)),
        (excess, (weights[..., None] * p[:, :2] - q).clamp(min=0).sum(-1)),
        (following(p, q, accepted, refused, weights[:, 1])[0], rest / rest.sum()),
        (values, p.amax(-1)),
        (indices, p.argmax(-1)),
    ]
