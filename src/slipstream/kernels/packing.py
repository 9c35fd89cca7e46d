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
from slipstream.kernels.cpu import kernel_missing, panel_linear, quantized_linear
from slipstream.kernels.panels import PANEL, fits_panels, from_panels, into_panels, panel_bytes
from slipstream.kernels.placement import why_in_parts
from slipstream.kernels.quantization import Codes, Precision, quantize

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

    def plain_weight(self) -> Tensor:
        """The weight (features, inputs) as it was, or what stands for it."""
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

    def plain_weight(self) -> Tensor:
        """See `PackedLinear`."""
        return from_panels(self.weight, self.out_features)


class BlockedLinear(PackedLinear):
    """By oneDNN in its blocked layout, where our kernel cannot be built."""

    weight: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None, columns: Columns) -> None:
        super().__init__(weight.shape[1], weight.shape[0], columns)
        self.register_buffer("weight", torch.ops.mkldnn._reorder_linear_weight(weight, 8), persistent=False)
        self.bias = bias

    def multiply(self, inputs: Tensor) -> Tensor:
        """See `PackedLinear`."""
        return torch.ops.mkldnn._linear_pointwise(inputs, self.weight, self.bias, "none", [], "")

    def plain_weight(self) -> Tensor:
        """See `PackedLinear`."""
        return self.weight.to_dense()


class QuantizedLinear(PackedLinear):
    """By our own kernel, from whole numbers with a scale for each group: a half or a quarter of the memory to read."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    order: Tensor | None
    weight: Tensor

    def __init__(
        self,
        codes: Codes,
        layer: Any,
        columns: Columns,
        stretch: Stretch | None = None,
        order: Tensor | None = None,
    ) -> None:
        """The codes stand for the weight of `layer`. `order` (in_features,) says which input they are for, where they
        are not in the order of the inputs."""
        super().__init__(_shape(layer)[1], len(codes.scales), columns)
        self.precision, self.bias = codes.precision, layer.bias
        # It holds nothing: some models, as T5, ask a weight for the type that its inputs should have.
        self.register_buffer("weight", torch.empty(0, dtype=layer.weight.dtype), persistent=False)
        for name, panels in zip(("codes", "scales", "zeros"), codes.into_panels(), strict=True):
            held = stretch.hold(panels) if stretch and panels is not None else panels
            self.register_buffer(name, held, persistent=False)
        self.register_buffer("order", order, persistent=False)

    def multiply(self, inputs: Tensor) -> Tensor:
        """See `PackedLinear`."""
        inputs = inputs if self.order is None else inputs.index_select(-1, self.order)
        panels = (self.codes, self.scales, self.zeros)
        return quantized_linear(inputs, panels, self.bias, self.out_features, self.precision.bits)

    def plain_weight(self) -> Tensor:
        """What stands for the weight, in float32."""
        codes = Codes.from_panels(self.precision, (self.codes, self.scales, self.zeros), self.out_features)
        weight = codes.weight()[:, : self.in_features]
        return weight if self.order is None else weight[:, self.order.argsort()]


def can_pack(model: PreTrainedModel) -> bool:
    """Whether packed weights exist for this model: on a CPU, in float32 or bfloat16, with a kernel for them."""
    placed = why_in_parts(model) or getattr(model, "hf_quantizer", None)
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
    twin = _twin(model)
    columns = shared_columns(twin) or Columns()
    plain = ((name, layer) for name, layer in _linear_layers(twin) if not isinstance(layer, PackedLinear))
    places = [(name, layer) for name, layer in plain if keep is None or layer.weight is not keep.weight]
    stretch = None
    if kernel_missing() is None:
        stretch = Stretch(sum(panel_bytes(plain_weight(layer)) for _, layer in places))
        attend_by_kernel(twin)
    for name, layer in places:
        twin.set_submodule(name, _packed(layer, columns, stretch))
    return twin


@torch.no_grad()
def pack_layers(network: nn.Module) -> None:
    """Put packed copies in place of the linear layers of a network that is no model of transformers, where our kernel
    runs on its device and in its dtype; elsewhere they stay as they are."""
    places = [(name, layer) for name, layer in network.named_modules() if isinstance(layer, nn.Linear)]
    fit = all(layer.weight.device.type == "cpu" and layer.weight.dtype in PACKED_DTYPES for _, layer in places)
    if not fit or kernel_missing() is not None:
        return
    columns, stretch = Columns(), Stretch(sum(panel_bytes(layer.weight) for _, layer in places))
    for name, layer in places:
        network.set_submodule(name, _packed(layer, columns, stretch))


@torch.no_grad()
def quantized(model: PreTrainedModel, precision: Precision) -> PreTrainedModel:
    """A twin of the model that shares everything but its linear layers, whose weights are quantized; those with fewer
    features than a panel has, as routers, stay as they are. The model may be packed; it must have no
    `quantizing_fault`.
    """
    twin = _twin(model)
    attend_by_kernel(twin)
    columns = shared_columns(twin) or Columns()
    places = [(name, layer) for name, layer in _linear_layers(twin) if _shape(layer)[0] >= PANEL]
    stretch = Stretch(sum(precision.bytes_of(*_shape(layer)) for _, layer in places))
    for name, layer in places:
        codes = quantize(plain_weight(layer), precision)
        twin.set_submodule(name, QuantizedLinear(codes, layer, columns, stretch))
    return twin


def quantizing_fault(model: PreTrainedModel) -> str | None:
    """Why the weights of a model cannot be quantized here, or None."""
    if getattr(model, "hf_quantizer", None):
        return "they are quantized already"
    if why := why_in_parts(model):
        return f"that is for models in one piece, and {why}"
    if model.device.type != "cpu":
        return "that is for models on a CPU"
    if model.dtype not in PACKED_DTYPES:
        return f"that is for float32 and bfloat16, not {model.dtype}"
    return kernel_missing()


def _twin(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of the modules with the same tensors."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})


def _linear_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Name and layer, in the order of their use."""
    for name, layer in model.named_modules(remove_duplicate=False):
        if type(layer) in (nn.Linear, Conv1D) or isinstance(layer, PackedLinear):
            yield name, layer


def plain_weight(layer: Any) -> Tensor:
    """The weight (features, inputs) of a linear layer."""
    if isinstance(layer, PackedLinear):
        return layer.plain_weight()
    weight: Tensor = layer.weight
    return weight.T if type(layer) is Conv1D else weight  # GPT-2's is stored the other way round


def _shape(layer: Any) -> tuple[int, int]:
    """Features and inputs of a linear layer."""
    if type(layer) is Conv1D:
        return layer.weight.shape[1], layer.weight.shape[0]
    return layer.out_features, layer.in_features


def _packed(layer: nn.Linear | Conv1D, columns: Columns, stretch: Stretch | None) -> nn.Module:
    """The layer with its weight packed, or as it is where no kernel is for it."""
    weight = plain_weight(layer)
    if stretch is not None and fits_panels(weight):
        return PanelLinear(weight, layer.bias, columns, stretch)
    return BlockedLinear(weight.contiguous(), layer.bias, columns) if _has_blocked(weight.dtype) else layer


def shared_columns(model: nn.Module) -> Columns | None:
    """What the packed layers of a model share; None if it has none."""
    return next((part.columns for part in model.modules() if isinstance(part, PackedLinear)), None)
