"""The recurrences of linear attention and state space layers, each as one step over the first tokens of a pass.

What a recurrence reads in a pass (keys, values, decays: small next to the layer's projections) is recorded, so that the
state behind any number of the pass's tokens can be computed from the state before it, without the rest of the model.
All of it is computed in float32, as transformers does.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus


class Recurrence(Protocol):
    """What one layer's recurrence read in a pass."""

    def state_after(self, row: int, count: int) -> Tensor:
        """The state (1, heads, ...) of a row behind the first `count` tokens, at least one."""
        ...


@dataclass(frozen=True)
class GatedDeltaRule:
    """The gated delta rule (equation 10 of arXiv 2412.06464): S_t = a_t S_{t-1} + k_t u_t', where
    u_t = b_t (v_t - a_t S_{t-1}' k_t).

    `start` (rows, heads, key size, value size) is the state before the pass; keys and values (rows, n, heads, size),
    decays log a_t and strengths b_t (rows, n, heads).
    """

    start: Tensor
    keys: Tensor
    values: Tensor
    decays: Tensor
    strengths: Tensor

    @staticmethod
    def of(given: Mapping[str, Any]) -> GatedDeltaRule:
        """From the arguments of transformers' function."""
        values, keys = given["value"], given["key"]
        keys = keys.repeat_interleave(values.shape[2] // keys.shape[2], 2).float()
        if given["use_qk_l2norm_in_kernel"]:
            keys = keys * torch.rsqrt((keys * keys).sum(-1, keepdim=True) + 1e-6)
        return GatedDeltaRule(given["initial_state"], keys, values, given["g"], given["beta"])

    def state_after(self, row: int, count: int) -> Tensor:
        """See `Recurrence`. The u_t solve a triangular system, so the state is read and written once."""
        start = self.start[row].float()
        read = (self.keys, self.values, self.decays, self.strengths)
        keys, values, decays, strengths = (each[row, :count].transpose(0, 1).float() for each in read)
        total = decays.cumsum(-1)  # (heads, count)
        since = (total[:, :, None] - total[:, None, :]).exp()  # how much of what came at i is left at t
        strengths = strengths[..., None]
        known = total.exp()[..., None] * (keys @ start)
        system = (strengths * since * (keys @ keys.mT)).tril(-1)
        new = torch.linalg.solve_triangular(system, strengths * (values - known), upper=False, unitriangular=True)
        added = (keys * since[:, -1, :, None]).mT @ new
        return (total[:, -1].exp()[:, None, None] * start + added)[None]


@dataclass(frozen=True)
class StateSpace:
    """The recurrence of Mamba-2 (arXiv 2405.21060): h_t = exp(d_t A) h_{t-1} + d_t x_t B_t'.

    `start` (rows, heads, head size, state size) is the state before the pass; inputs x (rows, n, heads, head size),
    steps d and d A (rows, n, heads), and B (rows, n, heads, state size).
    """

    start: Tensor
    inputs: Tensor
    steps: Tensor
    decays: Tensor
    into: Tensor

    @staticmethod
    def of(given: Mapping[str, Any]) -> StateSpace:
        """From the arguments of transformers' function."""
        inputs, steps, into = given["hidden_states"], given["dt"], given["B"]
        if given["dt_bias"] is not None:
            steps = steps + given["dt_bias"].to(steps.dtype)
        if given["dt_softplus"]:
            steps = softplus(steps)
        steps = steps.clamp(*given["dt_limit"]).float()
        into = into.float().repeat_interleave(inputs.shape[2] // into.shape[2], 2)
        return StateSpace(given["initial_states"], inputs.float(), steps, given["A"].float() * steps, into)

    def state_after(self, row: int, count: int) -> Tensor:
        """See `Recurrence`."""
        total = self.decays[row, :count].cumsum(0)  # (count, heads)
        left = ((total[-1] - total).exp() * self.steps[row, :count])[..., None]
        added = torch.einsum("thp,thn->hpn", self.inputs[row, :count] * left, self.into[row, :count])
        return (total[-1].exp()[:, None, None] * self.start[row].float() + added)[None]


KINDS: dict[str, Callable[[Mapping[str, Any]], Recurrence]] = {
    "torch_chunk_gated_delta_rule": GatedDeltaRule.of,
    "mamba2_chunk_scan": StateSpace.of,
}
"""The functions of transformers that compute recurrences over several tokens, by name."""


# ---- recording --------------------------------------------------------------------------------------------------


class _Recorders(threading.local):
    """What a thread records: the recurrences of the pass that it runs, in order; None while it records nothing."""

    found: list[Recurrence] | None = None


_recorders = _Recorders()


class Observed:
    """A function of transformers that computes as ever, and leaves what it read where a thread records it.

    While it does, chunks are no longer than the pass: on CPUs, filling the few tokens of a round up to 64 or 256, as
    transformers does, took half of its time.
    """

    def __init__(self, function: Callable[..., Any], kind: Callable[[Mapping[str, Any]], Recurrence]) -> None:
        functools.update_wrapper(self, function)
        self._function, self._kind, self._signature = function, kind, inspect.signature(function)

    def __call__(self, *given: Any, **named: Any) -> Any:
        if (found := _recorders.found) is None:
            return self._function(*given, **named)
        bound = self._signature.bind(*given, **named)
        bound.apply_defaults()
        arguments = bound.arguments
        found.append(self._kind(arguments))
        tokens = next(iter(arguments.values()))
        if tokens.device.type == "cpu" and arguments["chunk_size"] > tokens.shape[1]:
            arguments["chunk_size"] = tokens.shape[1]
        return self._function(*bound.args, **bound.kwargs)


def observe(model: nn.Module) -> None:
    """Let the recurrences of a model's family be recorded, which changes nothing else."""
    for module in {sys.modules[type(part).__module__] for part in model.modules()}:
        for name, kind in KINDS.items():
            function = getattr(module, name, None)
            if function is not None and not isinstance(function, Observed):
                setattr(module, name, Observed(function, kind))


@contextmanager
def recording() -> Iterator[list[Recurrence]]:
    """Record the recurrences that this thread computes -> a list that grows as they are."""
    found: list[Recurrence] = []
    _recorders.found = found
    try:
        yield found
    finally:
        _recorders.found = None
