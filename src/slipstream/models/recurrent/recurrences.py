"""The recurrences of linear attention and state space layers, each as one step over the first tokens of a pass.

The inputs of a recurrence in a pass (keys, values, decays: small next to the layer's projections) are recorded, so that
the state after any number of the pass's tokens can be computed from the state before it, without the rest of the model.
All of it is computed in float32, as in transformers; on CPUs by our kernel, which also computes the outputs of recorded
passes, in a fraction of the time that transformers' functions take for few tokens.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import silu, softplus

from slipstream.kernels.cpu import kernel_missing
from slipstream.kernels.quantization import STEP
from slipstream.kernels.recurrences import FEW, gated_delta_rule, short_convolution, state_space

Read = tuple[Tensor, Tensor, Tensor, Tensor]


def by_kernel(start: Tensor, count: int) -> bool:
    """Whether our kernel can compute a recurrence over `count` tokens after the state `start`."""
    return start.device.type == "cpu" and start.dtype == torch.float32 and count <= FEW and kernel_missing() is None


@dataclass(frozen=True)
class GatedDeltaRule:
    """The gated delta rule (equation 10 of arXiv 2412.06464): S_t = a_t S_{t-1} + k_t u_t', where
    u_t = b_t (v_t - a_t S_{t-1}' k_t), over keys that are normalized to length 1.

    `start` (rows, heads, key size, value size) is the state before the pass; keys (rows, n, heads or fewer, size),
    values (rows, n, heads, size), decays log a_t and strengths b_t (rows, n, heads).
    """

    start: Tensor
    keys: Tensor
    values: Tensor
    decays: Tensor
    strengths: Tensor

    @staticmethod
    def of(arguments: Mapping[str, Any]) -> GatedDeltaRule:
        """Make it of the arguments of transformers' functions. Raises ValueError for keys that are not normalized."""
        if not arguments.get("use_qk_l2norm_in_kernel"):
            raise ValueError("a gated delta rule over keys of any length is not known.")
        return GatedDeltaRule(
            arguments["initial_state"], *(arguments[name].float() for name in ("key", "value", "g", "beta"))
        )

    def read(self) -> Read:
        """Return the inputs of the recurrence besides the state, in the order of the fields."""
        return self.keys, self.values, self.decays, self.strengths

    def state_after(self, row: int, count: int) -> Tensor:
        """Return the state (1, heads, ...) of a row after the first `count` tokens, at least one."""
        start = self.start[row : row + 1]
        keys, values, decays, strengths = (each[row : row + 1, :count] for each in self.read())
        if by_kernel(start, count):
            return gated_delta_rule(None, keys, values, decays, strengths, start)
        keys = keys.repeat_interleave(values.shape[2] // keys.shape[2], 2)
        keys = keys * torch.rsqrt((keys * keys).sum(-1, keepdim=True) + 1e-6)
        keys, values, decays, strengths = (each[0].transpose(0, 1) for each in (keys, values, decays, strengths))
        return _solved(keys, values, decays, strengths, start[0].float())[None]


def _solved(keys: Tensor, values: Tensor, decays: Tensor, strengths: Tensor, start: Tensor) -> Tensor:
    """Return the state after the tokens of one row, from inputs (heads, count, ...).
    The u_t solve a triangular system, so the state is read and written once."""
    total = decays.cumsum(-1)  # (heads, count)
    since = (total[:, :, None] - total[:, None, :]).exp()  # the part of the input at i that is left at t
    strengths = strengths[..., None]
    known = total.exp()[..., None] * (keys @ start)
    system = (strengths * since * (keys @ keys.mT)).tril(-1)
    new = torch.linalg.solve_triangular(system, strengths * (values - known), upper=False, unitriangular=True)
    added = (keys * since[:, -1, :, None]).mT @ new
    return total[:, -1].exp()[:, None, None] * start + added


@dataclass(frozen=True)
class StateSpace:
    """The recurrence of Mamba-2 (arXiv 2405.21060): h_t = exp(d_t A) h_{t-1} + d_t x_t B_t'.

    `start` (rows, heads, head size, state size) is the state before the pass; inputs x (rows, n, heads, head size),
    steps d and d A (rows, n, heads), and B (rows, n, heads or fewer, state size).
    """

    start: Tensor
    inputs: Tensor
    steps: Tensor
    decays: Tensor
    into: Tensor

    @staticmethod
    def of(arguments: Mapping[str, Any]) -> StateSpace:
        """Make it of the arguments of transformers' function for several tokens."""
        steps, bias = arguments["dt"], arguments.get("dt_bias")
        steps = steps if bias is None else steps + bias.to(steps.dtype)
        steps = softplus(steps) if arguments.get("dt_softplus") else steps
        steps = steps.clamp(*arguments["dt_limit"]).float() if "dt_limit" in arguments else steps.float()
        inputs, into = arguments["hidden_states"].float(), arguments["B"].float()
        return StateSpace(arguments["initial_states"], inputs, steps, arguments["A"].float() * steps, into)

    def read(self) -> Read:
        return self.inputs, self.steps, self.decays, self.into

    def outputs(self, arguments: Mapping[str, Any]) -> Tensor:
        """Compute y_t = h_t C_t + D x_t for all tokens (rows, n, heads, head size), by our kernel."""
        skip = arguments.get("D")
        return state_space(*self.read(), arguments["C"].float(), None if skip is None else skip.float(), self.start)

    def state_after(self, row: int, count: int) -> Tensor:
        start = self.start[row : row + 1]
        inputs, steps, decays, into = (each[row : row + 1, :count] for each in self.read())
        if by_kernel(start, count):
            return state_space(inputs, steps, decays, into, None, None, start)
        into = into.repeat_interleave(inputs.shape[2] // into.shape[2], 2)
        total = decays.cumsum(1)  # (1, count, heads)
        left = ((total[:, -1:] - total).exp() * steps)[..., None]
        added = torch.einsum("rthp,rthn->rhpn", inputs * left, into)
        return total[:, -1].exp()[..., None, None] * start.float() + added


Recurrence = GatedDeltaRule | StateSpace  # the inputs of one layer's recurrence in a pass


class _Recorders(threading.local):
    """The recurrences of the pass that a thread runs, in their order; None while the thread records nothing."""

    recurrences: list[Recurrence] | None = None


_recorders = _Recorders()
CHUNK = 64  # the default chunk size of transformers' functions
ACTIVATIONS = {None, "silu", "swish"}


def record(recurrence: Recurrence) -> None:
    """Append a recurrence to those that this thread records."""
    assert _recorders.recurrences is not None, "nothing is recorded"
    _recorders.recurrences.append(recurrence)


def _gated_delta_rule(function: Callable[..., Any], arguments: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Compute and record the gated delta rule -> outputs, and the state after the tokens.
    The state is None where our kernel computes it later, for the accepted tokens (see `Recurrence.state_after`)."""
    rule = GatedDeltaRule.of(arguments)
    record(rule)
    if by_kernel(rule.start, rule.values.shape[1]):
        outputs = gated_delta_rule(arguments["query"].float(), *rule.read(), rule.start)
        return outputs.to(arguments["query"].dtype), None
    return function(**_short_chunks(arguments, arguments["query"]))


def _state_space(function: Callable[..., Any], arguments: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    space = StateSpace.of(arguments)
    record(space)
    if by_kernel(space.start, space.inputs.shape[1]):
        return space.outputs(arguments), None
    return function(**_short_chunks(arguments, arguments["hidden_states"]))


def _state_space_step(function: Callable[..., Any], arguments: dict[str, Any]) -> Tensor:
    """Compute and record Mamba-2 over one token, with a gate if there is one -> outputs (rows, heads, width)."""
    one, gate = _one_of_several(arguments), arguments.get("z")
    space = StateSpace.of(one)
    if not by_kernel(space.start, 1):
        raise ValueError("a state that is overwritten cannot be gone back to.")
    record(space)
    outputs = space.outputs(one)[:, 0]
    return (outputs if gate is None else outputs * silu(gate)).to(arguments["hidden_states"].dtype)


def _one_of_several(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Convert arguments of transformers' function for a single token to those of its function for several.
    In the former every number of a head is repeated for each of its elements."""
    every = {name: arguments[name][:, 0] for name in ("D", "dt_bias") if arguments.get(name) is not None}
    read = {name: arguments[name][:, None] for name in ("hidden_states", "B", "C")}
    steps = {
        "dt": arguments["dt"][:, None, :, 0],
        "A": arguments["A"][:, 0, 0],
        "dt_softplus": arguments.get("dt_softplus"),
    }
    return {**every, **read, **steps, "initial_states": arguments["state"]}


def _short_chunks(arguments: dict[str, Any], tokens: Tensor) -> dict[str, Any]:
    """Return the arguments with a chunk size no greater than the pass.
    On CPUs, padding the few tokens of a round to 64 or 256, as transformers does, took half of its time."""
    count, size = tokens.shape[1], arguments.get("chunk_size", CHUNK)
    return {**arguments, "chunk_size": count} if tokens.device.type == "cpu" and count < size else arguments


def _convolution(function: Callable[..., Any], arguments: dict[str, Any]) -> Tensor:
    """Compute a short convolution over inputs (rows, channels, places) that begin with those of earlier tokens.

    It returns the places where all taps have an input. transformers' function also returns the padded places before
    them, which models cut off.
    """
    inputs, weight, activation = arguments["hidden_states"], arguments["weight"], arguments.get("activation")
    fits = inputs.device.type == "cpu" and inputs.dtype == weight.dtype and inputs.dtype in STEP
    if not fits or activation not in ACTIVATIONS or inputs.shape[2] < weight.shape[1] or kernel_missing() is not None:
        return function(**arguments)
    outputs = short_convolution(inputs, weight, arguments.get("bias"))
    return silu(outputs) if activation else outputs


class Recorded(NamedTuple):
    """The replacement of a function of transformers in recorded passes: `compute` takes the arguments by name.
    `names` are those of its positional arguments."""

    compute: Callable[[Callable[..., Any], dict[str, Any]], Any]
    names: tuple[str, ...]


DELTA = Recorded(_gated_delta_rule, ("query", "key", "value", "g", "beta"))
SPACE = Recorded(_state_space, ("hidden_states", "dt", "A", "B", "C", "chunk_size"))
STEPS = Recorded(_state_space_step, ("state", "hidden_states", "dt", "A", "B", "C", "D"))
CONVOLUTION = Recorded(_convolution, ("hidden_states", "weight", "bias", "activation"))
RECORDED = {  # the functions of transformers that are replaced in recorded passes, by their names
    "torch_chunk_gated_delta_rule": DELTA,
    "torch_recurrent_gated_delta_rule": DELTA,
    "mamba2_chunk_scan": SPACE,
    "mamba2_selective_state_update": STEPS,
    "causal_conv1d_fn": CONVOLUTION,
}


class Observed:
    """A function of transformers that is unchanged, except in passes that its thread records."""

    def __init__(self, function: Callable[..., Any], recorded: Recorded) -> None:
        functools.update_wrapper(self, function)
        self._function, self._recorded = function, recorded

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if _recorders.recurrences is None:
            return self._function(*arguments, **named)
        first = dict(zip(self._recorded.names, arguments, strict=False))
        return self._recorded.compute(self._function, {**first, **named})


def observe(model: nn.Module) -> None:
    """Make it possible to record the recurrences of a model's family; passes that are not recorded stay unchanged."""
    for module in {sys.modules[type(part).__module__] for part in model.modules()}:
        for name, recorded in RECORDED.items():
            function = getattr(module, name, None)
            if function is not None and not isinstance(function, Observed):
                setattr(module, name, Observed(function, recorded))


@contextmanager
def recording() -> Iterator[list[Recurrence]]:
    """Record the recurrences that this thread computes in the block, in a list that grows during it.
    A recording around this one receives none of them."""
    recurrences: list[Recurrence] = []
    before, _recorders.recurrences = _recorders.recurrences, recurrences
    try:
        yield recurrences
    finally:
        _recorders.recurrences = before
