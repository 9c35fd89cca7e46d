"""Attention by our kernel, as an attention function of transformers."""

from __future__ import annotations

import functools
import inspect
import re
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from slipstream.kernels.cpu import panel_attention
from slipstream.kernels.panels import STEP

NAME = "slipstream"  # the name of this attention in transformers
ASKS = re.compile(r"_attn_implementation\s*(==|!=|not in|in)\s*[^\n]*\"sdpa\"")
"""The pattern of code with which models test whether torch's attention (sdpa) is in use."""

UNKNOWN = ("softcap", "s_aux")  # arguments of some models that the kernel does not support


def attend_by_kernel(model: PreTrainedModel) -> None:
    """Make a model that uses torch's attention use our kernel.

    A model with another attention keeps it, and so does one whose code tests for torch's, such as an indexer's choice
    of keys.
    """
    usual = model.config._attn_implementation == "sdpa" and model._can_set_attn_implementation()
    if usual and not _asks_for_torch(model):
        model.set_attn_implementation(NAME)


def layers_attend_by_kernel(network: nn.Module) -> None:
    """Make the layers of a network that is not a model of transformers use our kernel in place of torch's attention."""
    for config in (getattr(part, "config", None) for part in network.modules()):
        if isinstance(config, PreTrainedConfig) and config._attn_implementation == "sdpa":
            config._attn_implementation = NAME


def _asks_for_torch(model: PreTrainedModel) -> bool:
    modules = {inspect.getmodule(type(part)) for part in model.modules()}
    return any(ASKS.search(_source(module)) for module in modules if module is not None)


@functools.cache
def _source(module: ModuleType) -> str:
    try:
        return inspect.getsource(module)
    except (OSError, TypeError):
        return ""


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers calls an attention function: (rows, heads, n, width) -> (rows, n, heads, width).

    Calls that our kernel does not support (dropout, bounded scores, a causal pattern over a cache without a mask) go to
    torch's attention.
    """
    asked = others.get("is_causal")
    causal = (
        attention_mask is None
        and query.shape[2] > 1
        and bool(getattr(module, "is_causal", True) if asked is None else asked)
    )
    more = others.get("dropout") or any(others.get(name) is not None for name in UNKNOWN)
    known = _fits(query, key, value) and not more
    if not known or (causal and query.shape[2] != key.shape[2]):
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **others)
    added = _causal_mask(query) if causal else _additive(attention_mask, query.dtype)
    bias = others.get("position_bias")
    if added is not None and bias is not None:
        bias = added + bias
    return panel_attention(query, key, value, added if bias is None else bias, scaling or query.shape[-1] ** -0.5), None


def _fits(query: Tensor, key: Tensor, value: Tensor) -> bool:
    same = query.dtype == key.dtype == value.dtype and key.shape[-1] == value.shape[-1]
    return same and query.dtype in STEP and query.device.type == "cpu"


def _causal_mask(query: Tensor) -> Tensor:
    """Return the mask (1, 1, n, n) with which every token sees itself and those before it."""
    count = query.shape[2]
    hidden = torch.full((count, count), torch.finfo(query.dtype).min, dtype=query.dtype)
    return hidden.triu(1)[None, None]


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return the mask to add to the scores; in a boolean mask, True marks the keys that are seen."""
    if mask is None or mask.dtype != torch.bool:
        return mask if mask is None else mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)


AttentionInterface.register(NAME, attend)


AttentionMaskInterface.register(NAME, sdpa_mask)
