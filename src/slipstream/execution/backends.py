"""Choosing how passes and drafts run on a device: eagerly, compiled by inductor, or captured as CUDA graphs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel

from slipstream.execution.cuda_graphs import Captured, CapturedDrafts
from slipstream.execution.draft_graphs import FED, DraftGraphs, Network
from slipstream.execution.inductor import Compiled
from slipstream.execution.passes import Execution, Mode
from slipstream.kernels.placement import why_in_parts


def execution(model: PreTrainedModel, name: str, mode: Mode) -> Execution | None:
    """Return what makes passes of few tokens faster in a mode, or None for eager passes.

    Warns if the mode is compiled, but the model's device or placement allows only eager passes.
    """
    if not mode.compiled:
        return None
    if why := why_in_parts(model):
        warnings.warn(f"{name} runs eagerly: {why}.", RuntimeWarning, stacklevel=3)
        return None
    if model.device.type in KINDS:
        return KINDS[model.device.type](model, name, mode.progress)
    warnings.warn(f"{name} runs eagerly: passes on {model.device} are not compiled.", RuntimeWarning, stacklevel=3)
    return None


KINDS: dict[str, type[Compiled] | type[Captured]] = {"cpu": Compiled, "cuda": Captured}
"""The classes that compile passes, by the type of the device."""


def captures(device: torch.device) -> bool:
    """Whether work on a device is captured as CUDA graphs."""
    return KINDS.get(device.type) is Captured


def draft_graphs(
    network: Network,
    name: str,
    device: torch.device,
    sizes: Sequence[int],
    most_fed: int = FED,
    progress: Callable[[str], object] | None = None,
) -> DraftGraphs:
    """Return the graphs by which a network on a device drafts; see `DraftGraphs`."""
    kind = CapturedDrafts if device.type == "cuda" else DraftGraphs
    return kind(network, name, tuple(sizes), most_fed, progress)
