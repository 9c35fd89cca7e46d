"""Attention by our kernel, as an attention function of transformers."""

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
from slipstream.kernels.quantization import STEP

NAME = "slipstream"  # the name of this attention in transformers
ASKS = re.compile(r"_attn_implementation\s*(==|!=|not in|in)\s*[^\n]*\"sdpa\"")
"""The pattern of code with which models test whether torch's attention (sdpa) is in use."""

MANY = 256  # queries from which torch's attention is the faster one if nothing is hidden
UNKNOWN = ("softcap", "s_aux")  # arguments of some models that the kernel does not support


def attend_by_kernel(model: PreTrainedModel) -> None:
    """Make a model that uses torch's attention use our kernel.

    A model with another attention keeps it, and so does one whose code tests for torch's, such as an indexer's choice
    of keys.
    """
    usual = model.config._attn_implementation == "sdpa" and model._can_set_attn_implementation()
    modules = {inspect.getmodule(type(part)) for part in model.modules()} if usual else set()
    if usual and not any(ASKS.search(_source(module)) for module in modules if module is not None):
        model.set_attn_implementation(NAME)


def layers_attend_by_kernel(network: nn.Module) -> None:
    """Make the layers of a network that is not a model of transformers use our kernel in place of torch's attention."""
    for config in (getattr(part, "config", None) for part in network.modules()):
        if isinstance(config, PreTrainedConfig) and config._attn_implementation == "sdpa":
            config._attn_implementation = NAME


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
    torch's attention, and so do encoders of images and sound: many queries that all see everything.
    """
    asked = others.get("is_causal")
    causal = (
        attention_mask is None
        and query.shape[2] > 1
        and bool(getattr(module, "is_causal", True) if asked is None else asked)
    )
    more = others.get("dropout") or any(others.get(name) is not None for name in UNKNOWN)
    same = query.dtype == key.dtype == value.dtype and key.shape[-1] == value.shape[-1]
    known = same and query.dtype in STEP and query.device.type == "cpu" and not more
    if not known or (query.shape[2] != key.shape[2] if causal else attention_mask is None and query.shape[2] >= MANY):
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **others)
    least, added = torch.finfo(query.dtype).min, attention_mask
    if causal:  # every token sees itself and those before it
        added = torch.full(2 * (query.shape[2],), least, dtype=query.dtype).triu(1)[None, None]
    elif added is not None and added.dtype == torch.bool:  # True marks the keys that are seen
        added = torch.zeros_like(added, dtype=query.dtype).masked_fill(~added, least)
    elif added is not None:
        added = added.to(query.dtype)
    bias = others.get("position_bias")
    if added is not None and bias is not None:
        bias = added + bias
    return panel_attention(query, key, value, added if bias is None else bias, scaling or query.shape[-1] ** -0.5), None


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
