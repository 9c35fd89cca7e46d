"""Recurrences of linear attention and state space layers over few tokens, and short convolutions, by our kernel.

Tokens are processed one after the other, so the results for a token have the same bits however many are read in one
pass. Outputs and the state after the tokens are computed separately: it is known only later how much of a draft is
accepted, so a state written in the pass would often be wasted. All recurrences are computed in float32.
"""

import torch
from torch import Tensor

FEW = 64  # the most tokens for which one after the other is faster than chunks, whose products grow with their square


def gated_delta_rule(
    queries: Tensor | None, keys: Tensor, values: Tensor, decays: Tensor, strengths: Tensor, state: Tensor
) -> Tensor:
    """Compute the gated delta rule (equation 10 of arXiv 2412.06464), over queries and keys of length 1.

    Queries and keys (rows, n, heads or fewer, size), values (rows, n, heads, width), log decays and strengths (rows, n,
    heads), and the state before them (rows, heads, size, width), all in float32 -> outputs (rows, n, heads, width);
    without queries, the state after the tokens. Queries and keys are normalized to length 1 here, and outputs divided
    by the square root of the size.
    """
    asked = None if queries is None else _dense(queries)
    return torch.ops.slipstream.gated_delta_rule(
        asked, _dense(keys), _dense(values), decays, strengths, state.contiguous()
    )


def state_space(
    inputs: Tensor,
    steps: Tensor,
    decays: Tensor,
    into: Tensor,
    out_of: Tensor | None,
    skip: Tensor | None,
    state: Tensor,
) -> Tensor:
    """Compute the recurrence of Mamba-2 (arXiv 2405.21060).

    Inputs x (rows, n, heads, width), steps d and d A (rows, n, heads), B and C (rows, n, heads or fewer, size), D
    (heads,), and the state before them (rows, heads, width, size), all in float32 -> outputs (rows, n, heads, width);
    without C, the state after the tokens.
    """
    asked = None if out_of is None else _dense(out_of)
    return torch.ops.slipstream.state_space(
        _dense(inputs), steps, decays, _dense(into), asked, skip, state.contiguous()
    )


def short_convolution(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Convolve each channel of inputs (rows, channels, places) by itself, at the places where all taps have an input.

    The weight is (channels, taps), the result (rows, channels, places - taps + 1). In memory the channels of a place
    are contiguous.
    """
    outputs: Tensor = torch.ops.slipstream.short_convolution(inputs, weight.contiguous(), bias)
    return outputs.mT


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def samples() -> list[tuple[Tensor, Tensor]]:
    """Run every kernel on two tokens -> pairs of its result and the expected one."""
    generator = torch.Generator().manual_seed(0)
    left, right, state = (torch.randn(*shape, generator=generator) for shape in ((2, 40), (2, 50), (40, 50)))
    tokens, values = left[None, :, None], right[None, :, None]
    decays, strengths = torch.tensor([-0.5, -0.1]).view(1, 2, 1), torch.tensor([0.3, 0.8]).view(1, 2, 1)
    keys, before, delta, space = left / (left.square().sum(-1, keepdim=True) + 1e-6).sqrt(), state, [], []
    for key, value, decay, strength in zip(keys, right, decays.flatten(), strengths.flatten(), strict=True):
        before = before * decay.exp()
        before = before + torch.outer(key, strength * (value - key @ before))
        delta.append(key @ before / 40**0.5)
    summed = state
    for inputs, into, decay, step in zip(left, right, decays.flatten(), strengths.flatten(), strict=True):
        summed = summed * decay.exp() + torch.outer(step * inputs, into)
        space.append(summed @ into + inputs)
    whole, taps = state[None, None], left.T
    return [
        (gated_delta_rule(tokens, tokens, values, decays, strengths, whole)[0, :, 0], torch.stack(delta)),
        (gated_delta_rule(None, tokens, values, decays, strengths, whole)[0, 0], before),
        (state_space(tokens, strengths, decays, values, values, torch.ones(1), whole)[0, :, 0], torch.stack(space)),
        (state_space(tokens, strengths, decays, values, None, None, whole)[0, 0], summed),
        (short_convolution(state[None], taps, None)[0], state[:, :-1] * taps[:, :1] + state[:, 1:] * taps[:, 1:]),
    ]
