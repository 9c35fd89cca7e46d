"""Twins of models with other linear layers: packed or quantized.

A packed twin is used only if it gives the logits of the loaded model; a quantized twin is a model of its own.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from slipstream.core.protocols import HasModel
from slipstream.kernels.packing import packed, quantized, quantizing_fault
from slipstream.kernels.quantization import GPTQ, Precision
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
from slipstream.models.loading.cut_head import with_kept_tokens
from slipstream.models.loading.kept_codes import codes_of
from slipstream.models.recurrent.calls import calls_of


def packed_twin(model: PreTrainedModel, name: str, keep: nn.Module | None = None) -> PreTrainedModel:
    """Return a twin of the model with packed weights, except those of the layer `keep`.

    The model itself is returned if its layers do not run packed, or, with a warning, if the twin gives other logits.
    """
    twin = packed(model, keep)
    if is_proven(model):
        return twin
    try:
        gap = logits_gap(model, twin)
    except Exception:  # a layer reads another's weight; a model that cannot run at all fails in its later trial
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
    model: PreTrainedModel,
    name: str,
    precision: Precision,
    kept: Tensor | None = None,
    progress: Callable[[str], object] | None = None,
) -> PreTrainedModel:
    """Return a twin of the model with quantized weights, and a head cut to the tokens `kept` (n,) if they are given.

    `progress` is called when codes are calibrated, which takes long, or were kept. The twin is tried on a text unless
    its family is known to run quantized. Raises ValueError in one sentence if the model cannot be quantized or does not
    run so.
    """
    if fault := quantizing_fault(model):
        raise ValueError(f"the weights of {name} cannot be quantized to {precision}: {fault}.")
    model = model if kept is None else with_kept_tokens(model, name, kept)
    choose = partial(codes_of, model, name, precision, progress) if precision.rounding == GPTQ else None
    twin = quantized(model, precision, choose)
    if is_proven(model):
        return twin
    try:
        works = math.isfinite(logits_gap(model, twin))
    except Exception as error:  # a layer that reads the weight of another
        raise ValueError(f"{name} does not run with quantized weights: {first_sentence(error)}.") from error
    if not works:
        raise ValueError(f"{name} gives no numbers with weights quantized to {precision}: leave that out.")
    return twin


def quantized_part(
    target: HasModel,
    precision: Precision,
    kept: Tensor | None = None,
    progress: Callable[[str], object] | None = None,
) -> HasModel:
    """Return a Scorer with quantized copies of the target's weights that shares the target's rows and cache.

    `kept` (n,) cuts its head to these tokens, if given. The tokens it adds have to be rolled back before the target
    goes on. `progress` and errors are those of `quantized_twin`.
    """
    twin = quantized_twin(target.model, target.name, precision, kept, progress)
    cut = "" if kept is None else f" with {len(kept)} of its tokens"
    return target.sharing_rows(twin, f"{target.name} in {precision}{cut}")


@torch.inference_mode()
def logits_gap(model: PreTrainedModel, twin: PreTrainedModel) -> float:
    """Return the largest difference of both models' logits of a text beyond their windows, in standard deviations."""
    config, calls, others = model.config.get_text_config(), calls_of(model), calls_of(twin)
    length = max(trial_lengths(windows_of(config), longest_text(config)))
    text, source = trial_text(vocabulary_of(model), length), calls.form.example(3) if calls.form else None
    want, got = (each.alone(text, source).float() for each in (calls, others))
    return spread_gap(got, want)
