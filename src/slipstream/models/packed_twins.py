"""Twins of models with other linear layers: packed, used only where they give the logits of the model that was loaded,
or quantized, which are models of their own."""

from __future__ import annotations

import math
import warnings
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from slipstream.core.protocols import HasModel
from slipstream.kernels.packing import packed, quantized, quantizing_fault
from slipstream.kernels.quantization import GPTQ, Precision
from slipstream.models.calibration import calibrated_codes, own_text
from slipstream.models.calls import calls_of
from slipstream.models.cut_head import with_kept_tokens
from slipstream.models.facts import vocabulary_of
from slipstream.models.families import (
    allowed_gap,
    first_sentence,
    is_proven,
    longest_text,
    spread_gap,
    trial_lengths,
    trial_text,
    windows_of,
)


def packed_twin(model: PreTrainedModel, name: str, keep: nn.Module | None = None) -> PreTrainedModel:
    """A twin of the model with packed weights, except the layer `keep`; the model itself where layers read their
    weights in ways of their own, or, with a warning, where the twin gives other logits."""
    twin = packed(model, keep)
    if is_proven(model):
        return twin
    try:
        gap = logits_gap(model, twin)
    except Exception:  # a layer that asks another for its weight; a model that cannot run at all shows it in its trial
        return model
    if gap <= allowed_gap(model.dtype):
        return twin
    warnings.warn(
        f"{name} runs with its weights as they are: packed for this processor they give other logits "
        f"(difference {gap:.2g} standard deviations).",
        RuntimeWarning,
        stacklevel=5,
    )
    return model


def quantized_twin(
    model: PreTrainedModel, name: str, precision: Precision, kept: Tensor | None = None
) -> PreTrainedModel:
    """A twin of the model with quantized weights, tried on a text unless its family is known to run so; with a head cut
    to the tokens `kept` (n,), if they are given.

    Raises ValueError in one sentence where that is not possible.
    """
    if fault := quantizing_fault(model):
        raise ValueError(f"the weights of {name} cannot be quantized to {precision}: {fault}.")
    model = model if kept is None else with_kept_tokens(model, name, kept)
    calibrated = precision.rounding == GPTQ
    choose = partial(calibrated_codes, model, precision, own_text(model)) if calibrated else None
    twin = quantized(model, precision, choose)
    if is_proven(model):
        return twin
    try:
        works = math.isfinite(logits_gap(model, twin))
    except Exception as error:  # a layer that asks another for its weight
        raise ValueError(f"{name} does not run with quantized weights: {first_sentence(error)}.") from error
    if not works:
        raise ValueError(f"{name} gives no numbers with weights quantized to {precision}: leave that out.")
    return twin


def quantized_part(target: HasModel, precision: Precision, kept: Tensor | None = None) -> HasModel:
    """A Scorer with quantized copies of the target's weights over the target's own rows and cache; with a head cut to
    the tokens `kept` (n,), if they are given.

    What it adds has to be rolled back before the target goes on. Raises ValueError where that is not possible.
    """
    twin = quantized_twin(target.model, target.name, precision, kept)
    return target.sharing_rows(twin, f"{target.name} in {precision}")


@torch.inference_mode()
def logits_gap(model: PreTrainedModel, twin: PreTrainedModel) -> float:
    """How far apart the logits of a text that crosses the model's windows are, in standard deviations."""
    config, calls, others = model.config.get_text_config(), calls_of(model), calls_of(twin)
    length = max(trial_lengths(windows_of(config), longest_text(config)))
    text, source = trial_text(vocabulary_of(model), length), calls.form.example(3) if calls.form else None
    want, got = (each.alone(text, source).float() for each in (calls, others))
    return spread_gap(got, want)
