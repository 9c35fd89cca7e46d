"""Choosing how a model's passes run in a mode: eagerly, compiled by inductor, or captured as CUDA graphs."""

from __future__ import annotations

import warnings

from transformers import PreTrainedModel

from slipstream.execution.cuda_graphs import Captured
from slipstream.execution.inductor import Compiled
from slipstream.execution.passes import Execution, Mode
from slipstream.kernels.placement import why_in_parts


def execution(model: PreTrainedModel, name: str, mode: Mode) -> Execution | None:
    """What makes passes of few tokens faster in this mode; None is eager. A device without one gives a warning."""
    if not mode.compiled:
        return None
    if why := why_in_parts(model):
        warnings.warn(f"{name} runs eagerly: {why}.", RuntimeWarning, stacklevel=3)
        return None
    if model.device.type in KINDS and not (model.device.type == "cuda" and model.config.is_encoder_decoder):
        return KINDS[model.device.type](model, name, mode.progress)
    warnings.warn(f"{name} runs eagerly: passes on {model.device} are not compiled.", RuntimeWarning, stacklevel=3)
    return None


KINDS: dict[str, type[Compiled] | type[Captured]] = {"cpu": Compiled, "cuda": Captured}
"""What compiles a pass, by the type of the device."""
