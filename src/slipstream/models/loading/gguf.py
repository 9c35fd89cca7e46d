"""Loading checkpoints of llama.cpp (.gguf) on a CPU: weights in most of its formats keep their stored codes.

Names and the order of rows are those of llama.cpp, which interleaves the halves of what it rotates; transformers'
functions undo that. All other weights are dequantized, as transformers does with all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from slipstream.kernels.cpu import kernel_missing
from slipstream.kernels.quantization import Codes, Precision
from slipstream.kernels.stored_codes import StoredLinear
from slipstream.models.loading.origin import Origin
from slipstream.models.loading.quantized import PLACED_OTHERWISE, Loaded, assembled, compute_dtype, replace_head


@dataclass(frozen=True)
class BlockFormat:
    """A format of blocks in which `group` inputs share a scale, and perhaps an offset.

    Codes of ours of `bits` hold its codes. `ones` are the block's bytes with codes, as (first, end, what they are where
    every code stands for 1).
    """

    bits: int
    group: int
    ones: tuple[tuple[int, int, int], ...]
    offsets: bool = False


FORMATS = {
    "Q8_0": BlockFormat(8, 32, ((2, 34, 0x01),)),
    "Q4_0": BlockFormat(4, 32, ((2, 18, 0x99),)),
    "Q5_0": BlockFormat(8, 32, ((2, 6, 0xFF), (6, 22, 0x11))),
    "Q4_1": BlockFormat(4, 32, ((4, 20, 0x11),), offsets=True),
    "Q5_1": BlockFormat(8, 32, ((4, 8, 0x00), (8, 24, 0x11)), offsets=True),
    "Q2_K": BlockFormat(4, 16, ((16, 80, 0x55),), offsets=True),
    "Q3_K": BlockFormat(4, 16, ((0, 32, 0xFF), (32, 96, 0x55))),
    "Q4_K": BlockFormat(4, 32, ((16, 144, 0x11),), offsets=True),
    "Q5_K": BlockFormat(8, 32, ((16, 48, 0x00), (48, 176, 0x11)), offsets=True),
    "Q6_K": BlockFormat(8, 16, ((0, 128, 0x11), (128, 192, 0xAA))),
    "IQ4_NL": BlockFormat(8, 32, ((2, 18, 0x88),)),
    "IQ4_XS": BlockFormat(8, 32, ((8, 136, 0x88),)),
}
"""The formats that are read from their own codes, by the names of llama.cpp."""
CHUNK = 1 << 22  # the weights that are read at a time, which bounds the memory
FILE, EMBEDDINGS = "gguf_file", "token_embd.weight"


@dataclass
class GgufWeights:
    """The weights read from a file, by transformers' names: `tensors`, and the layers that are `stored` in codes."""

    skeleton: Any  # the model without weights
    processor: Any
    names: dict[str, str]
    tensors: dict[str, Tensor] = field(default_factory=dict)
    stored: dict[str, StoredLinear] = field(default_factory=dict)
    tied_head: StoredLinear | None = None  # the codes of the embeddings, where the head has the same weight

    @staticmethod
    def of(skeleton: Any, architecture: str) -> GgufWeights:
        """Return an empty record for a file. Raises NotImplementedError if its architecture's names are not known."""
        processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=skeleton.config.to_dict())
        return GgufWeights(skeleton, processor, get_gguf_hf_weights_map(skeleton, processor))

    def take(self, tensor: Any) -> None:
        """Add a tensor of the file, as codes if they fit a linear layer, otherwise dequantized."""
        layer, order = self.names.get(tensor.name, "").removesuffix(".weight"), None
        form = FORMATS.get(tensor.tensor_type.name)
        if form and layer in self._linear_layers():
            order = self._order_of_rows(tensor)
        if form and order is not None:
            self.stored[layer] = _stored(tensor, form, order)
            return
        self._take_numbers(tensor)
        if form and tensor.name == EMBEDDINGS and self.skeleton.config.tie_word_embeddings:
            self.tied_head = _stored(tensor, form, torch.arange(len(tensor.data)))

    def complete(self) -> bool:
        """Whether every weight of the model was found."""
        loaded = {*self.tensors, *(f"{name}.weight" for name in self.stored)}
        tied = set(getattr(self.skeleton, "all_tied_weights_keys", None) or ())
        return not {name for name, _ in self.skeleton.named_parameters()} - loaded - tied

    def _linear_layers(self) -> set[str]:
        return {name for name, module in self.skeleton.named_modules() if type(module) is nn.Linear}

    def _order_of_rows(self, tensor: Any) -> Tensor | None:
        """Return the rows in transformers' order; None if it does more to the weight than to reorder its rows."""
        rows = np.arange(tensor.data.shape[0], dtype=np.float64)[:, None]
        processed = self.processor.process(weights=rows, name=tensor.name, **self._processor_arguments())
        if processed.name != tensor.name or processed.weights.shape != rows.shape:
            return None
        order = torch.from_numpy(np.ascontiguousarray(processed.weights[:, 0])).long()
        return order if torch.equal(order.sort().values, torch.arange(len(rows))) else None

    def _take_numbers(self, tensor: Any) -> None:
        """Add a tensor of the file as plain numbers, under the name and in the order of transformers."""
        from gguf import dequantize

        weights = dequantize(tensor.data, tensor.tensor_type)
        processed = self.processor.process(weights=weights, name=tensor.name, **self._processor_arguments())
        if processed.name in self.names:
            self.tensors[self.names[processed.name]] = torch.from_numpy(np.array(processed.weights))

    def _processor_arguments(self) -> dict[str, Any]:
        """Return the arguments of the processors of experts, which put their tensors among the others themselves."""
        return {"tensor_key_mapping": self.names, "parsed_parameters": {"tensors": self.tensors}}


