"""Packed weights for models on CPUs, in the layout that is multiplied fastest by a few rows; the model is unchanged."""

import copy
import math
import mmap
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from slipstream.kernels.attention import attend_by_kernel, layers_attend_by_kernel
from slipstream.kernels.cpu import kernel_missing, panel_linear, quantized_linear, quantized_rows
from slipstream.kernels.placement import why_in_parts
from slipstream.kernels.quantization import (
    PANEL,
    Codes,
    Precision,
    QuantizedPanels,
    fits_panels,
    into_panels,
    panel_bytes,
    quantize,
)
from slipstream.kernels.stored_codes import StoredLinear

PACKED_DTYPES = (torch.float32, torch.bfloat16)
HUGE_PAGE = 1 << 21  # bytes
WHOLE = re.compile(r"\bencoder\.|\b(encoder_attn|EncDecAttention)\.[kv](_proj)?$")  # layers that read whole sources

ChooseCodes = Callable[[Sequence[str]], Iterable[tuple[str, Codes]]]
"""The names of layers -> each with the codes for its weight, one after another."""


class Stretch:
    """Memory for all weights of a model in one piece, in huge pages where the system has them.
    A pass, which reads all weights in order, is a tenth to a fifth faster than over many small pages."""

    def __init__(self, size: int) -> None:
        """Reserve room for `size` bytes; pages that are never written cost nothing."""
        memory = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        room = torch.frombuffer(memory, dtype=torch.uint8)
        self._free = room[-room.data_ptr() % HUGE_PAGE :]

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor for numbers that are to be written, after the one before. It takes whole cache lines."""
        size = math.prod(shape) * dtype.itemsize
        place, self._free = self._free[:size], self._free[size:]
        return place.view(dtype).view(tuple(shape))

    def hold(self, tensor: Tensor) -> Tensor:
        """Copy a tensor after the one before -> the copy."""
        return self.room(tensor.shape, tensor.dtype).copy_(tensor)


class PackedLinear(nn.Module):
    """A linear layer with a packed copy of the weight: six rows cost about what one does."""

    def __init__(self, shape: Sequence[int], bias: Tensor | None) -> None:
        super().__init__()
        (self.out_features, self.in_features), self.bias = shape, bias

    def plain_weight(self) -> Tensor:
        """Return the weight (features, inputs) before packing, or an approximation of it if it was quantized."""
        raise NotImplementedError


class PanelLinear(PackedLinear):
    """A packed linear layer by our own kernel, which reads panels of the weight at the full bandwidth of the memory."""

    weight: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None, stretch: Stretch) -> None:
        super().__init__(weight.shape, bias)
        self.register_buffer("weight", into_panels(weight, stretch.room), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return panel_linear(inputs, self.weight, self.bias, self.out_features)

    def plain_weight(self) -> Tensor:
        return self.weight.transpose(1, 2).flatten(2).flatten(0, 1)[: self.out_features]


class BlockedLinear(PackedLinear):
    """A packed linear layer by oneDNN in its blocked layout, where our kernel cannot be built."""

    weight: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight.shape, bias)
        self.register_buffer("weight", torch.ops.mkldnn._reorder_linear_weight(weight, 8), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(inputs, self.weight, self.bias, "none", [], "")

    def plain_weight(self) -> Tensor:
        return self.weight.to_dense()


class _InCodes(nn.Module):
    """A layer whose weight is codes, in buffers."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    steps: Tensor | None

    def _hold(self, panels: QuantizedPanels) -> None:
        for name, tensor in panels._asdict().items():
            self.register_buffer(name, tensor, persistent=False)

    @property
    def panels(self) -> QuantizedPanels:
        return QuantizedPanels(self.codes, self.scales, self.zeros, self.steps)


