"""Weights in the layout that is multiplied fastest by a few rows, for models on CPUs, without touching the model."""

from __future__ import annotations

import copy
import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from slipstream.kernels.attention import attend_by_kernel
from slipstream.kernels.cpu import fits_panels, into_panels, kernel_missing, panel_bytes, panel_linear

PACKED_DTYPES = (torch.float32, torch.bfloat16)
WORTHWHILE = 0.9  # share of real tokens up to which it pays to leave the padding out
HUGE_PAGE = 1 << 21  # bytes


class Columns:
    """Which tokens of a pass (rows, n) are multiplied: all, or within `only` those that are no padding. The layers of a
    packed model share one."""

    def __init__(self) -> None:
        self.real: Tensor | None = None  # their places among rows * n; None: all
        self.shape: tuple[int, int] | None = None

    @contextmanager
    def only(self, counts: Sequence[int], width: int) -> Iterator[None]:
        """Within, passes of shape (rows, width) have `counts[r]` real tokens in row r; the others get zeros."""
        some = torch.arange(width) < torch.tensor(counts)[:, None]
        if int(some.sum()) <= WORTHWHILE * some.numel():
            self.real, self.shape = some.flatten().nonzero().squeeze(1), (len(counts), width)
        try:
            yield
        finally:
            self.real = self.shape = None


class Stretch:
    """Memory for all weights of a model in one piece, in huge pages where the system has them: a pass, which reads them
    all in their order, is a tenth to a fifth faster than over many small pages."""

    def __init__(self, size: int) -> None:
        """Room for `size` bytes; pages that are never written cost nothing."""
        memory = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        room = torch.frombuffer(memory, dtype=torch.uint8)
        self._free = room[-room.data_ptr() % HUGE_PAGE :]

    def hold(self, tensor: Tensor) -> Tensor:
        """A copy of the tensor, behind the one before. Both take whole lines of the cache, as panels do."""
        place, self._free = self._free[: tensor.nbytes], self._free[tensor.nbytes :]
        return place.view(tensor.dtype).view(tensor.shape).copy_(tensor)


class PackedLinear(nn.Module):
    """A linear layer with a packed copy of the weight: six rows cost about what one does."""

    def __init__(self, in_features: int, out_features: int, columns: Columns) -> None:
        super().__init__()
        self.in_features, self.out_features, self.columns = in_features, out_features, columns

    def forward(self, inputs: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features)."""
        real = self.columns.real
        if real is None or inputs.shape[:-1] != self.columns.shape:
            return self.multiply(inputs)
        found = inputs.new_zeros(inputs.shape[:-1].numel(), self.out_features)
        found.index_copy_(0, real, self.multiply(inputs.flatten(0, 1).index_select(0, real)))
        return found.view(*inputs.shape[:-1], self.out_features)

    def multiply(self, inputs: Tensor) -> Tensor:
        """Multiply all tokens by the packed weight."""
        raise NotImplementedError


class PanelLinear(PackedLinear):
    """By our own kernel, which reads panels of the weight as fast as the memory gives them."""

    weight: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None, columns: Columns, stretch: Stretch) -> None:
        super().__init__(weight.shape[1], weight.shape[0], columns)
        self.register_buffer("weight", stretch.hold(into_panels(weight)), persistent=False)
        self.bias = bias

    def multiply(self, inputs: Tensor) -> Tensor:
        """See `PackedLinear`."""
        return panel_linear(inputs, self.weight, self.bias, self.out_features)


class BlockedLinear(PackedLinear):
    """By oneDNN in its blocked layout, where our kernel cannot be built."""

    def __init__(self, weight: Tensor, bias: Tensor | None, columns: Columns) -> None:
        super().__init__(weight.shape[1], weight.shape[0], columns)
        self.register_buffer("weight", torch.ops.mkldnn._reorder_linear_weight(weight, 8), persistent=False)
        self.bias = bias

    def multiply(self, inputs: Tensor) -> Tensor:
        """See `PackedLinear`."""
        return torch.ops.mkldnn._linear_pointwise(inputs, self.weight, self.bias, "none", [], "")


def can_pack(model: PreTrainedModel) -> bool:
    """Whether packed weights exist for this model: on a CPU, in float32 or bfloat16, with a kernel for them."""
    placed = getattr(model, "hf_device_map", None) or getattr(model, "hf_quantizer", None)
    if placed or model.device.type != "cpu" or model.dtype not in PACKED_DTYPES:
        return False
    return kernel_missing() is None or _has_blocked(model.dtype)


def _has_blocked(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    return dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@torch.no_grad()
def packed(model: PreTrainedModel, keep: nn.Module | None = None) -> PreTrainedModel:
    """A twin of the model that shares everything but its linear layers, which have packed copies of the weights; with
    our kernel it attends by that too. The layer `keep` stays as it is.

    Needs memory for a second copy of the matrices unless the original is dropped. Raises ValueError if `can_pack`
    is false.
    """
    if not can_pack(model):
        raise ValueError(
            f"the weights of {type(model).__name__} cannot be packed on {model.device} in {model.dtype}: "
            "that needs a CPU, float32 or bfloat16, and a C++ compiler or oneDNN."
        )
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    twin = copy.deepcopy(model, shared)
    places = list(_linear_layers(twin, keep))
    columns, stretch = Columns(), None
    if kernel_missing() is None:
        stretch = Stretch(sum(panel_bytes(weight) for *_, weight in places))
        attend_by_kernel(twin)
    for name, layer, weight in places:
        twin.set_submodule(name, _packed(layer, weight, columns, stretch))
    return twin


def _linear_layers(model: nn.Module, keep: nn.Module | None) -> Iterator[tuple[str, Any, Tensor]]:
    """Name, layer and weight (features, inputs), in the order of their use."""
    for name, layer in model.named_modules(remove_duplicate=False):
        if keep is not None and getattr(layer, "weight", None) is keep.weight:
            continue
        if type(layer) is nn.Linear:
            yield name, layer, layer.weight
        elif type(layer) is Conv1D:  # GPT-2's linear layer, stored the other way round
            yield name, layer, layer.weight.T


def _packed(layer: nn.Linear | Conv1D, weight: Tensor, columns: Columns, stretch: Stretch | None) -> nn.Module:
    """The layer with its weight packed, or as it is where no kernel is for it."""
    if stretch is not None and fits_panels(weight):
        return PanelLinear(weight, layer.bias, columns, stretch)
    return BlockedLinear(weight.contiguous(), layer.bias, columns) if _has_blocked(weight.dtype) else layer


def shared_columns(model: nn.Module) -> Columns | None:
    """What the packed layers of a model share; None if it has none."""
    return next((part.columns for part in model.modules() if isinstance(part, PackedLinear)), None)
