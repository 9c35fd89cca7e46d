"""Choosing how passes and drafts run on a device: eagerly, as programs, or captured as CUDA graphs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel

from slipstream.execution.cuda_graphs import Captured, CapturedDrafts
from slipstream.execution.draft_graphs import FED, DraftGraphs, Network
from slipstream.execution.native import Native
from slipstream.execution.passes import Execution, Mode
from slipstream.kernels.cpu import kernel_missing
from slipstream.kernels.packing import is_packed
from slipstream.kernels.placement import why_in_parts

CAPTURED = frozenset({"cuda"})  # the types of devices on which work is captured as CUDA graphs


def execution(model: PreTrainedModel, name: str, mode: Mode) -> Execution | None:
    """Return what makes passes of few tokens faster, or None for eager passes.

    On CPUs packed models run as programs. Warns if the mode is compiled, but the model's device or placement allows
    only eager passes.
    """
    why = why_in_parts(model)
    if why is None and captures(model.device):
        return Captured(model, name, mode.progress) if mode.compiled else None
    if why is None and model.device.type == "cpu":
        return Native(model, name) if kernel_missing() is None and is_packed(model) else None
    if mode.compiled:
        why = why or f"passes on {model.device} are not compiled"
        warnings.warn(f"{name} runs eagerly: {why}.", RuntimeWarning, stacklevel=3)
    return None


def captures(device: torch.device) -> bool:
    return device.type in CAPTURED


def draft_graphs(
    network: Network,
    name: str,
    device: torch.device,
    sizes: Sequence[int],
    most_fed: int = FED,
    progress: Callable[[str], object] | None = None,
) -> DraftGraphs:
    """Return the graphs by which a network on a device drafts; see `DraftGraphs`."""
    if captures(device):
        return CapturedDrafts(network, name, tuple(sizes), most_fed, progress)
    return DraftGraphs(network, name, (), max(most_fed, 16), progress)  # a program of one step is entered fast enough
