"""Weights in the layout that oneDNN multiplies fastest, for models on CPUs, without touching the model."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

PACKED_DTYPES = (torch.float32, torch.bfloat16)


class PackedLinear(nn.Module):
    """A linear layer whose weight lies in oneDNN's blocked layout: six rows cost about what one does, and in float32
    half of what the plain layout costs."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.register_buffer("weight", torch.ops.mkldnn._reorder_linear_weight(weight, 8), persistent=False)
        self.bias = bias

    def forward(self, inputs: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features)."""
        return torch.ops.mkldnn._linear_pointwise(inputs, self.weight, self.bias, "none", [], "")


def can_pack(model: PreTrainedModel) -> bool:
    """Whether packed weights exist for this model: on a CPU with oneDNN, in float32 or a supported bfloat16."""
    placed = getattr(model, "hf_device_map", None) or getattr(model, "hf_quantizer", None)
    if placed or model.device.type != "cpu" or model.dtype not in PACKED_DTYPES:
        return False
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    return model.dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@torch.no_grad()
def packed(model: PreTrainedModel, keep: nn.Module | None = None) -> PreTrainedModel:
    """A twin of the model that shares everything but its linear layers, which have packed copies of the weights.
    The layer `keep` stays as it is.

    Needs memory for a second copy of the matrices unless the original is dropped. Raises ValueError if `can_pack`
    is false.
    """
    if not can_pack(model):
        raise ValueError(
            f"the weights of {type(model).__name__} cannot be packed on {model.device} in {model.dtype}: "
            "that needs a CPU with oneDNN and float32 or bfloat16."
        )
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    twin = copy.deepcopy(model, shared)
    for parent in list(twin.modules()):
        for name, child in list(parent.named_children()):
            if keep is not None and getattr(child, "weight", None) is keep.weight:
                continue
            if type(child) is nn.Linear:
                setattr(parent, name, PackedLinear(child.weight, child.bias))
            elif type(child) is Conv1D:  # GPT-2's linear layer, stored the other way round
                setattr(parent, name, PackedLinear(child.weight.t().contiguous(), child.bias))
    return twin