def _stored(tensor: Any, form: BlockFormat, order: Tensor) -> StoredLinear:
    """Return a layer from the blocks of its weight, with its rows in the given order."""
    from gguf import quant_shape_from_byte_shape

    rows, inputs = quant_shape_from_byte_shape(tensor.data.shape, tensor.tensor_type)
    some = max(1, CHUNK // inputs)
    parts = [_codes(tensor.data[at : at + some], tensor.tensor_type, form) for at in range(0, rows, some)]
    codes, scales, offsets = (torch.cat(each)[order] for each in zip(*parts, strict=True))
    return StoredLinear(
        Codes(Precision(form.bits, form.group), codes, scales, offsets if form.offsets else None), inputs
    )


def _codes(data: NDArray[np.uint8], kind: Any, form: BlockFormat) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes (rows, inputs), scales and offsets (rows, groups) of blocks.

    They are found by dequantizing the blocks three times: with all codes 0 if there are offsets, with all codes 1, and
    as they are. So only the package of llama.cpp has to know how scales and codes are packed.
    """
    from gguf import GGML_QUANT_SIZES, dequantize

    def weights(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
        return dequantize(blocks.reshape(len(data), -1), kind).reshape(len(data), -1, form.group)

    blocks = np.array(data).reshape(len(data), -1, GGML_QUANT_SIZES[kind][1])
    values = weights(blocks)
    offsets = np.zeros_like(values[..., :1])
    if form.offsets:
        for first, end, _ in form.ones:
            blocks[..., first:end] = 0
        offsets = weights(blocks)[..., :1]
    for first, end, one in form.ones:
        blocks[..., first:end] = one
    scales = weights(blocks)[..., :1] - offsets
    steps = np.divide(values - offsets, scales, out=np.zeros_like(values), where=scales != 0)
    middle = 0 if form.offsets else 1 << (form.bits - 1)
    codes = torch.from_numpy(np.rint(steps + middle).astype(np.uint8))
    scale, offset = (torch.from_numpy(each).bfloat16().squeeze(2) for each in (scales, offsets))
    return codes.flatten(1), scale, offset


def load_gguf(
    kind: Any, origin: Origin, place: torch.device, dtype: str | torch.dtype, options: dict[str, Any]
) -> Loaded | None:
    """Load a .gguf file -> the model and a loading report, as `kind.from_pretrained` returns them.

    None where transformers has to read it: none of its weights fits, the names of its architecture are not known, or
    it does not go to a CPU in one piece.
    """
    file = origin.options.get(FILE)
    if file is None or place.type != "cpu" or kernel_missing() or options.keys() & PLACED_OTHERWISE:
        return None
    from gguf import GGUFReader

    reader = GGUFReader(Path(origin.place) / file)
    if not any(tensor.tensor_type.name in FORMATS for tensor in reader.tensors):
        return None
    config = AutoConfig.from_pretrained(origin.place, **origin.options)
    with torch.device("meta"):
        skeleton = kind.from_config(config)
    try:
        weights = GgufWeights.of(skeleton, str(reader.fields["general.architecture"].contents()))
    except NotImplementedError:
        return None
    for tensor in reader.tensors:
        weights.take(tensor)
    if not weights.stored or not weights.complete():
        return None
    wanted = compute_dtype(config, dtype)
    loaded = assembled(type(skeleton), config, weights.tensors, weights.stored, wanted, options)
    if weights.tied_head is not None:
        replace_head(loaded[0], weights.tied_head)
    return loaded