class QuantizedLinear(_InCodes, PackedLinear):
    """A quantized linear layer by our own kernel: whole numbers with a scale for each group.
    It reads half or a quarter of the memory."""

    order: Tensor | None
    weight: Tensor

    def __init__(
        self, precision: Precision, panels: QuantizedPanels, layer: Any, order: Tensor | None = None, whole: bool = True
    ) -> None:
        """Make the layer from the panels of the weight of `layer`.

        `order` (in_features,) are the inputs that the codes are for, if they are not in the order of the inputs.
        Without `whole`, inputs are not rounded to 8 bits.
        """
        super().__init__(_shape(layer), layer.bias)
        self.precision, self.whole = precision, whole
        # It is empty; some models, as T5, read the dtype of a weight to convert their inputs.
        self.register_buffer("weight", torch.empty(0, dtype=layer.weight.dtype), persistent=False)
        self._hold(panels)
        self.register_buffer("order", order, persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = inputs if self.order is None else inputs.index_select(-1, self.order)
        return quantized_linear(inputs, self.panels, self.bias, self.out_features, self.precision.bits, self.whole)

    def plain_weight(self) -> Tensor:
        """Return the weight that the codes stand for, in float32."""
        return StoredLinear(self.precision, self.panels, _shape(self), self.order).weight()


@contextmanager
def inputs_as_they_are(model: nn.Module) -> Iterator[bool]:
    """Let quantized layers multiply inputs without rounding them -> whether any layer of the model rounds them else."""
    layers = [each for each in model.modules() if isinstance(each, QuantizedLinear) and each.whole]
    for each in layers:
        each.whole = False
    try:
        yield bool(layers)
    finally:
        for each in layers:
            each.whole = True


class QuantizedEmbedding(_InCodes):
    """Input embeddings that stay quantized: tokens (...) -> (..., width), dequantized row by row.
    Those of a tied head are the head's panels, so that they take no memory."""

    scale: Tensor | None

    def __init__(self, precision: Precision, panels: QuantizedPanels, layer: Any) -> None:
        super().__init__()
        scale = getattr(layer, "embed_scale", None)
        self.register_buffer("scale", None if scale is None else torch.as_tensor(scale), persistent=False)
        self.precision, self.dtype, self.padding_idx = precision, layer.weight.dtype, layer.padding_idx
        self.num_embeddings, self.embedding_dim = layer.num_embeddings, layer.embedding_dim
        self._hold(panels)

    def forward(self, tokens: Tensor) -> Tensor:
        rows = self._rows(tokens.reshape(-1)).view(*tokens.shape, self.embedding_dim)
        return rows if self.scale is None else rows * self.scale.to(self.dtype)

    @property
    def weight(self) -> Tensor:
        """The embeddings of all tokens without the factor, made anew at each call."""
        return self._rows(torch.arange(self.num_embeddings))

    def _rows(self, tokens: Tensor) -> Tensor:
        return quantized_rows(tokens, self.panels, self.precision.bits, self.embedding_dim).to(self.dtype)


def can_embed(layer: nn.Module) -> bool:
    """Whether `QuantizedEmbedding` can replace a layer: plain embeddings, or with a factor, as Gemma's."""
    scaled = isinstance(layer, nn.Embedding) and type(layer).__name__.endswith("ScaledWordEmbedding")
    return type(layer) is nn.Embedding or scaled


def precision_of(model: nn.Module) -> Precision | None:
    """Return the precision of a model's quantized layers; None if it has none."""
    return next((layer.precision for layer in model.modules() if isinstance(layer, QuantizedLinear)), None)


def can_pack(model: PreTrainedModel) -> bool:
    """Whether weights of this model can be packed: on a CPU, in float32 or bfloat16, with a kernel for them."""
    placed = why_in_parts(model) or getattr(model, "hf_quantizer", None)
    if placed or model.device.type != "cpu" or model.dtype not in PACKED_DTYPES:
        return False
    return kernel_missing() is None or has_blocked(model.dtype)


def has_blocked(dtype: torch.dtype) -> bool:
    """Whether oneDNN can lay out weights in blocks here; in bfloat16 some processors cannot."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    return dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@torch.no_grad()
def packed(model: PreTrainedModel) -> PreTrainedModel:
    """Return a twin of the model that shares everything but its linear layers, which have packed copies of the weights.

    With our kernel, attention runs by it too. What reads whole sounds stays as it is, faster by torch. Needs memory for
    a second copy of the matrices unless the original is dropped. Raises ValueError if `can_pack` is false.
    """
    if not can_pack(model):
        raise ValueError(
            f"the weights of {type(model).__name__} cannot be packed on {model.device} in {model.dtype}: "
            "that needs a CPU, float32 or bfloat16, and a C++ compiler or oneDNN."
        )
    twin = twin_of(model)
    found = _linear_layers(twin, twin.main_input_name != "input_features")
    places = [(name, layer) for name, layer in found if not isinstance(layer, PackedLinear)]
    stretch = None
    if kernel_missing() is None:
        stretch = Stretch(sum(panel_bytes(plain_weight(layer)) for _, layer in places))
        attend_by_kernel(twin)
    for name, layer in places:
        twin.set_submodule(name, _packed(layer, stretch))
    return twin


@torch.no_grad()
def pack_layers(network: nn.Module, precision: Precision | None = None) -> None:
    """Replace the linear layers of a network that is not a model of transformers by packed copies.

    With a precision, they are quantized. Its attention runs by our kernel then. Nothing changes where our kernels do
    not run, on its device or in its dtype.
    """
    places = [(name, layer) for name, layer in network.named_modules() if isinstance(layer, nn.Linear)]
    fit = all(layer.weight.device.type == "cpu" and layer.weight.dtype in PACKED_DTYPES for _, layer in places)
    if not places or not fit or kernel_missing() is not None:
        return
    layers_attend_by_kernel(network)
    sizes = (precision.bytes_of(*_shape(each)) if precision else panel_bytes(each.weight) for _, each in places)
    stretch = Stretch(sum(sizes))
    for name, layer in places:
        if precision:
            panels = quantize(layer.weight, precision).into_panels().map(stretch.hold)
            network.set_submodule(name, QuantizedLinear(precision, panels, layer))
        else:
            network.set_submodule(name, _packed(layer, stretch))


@torch.no_grad()
def quantized(
    model: PreTrainedModel, precision: Precision, choose: ChooseCodes | None = None, reads: bool = True
) -> PreTrainedModel:
    """Return a twin of the model that shares everything but its linear layers, whose weights are quantized.

    Layers with fewer features than a panel has, as routers, stay as they are. The model may be packed; it must have no
    `quantizing_fault`. Codes are the nearest ones, or those that `choose` returns. What `reads` sources may stay too.
    """
    twin = twin_of(model)
    attend_by_kernel(twin)
    places = {name: layer for name, layer in _linear_layers(twin, reads) if _shape(layer)[0] >= PANEL}
    stretch = Stretch(sum(precision.bytes_of(*_shape(layer)) for layer in places.values()))
    nearest = ((name, quantize(plain_weight(layer), precision)) for name, layer in places.items())
    for name, codes in choose(list(places)) if choose else nearest:
        panels = codes.into_panels().map(stretch.hold)
        twin.set_submodule(name, QuantizedLinear(precision, panels, places[name]))
    return twin


def quantizing_fault(model: PreTrainedModel) -> str | None:
    """Return why the weights of a model cannot be quantized here, or None."""
    if getattr(model, "hf_quantizer", None):
        return "they are quantized already"
    if why := why_in_parts(model):
        return f"that is for models in one piece, and {why}"
    if model.device.type != "cpu":
        return "that is for models on a CPU"
    if model.dtype not in PACKED_DTYPES:
        return f"that is for float32 and bfloat16, not {model.dtype}"
    return kernel_missing()


def layer_bytes(model: nn.Module) -> int:
    """Return the bytes of the weights of a model's linear layers: most of what a pass of a few tokens reads."""
    layers = {id(layer): layer for _, layer in _linear_layers(model)}
    return sum(each.nbytes for layer in layers.values() for each in (*layer.parameters(), *layer.buffers()))


def lowest_bits(model: nn.Module) -> int | None:
    """Return the fewest bits of a model's quantized weights; None if none are quantized."""
    bits = (layer.precision.bits for layer in model.modules() if isinstance(layer, QuantizedLinear))
    return min(bits, default=None)


def twin_of(model: PreTrainedModel) -> PreTrainedModel:
    return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})


def _linear_layers(model: nn.Module, reads: bool = True) -> Iterator[tuple[str, Any]]:
    for name, layer in model.named_modules(remove_duplicate=False):
        linear = type(layer) in (nn.Linear, Conv1D) or isinstance(layer, PackedLinear)
        if linear and (reads or not WHOLE.search(name)):
            yield name, layer


def plain_weight(layer: Any) -> Tensor:
    if isinstance(layer, PackedLinear):
        return layer.plain_weight()
    weight: Tensor = layer.weight
    return weight.T if type(layer) is Conv1D else weight  # GPT-2's is stored the other way round


def _shape(layer: Any) -> tuple[int, int]:
    if type(layer) is Conv1D:
        return layer.weight.shape[1], layer.weight.shape[0]
    return layer.out_features, layer.in_features


def _packed(layer: nn.Linear | Conv1D, stretch: Stretch | None) -> nn.Module:
    weight = plain_weight(layer)
    if stretch is not None and fits_panels(weight):
        return PanelLinear(weight, layer.bias, stretch)
    return BlockedLinear(weight.contiguous(), layer.bias) if has_blocked(weight.dtype) else layer


def is_packed(model: nn.Module) -> bool:
    return any(isinstance(part, PackedLinear) for part in model.modules())
