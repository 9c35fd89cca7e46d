"""Twins of models with packed weights, used only where they give the logits of the model that was loaded."""

from __future__ import annotations

import warnings

import torch
from torch import nn
from transformers import PreTrainedModel

from slipstream.kernels.packing import packed
from slipstream.models.calls import calls_of
from slipstream.models.facts import vocabulary_of
from slipstream.models.families import allowed_gap, is_proven, longest_text, trial_lengths, trial_text, windows_of


def packed_twin(model: PreTrainedModel, name: str, keep: nn.Module | None = None) -> PreTrainedModel:
    """A twin of the model with packed weights, except the layer `keep`; the model itself where layers read their
    weights in ways of their own, or, with a warning, where the twin gives other logits."""
    twin = packed(model, keep)
    if is_proven(model):
        return twin
    try:
        gap = _gap(model, twin)
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


@torch.inference_mode()
def _gap(model: PreTrainedModel, twin: PreTrainedModel) -> float:
    """How far apart the logits of a text that crosses the model's windows are, in standard deviations."""
    config, calls, others = model.config.get_text_config(), calls_of(model), calls_of(twin)
    length = max(trial_lengths(windows_of(config), longest_text(config)))
    text, source = trial_text(vocabulary_of(model), length), calls.form.example(3) if calls.form else None
    want, got = (each.alone(text, source).float() for each in (calls, others))
    return float((got - want).abs().max() / want.std())
