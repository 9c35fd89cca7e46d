"""Recurrences by our kernel: those of transformers, and the same bits for a token however many stand beside it."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv1d
from transformers.models.nemotron_h import modeling_nemotron_h as mamba
from transformers.models.qwen3_next import modeling_qwen3_next as delta

from slipstream.kernels.recurrences import gated_delta_rule, short_convolution, state_space
from toys.kernels import needs_kernel, noise

pytestmark = needs_kernel
CLOSE = {"atol": 2e-5, "rtol": 2e-5}


# rows, tokens, heads of keys, heads, size of keys, size of values
DELTAS = [(1, 1, 1, 1, 1, 1), (1, 6, 2, 4, 128, 128), (3, 5, 2, 2, 24, 70), (2, 64, 1, 3, 16, 8)]


def deltas(case: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Queries, keys and values as models make them (parts of wider tensors), decays, strengths, and a state."""
    rows, tokens, groups, heads, size, width = case
    mixed = noise(rows, tokens, 2 * groups * size + heads * width, seed=0)
    queries, keys, values = mixed.split([groups * size, groups * size, heads * width], -1)
    shaped = [part.reshape(rows, tokens, -1, last) for part, last in ((queries, size), (keys, size), (values, width))]
    decays, strengths = -noise(rows, tokens, heads, seed=1).exp(), noise(rows, tokens, heads, seed=2).sigmoid()
    return *shaped, decays, strengths, noise(rows, heads, size, width, seed=3)


@pytest.mark.parametrize("case", DELTAS)
def test_the_gated_delta_rule_is_that_of_transformers(case: tuple[int, ...]) -> None:
    queries, keys, values, decays, strengths, state = deltas(case)
    shared = case[3] // case[2]  # heads that have the same queries and keys, which older versions leave to the caller
    wanted, end = delta.torch_recurrent_gated_delta_rule(
        queries.repeat_interleave(shared, 2),
        keys.repeat_interleave(shared, 2),
        values,
        g=decays,
        beta=strengths,
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    found = gated_delta_rule(queries, keys, values, decays, strengths, state)
    torch.testing.assert_close(found, wanted, **CLOSE)
    torch.testing.assert_close(gated_delta_rule(None, keys, values, decays, strengths, state), end, **CLOSE)


@pytest.mark.parametrize("case", DELTAS[1:3])
def test_a_token_of_the_delta_rule_has_the_same_bits_whatever_stands_beside_it(case: tuple[int, ...]) -> None:
    *inputs, state = deltas(case)
    whole = gated_delta_rule(*inputs, state)
    for token in range(case[1]):
        one = [part[:, token : token + 1] for part in inputs]
        assert torch.equal(gated_delta_rule(*one, state), whole[:, token : token + 1])
        alone = gated_delta_rule(*(part[-1:] for part in one), state[-1:])
        assert torch.equal(alone, whole[-1:, token : token + 1])
        state = gated_delta_rule(None, *one[1:], state)
    assert torch.equal(state, gated_delta_rule(None, *inputs[1:], deltas(case)[-1]))


# rows, tokens, groups, heads, size of heads, size of states
SPACES = [(1, 1, 1, 1, 1, 1), (1, 6, 2, 4, 64, 128), (3, 5, 1, 2, 10, 20)]


def spaces(case: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Inputs, steps, what they are multiplied with, what goes in and out, what skips the state, and a state."""
    rows, tokens, groups, heads, width, size = case
    mixed = noise(rows, tokens, heads * width + 2 * groups * size, seed=0)
    inputs, into, out_of = mixed.split([heads * width, groups * size, groups * size], -1)
    shaped = [part.reshape(rows, tokens, -1, last) for part, last in ((inputs, width), (into, size), (out_of, size))]
    steps, pace = noise(rows, tokens, heads, seed=1).exp(), -noise(heads, seed=2).exp()
    return shaped[0], steps, pace, *shaped[1:], noise(heads, seed=3), noise(rows, heads, width, size, seed=4)


@pytest.mark.parametrize("case", SPACES)
def test_the_recurrence_of_mamba_2_is_that_of_transformers(case: tuple[int, ...]) -> None:
    inputs, steps, pace, into, out_of, skip, state = spaces(case)
    wanted, end = mamba.mamba2_chunk_scan(
        inputs, steps, pace, into, out_of, case[1], D=skip, initial_states=state, return_final_states=True
    )
    found = state_space(inputs, steps, pace * steps, into, out_of, skip, state)
    torch.testing.assert_close(found, wanted, **CLOSE)
    torch.testing.assert_close(state_space(inputs, steps, pace * steps, into, None, None, state), end, **CLOSE)


def test_a_token_of_mamba_2_has_the_same_bits_whatever_stands_beside_it() -> None:
    inputs, steps, pace, into, out_of, skip, state = spaces(SPACES[1])
    whole = state_space(inputs, steps, pace * steps, into, out_of, skip, state)
    for token in range(6):
        one = slice(token, token + 1)
        read = (inputs[:, one], steps[:, one], pace * steps[:, one], into[:, one])
        assert torch.equal(state_space(*read, out_of[:, one], skip, state), whole[:, one])
        state = state_space(*read, None, None, state)
    assert torch.equal(state, state_space(inputs, steps, pace * steps, into, None, None, spaces(SPACES[1])[-1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("channels", [1, 32, 100])
@pytest.mark.parametrize("turned", [False, True])
def test_a_short_convolution_is_that_of_torch(dtype: torch.dtype, channels: int, turned: bool) -> None:
    inputs = noise(2, 9, channels, seed=0).to(dtype).mT
    inputs = inputs if turned else inputs.contiguous()
    weight, bias = noise(channels, 4, seed=1).to(dtype), noise(channels, seed=2).to(dtype)
    wanted = conv1d(inputs.double(), weight[:, None].double(), bias.double(), groups=channels)
    found = short_convolution(inputs, weight, bias)
    assert found.shape == wanted.shape and found.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(found.double(), wanted, atol=tolerance, rtol=tolerance)


def test_what_does_not_fit_is_refused() -> None:
    queries, keys, values, decays, strengths, state = deltas(DELTAS[2])
    with pytest.raises(RuntimeError, match="do not fit"):
        gated_delta_rule(queries, keys, values[:2], decays, strengths, state)
    with pytest.raises(RuntimeError, match="float32"):
        gated_delta_rule(queries.double(), keys, values, decays, strengths, state)
    with pytest.raises(RuntimeError, match="do not fit"):
        short_convolution(noise(1, 8, 3, seed=0), noise(8, 4, seed=1), None)
