"""Loading checkpoints of llama.cpp (.gguf) on a CPU: weights in a format that fits ours keep their stored codes.

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
from slipstream.models.origin import Origin
from slipstream.models.quantized_checkpoints import PLACED_OTHERWISE, Loaded, assembled, compute_dtype, replace_head

FITTING = {"Q8_0": 8, "Q5_0": 8, "IQ4_NL": 8, "Q4_0": 4}
"""The formats in which 32 inputs share a scale and nothing else, and the bits of our codes that can hold theirs."""
GROUP = 32
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
        bits = FITTING.get(tensor.tensor_type.name)
        if bits and layer in self._linear_layers():
            order = self._order_of_rows(tensor)
        if bits and order is not None:
            self.stored[layer] = _stored(tensor, bits, order)
            return
        self._take_numbers(tensor)
        if bits and tensor.name == EMBEDDINGS and self.skeleton.config.tie_word_embeddings:
            self.tied_head = _stored(tensor, bits, torch.arange(len(tensor.data)))

    def complete(self) -> bool:
        """Whether every weight of the model was found."""
        found = {*self.tensors, *(f"{name}.weight" for name in self.stored)}
        tied = set(getattr(self.skeleton, "all_tied_weights_keys", None) or ())
        return not {name for name, _ in self.skeleton.named_parameters()} - found - tied

    def _linear_layers(self) -> set[str]:
        return {name for name, module in self.skeleton.named_modules() if type(module) is nn.Linear}

    def _order_of_rows(self, tensor: Any) -> Tensor | None:
        """Return the rows in transformers' order; None if it does more to the weight than to reorder its rows."""
        rows = np.arange(tensor.data.shape[0], dtype=np.float64)[:, None]
        found = self.processor.process(weights=rows, name=tensor.name, **self._processor_arguments())
        if found.name != tensor.name or found.weights.shape != rows.shape:
            return None
        order = torch.from_numpy(np.ascontiguousarray(found.weights[:, 0])).long()
        return order if torch.equal(order.sort().values, torch.arange(len(rows))) else None

    def _take_numbers(self, tensor: Any) -> None:
        from gguf import dequantize

        weights = dequantize(tensor.data, tensor.tensor_type)
        found = self.processor.process(weights=weights, name=tensor.name, **self._processor_arguments())
        if found.name in self.names:
            self.tensors[self.names[found.name]] = torch.from_numpy(np.array(found.weights))

    def _processor_arguments(self) -> dict[str, Any]:
        """Return the arguments of the processors of experts, which put their tensors among the others themselves."""
        return {"tensor_key_mapping": self.names, "parsed_parameters": {"tensors": self.tensors}}


def _stored(tensor: Any, bits: int, order: Tensor) -> StoredLinear:
    """Return a layer from its blocks, each a float16 scale and integers; these are read by setting the scale to 1."""
    from gguf import GGML_QUANT_SIZES, dequantize

    rows, size = tensor.data.shape[0], GGML_QUANT_SIZES[tensor.tensor_type][1]
    blocks: NDArray[np.uint8] = np.array(tensor.data).reshape(rows, -1, size)
    scales = torch.from_numpy(blocks[..., :2].copy().view(np.float16)[..., 0])
    blocks[..., :2] = np.array([1], np.float16).view(np.uint8)
    precision = Precision(bits, GROUP)
    codes = torch.from_numpy(dequantize(blocks.reshape(rows, -1), tensor.tensor_type) + precision.middle)
    found = Codes(precision, codes.to(torch.uint8)[order], scales.bfloat16()[order])
    return StoredLinear(found, codes.shape[1])


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
    if not any(tensor.tensor_type.name in FITTING for tensor in reader.tensors):
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
