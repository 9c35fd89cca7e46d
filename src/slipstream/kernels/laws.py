"""Computations of a round on laws over a whole vocabulary, by our kernel: each in one reading, without copies.

The kernel serves float32 on CPUs once it is loaded, as it is for packed weights; `laws_fit` tells whether it does, and
`greatest` chooses by itself. A position's results do not depend on other rows and positions.
"""

import torch
from torch import Tensor

from slipstream.core.law import wide

LOGITS_DTYPES = (torch.float32, torch.bfloat16)  # the data types of logits whose greatest the kernel finds


def laws_fit(*laws: Tensor) -> bool:
    """Whether the kernel is loaded and takes these laws or logits (rows, positions, vocab)."""
    return hasattr(torch.ops.slipstream, "overlap") and all(
        law.dtype == torch.float32 and law.device.type == "cpu" and law.stride(-1) == 1 for law in laws
    )


def overlap(p: Tensor, q: Tensor) -> Tensor:
    """Return sum_v min(p(v), q(v)) (rows, n) of laws p (rows, n or more, vocab) and q (rows, n, vocab)."""
    return torch.ops.slipstream.overlap(p, q)


def block_tests(p: Tensor, q: Tensor, tokens: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the tests of block verification for `lengths` (rows,) of tokens (rows, n), drafted by q (rows, n, vocab).

    Returns b_0..b_n (rows, n + 1) and the weights (rows, n, 2) of the coins for "the first i stand" and "they do not",
    in float64, and sum_v min(p(v), q(v)) (rows, n) in float32. At positions after
    the end of a row's draft the coin always says "they do not".
    """
    return torch.ops.slipstream.block_tests(p, q, tokens.contiguous(), lengths)


def following(p: Tensor, q: Tensor, accepted: Tensor, refused: Tensor, weights: Tensor) -> Tensor:
    """Return the law (rows, 1, vocab) after `accepted` (rows,) tokens of a draft with the law q (rows, n, vocab).

    It is p there, or in rows that are `refused` (rows,) the residual norm(max(w p - q, 0)) with weights w (rows,) in
    float64, and p again where the residual is nothing.
    """
    return torch.ops.slipstream.following(p, q, accepted, refused, weights.contiguous())


def greatest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the greatest of the logits (rows, n, vocab) and the first index with it, both (rows, n).

    It is NaN if any of them is, and in float32, or in float64 for such logits. On a CPU our kernel does it, once it is
    loaded.
    """
    if logits.device.type == "cpu" and logits.dtype in LOGITS_DTYPES and hasattr(torch.ops.slipstream, "greatest"):
        return torch.ops.slipstream.greatest(logits)
    return wide(logits).max(-1)


def samples() -> list[tuple[Tensor, Tensor]]:
    """Run every kernel on two small laws -> pairs of its result and the expected one."""
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.randn(1, count, 77, generator=generator).softmax(-1) for count in (3, 2))
    weights, (accepted, refused) = torch.tensor([[0.7, 0.4]]).double(), (torch.tensor([1]), torch.tensor([True]))
    rest = (0.4 * p[:, 1] - q[:, 1]).clamp(min=0)
    values, indices = greatest(p)
    tokens = torch.tensor([[3, 5]])
    survival, coins, _ = block_tests(p, q, tokens, torch.tensor([2]))
    ratios = (p[:, :2] / q).gather(-1, tokens[..., None])[..., 0]
    first = ratios[:, 0].clamp(max=1)
    second = (first * ratios[:, 1]).clamp(max=1)
    left = (first * p[:, 1] - q[:, 1]).clamp(min=0).sum(-1)
    chance = torch.tensor([0.6, 0.2]).double()
    return [
        (overlap(p, q), torch.minimum(p[:, :2], q).sum(-1)),
        (following(p, q, accepted, refused, weights[:, 1])[0], rest / rest.sum()),
        (values, p.amax(-1)),
        (indices, p.argmax(-1)),
        (survival, torch.stack([torch.ones(1), first, second], -1)),
        (coins, torch.stack([left, 1 - first, second, 1 - second], -1).view(1, 2, 2)),
        (torch.ops.slipstream.inverse(q[0], chance), (q[0].cumsum(-1) <= chance[:, None]).sum(-1)),
    ]
