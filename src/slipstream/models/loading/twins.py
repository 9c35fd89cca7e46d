"""Twins of models, which share what they do not change: packed, quantized, with a cut head or another encoder dtype.

A packed twin is used only if it gives the logits of the loaded model; the others are models of their own. With a cut
head other tokens are impossible, and no time is spent on their logits; on CPUs, a bfloat16 encoder reads sources in
half the time.
"""

import copy
import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from slipstream.core.protocols import HasModel
from slipstream.core.values import first_sentence
from slipstream.kernels.packing import PackedLinear, packed, plain_weight, quantized, quantizing_fault, twin_of
from slipstream.kernels.placement import why_in_parts
from slipstream.kernels.quantization import GPTQ, Precision
from slipstream.models.families import (
    allowed_gap,
    is_proven,
    longest_text,
    spread_gap,
    trial_lengths,
    trial_text,
    vocabulary_of,
    windows_of,
)
from slipstream.models.loading.kept_codes import codes_of
from slipstream.models.recurrent.calls import calls_of


def packed_twin(model: PreTrainedModel, name: str) -> PreTrainedModel:
    """Return a twin of the model with packed weights.
    The model itself is returned if its layers do not run packed, or, with a warning, if the twin gives other logits."""
    twin = packed(model)
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
    reads: bool = True,
) -> PreTrainedModel:
    """Return a twin of the model with quantized weights, and a head cut to the tokens `kept` (n,) if they are given.

    `progress` is called when codes are calibrated, which takes long, or were kept. Without `reads`, layers that read
    sources are shared. The twin is tried on a text unless its family is known to run quantized. Raises ValueError in
    one sentence if the model cannot be quantized or does not run so.
    """
    if fault := quantizing_fault(model):
        raise ValueError(f"the weights of {name} cannot be quantized to {precision}: {fault}.")
    model = model if kept is None else with_kept_tokens(model, name, kept)
    choose = partial(codes_of, model, name, precision, progress) if precision.rounding == GPTQ else None
    twin = quantized(model, precision, choose, reads)
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
    target: HasModel, precision: Precision, kept: Tensor | None = None, progress: Callable[[str], object] | None = None
) -> HasModel:
    """Return a Scorer with quantized copies of the target's weights that shares the target's rows and cache.

    `kept` (n,) cuts its head to these tokens, if given. The tokens it adds have to be rolled back before the target
    goes on. `progress` and errors are those of `quantized_twin`.
    """
    reads = not target.model.config.is_encoder_decoder  # the target reads the sources for both
    twin = quantized_twin(target.model, target.name, precision, kept, progress, reads)
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


CAP = "final_logit_softcapping"
"""The configuration's name of Gemma's cap of logits; applied after the cut, it would make the cut tokens possible."""


class CutHead(nn.Module):
    """A head for some tokens of a vocabulary: hidden states (..., width) -> logits (..., vocab), -inf for the others.
    The linear layer `known` computes the kept tokens' logits, and is packed or quantized as other linear layers are."""

    kept: Tensor

    def __init__(self, head: Any, kept: Tensor, cap: float | None = None) -> None:
        super().__init__()
        weight, bias = plain_weight(head).to(head.weight.dtype), getattr(head, "bias", None)
        (self.out_features, self.in_features), self.cap = weight.shape, cap
        self.register_buffer("kept", kept[kept < len(weight)].to(weight.device), persistent=False)
        self.known = nn.Linear(self.in_features, len(self.kept), bias is not None, "meta", weight.dtype)
        self.known.weight = nn.Parameter(weight[self.kept], requires_grad=False)
        if bias is not None:
            self.known.bias = nn.Parameter(bias[self.kept], requires_grad=False)

    @property
    def weight(self) -> Tensor:
        return self.known.weight

    def forward(self, hidden: Tensor) -> Tensor:
        logits = self.known(hidden)
        if self.cap is not None:
            logits = self.cap * torch.tanh(logits / self.cap)
        return logits.new_full((*logits.shape[:-1], self.out_features), -math.inf).index_copy(-1, self.kept, logits)


@torch.no_grad()
def with_kept_tokens(model: PreTrainedModel, name: str, kept: Tensor) -> PreTrainedModel:
    """Return a twin of the model whose head is cut to the tokens `kept` (n,), and which shares all else with it.
    The model may be packed. Raises ValueError in one sentence if its logits do not come from its head alone."""
    head = model.get_output_embeddings()
    if head is None:
        raise ValueError(f"{name} has no head whose tokens could be counted out: leave draft_vocab out.")
    twin = twin_of(model)
    config: Any = twin.config.get_text_config()
    cap = getattr(config, CAP, None)
    if cap is not None:
        setattr(config, CAP, None)
    place = next(path for path, module in model.named_modules() if module is head)
    twin.set_submodule(place, CutHead(head, kept, cap).eval())
    _refuse_others(twin, name, kept)
    return twin


@torch.inference_mode()
def _refuse_others(twin: PreTrainedModel, name: str, kept: Tensor) -> None:
    """Raise ValueError unless exactly the kept tokens are possible: some models change the logits after their head."""
    calls = calls_of(twin)
    source = calls.form.example(3) if calls.form else None
    try:
        logits = calls.alone(trial_text(vocabulary_of(twin), 3), source)[0, -1]
        possible = logits.isfinite().nonzero()[:, 0].cpu()
        works = torch.equal(possible, kept[kept < len(logits)].cpu()) and not bool(logits.isnan().any())
    except Exception as error:
        raise ValueError(f"{name} does not run with a part of its head: leave draft_vocab out.") from error
    if not works:
        raise ValueError(f"{name} changes its logits behind its head, which cannot be cut: leave draft_vocab out.")


def with_encoder_dtype(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Return a twin of an encoder-decoder that has a copy of the encoder in `dtype` and shares everything else.

    The twin is called like the model: floating-point inputs of the encoder are converted to `dtype`, and its states to
    the type of the decoder. Raises ValueError for a model without an encoder, in parts or with quantized weights.
    """
    kind, fault = type(model).__name__, None
    if not model.config.is_encoder_decoder:
        fault = f"{kind} is no encoder-decoder"
    elif getattr(model, "hf_quantizer", None) or any(isinstance(layer, PackedLinear) for layer in model.modules()):
        fault = f"the weights of {kind} are quantized or packed already"
    elif why := why_in_parts(model):
        fault = f"{kind} is not in one piece: {why}"
    if fault:
        raise ValueError(f"encoder_dtype={str(dtype).removeprefix('torch.')!r} is not possible: {fault}.")
    twin = twin_of(model)
    encoder = twin.get_encoder()
    place = next(place for place, module in twin.named_modules() if module is encoder)
    parent, _, part = place.rpartition(".")
    own = copy.deepcopy(encoder).to(dtype)

    def convert(value: Any) -> Any:  # features, but no token ids and masks
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    def read(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return tuple(map(convert, args)), {name: convert(value) for name, value in kwargs.items()}

    def hand_over(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (output[0].to(model.dtype), *output[1:])
        output.last_hidden_state = output.last_hidden_state.to(model.dtype)
        return output

    own.register_forward_pre_hook(read, with_kwargs=True)
    own.register_forward_hook(hand_over)
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
