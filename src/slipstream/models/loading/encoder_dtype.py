"""Encoders of encoder-decoders in a data type of their own: on CPUs, bfloat16 reads sources in half the time."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from slipstream.kernels.packing import PackedLinear, twin_of
from slipstream.kernels.placement import why_in_parts


def with_encoder_dtype(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Return a twin of an encoder-decoder that has a copy of the encoder in `dtype` and shares everything else.

    The twin is called like the model: floating-point inputs of the encoder are converted to `dtype`, and its states to
    the type of the decoder. Raises ValueError for a model without an encoder, in parts or with quantized weights.
    """
    if fault := _fault(model):
        raise ValueError(f"encoder_dtype={str(dtype).removeprefix('torch.')!r} is not possible: {fault}.")
    twin = twin_of(model)
    encoder = twin.get_encoder()
    place = next(place for place, module in twin.named_modules() if module is encoder)
    parent, _, part = place.rpartition(".")
    own = copy.deepcopy(encoder).to(dtype)
    own.register_forward_pre_hook(_converting_inputs(dtype), with_kwargs=True)
    own.register_forward_hook(_converting_states(model.dtype))
    # It becomes the last part, because transformers takes the type of a model's first weight for the model's.
    delattr(twin.get_submodule(parent), part)
    twin.get_submodule(parent).add_module(part, own)
    return twin


def encoder_dtype(model: PreTrainedModel) -> torch.dtype | None:
    """Return the dtype of a model's encoder if it is another than the decoder's; else None."""
    if not model.config.is_encoder_decoder:
        return None
    own = next(weight.dtype for weight in model.get_encoder().parameters() if weight.is_floating_point())
    return None if own == model.dtype else own


def _fault(model: PreTrainedModel) -> str | None:
    if not model.config.is_encoder_decoder:
        return f"{type(model).__name__} is no encoder-decoder"
    if getattr(model, "hf_quantizer", None) or any(isinstance(layer, PackedLinear) for layer in model.modules()):
        return f"the weights of {type(model).__name__} are quantized or packed already"
    why = why_in_parts(model)
    return why and f"{type(model).__name__} is not in one piece: {why}"


def _converting_inputs(dtype: torch.dtype) -> Any:
    """Return a hook that converts floating-point inputs (features, but no token ids and masks) to `dtype`."""

    def convert(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return tuple(map(convert, args)), {name: convert(value) for name, value in kwargs.items()}

    return hook


def _converting_states(dtype: torch.dtype) -> Any:
    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (output[0].to(dtype), *output[1:])
        output.last_hidden_state = output.last_hidden_state.to(dtype)
        return output

    return hook
