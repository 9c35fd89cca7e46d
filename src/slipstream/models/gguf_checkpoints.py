"""Checkpoints of llama.cpp (.gguf) on a CPU: weights whose format fits ours are read from their own codes.

Names and the order of rows are those of llama.cpp, which interleaves the halves of what it rotates; transformers knows
how to undo that, and is asked for it. All other weights are dequantized, as transformers does with all of them.
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
"""Formats whose 32 inputs share a scale and nothing else, and the bits of the codes that hold theirs."""
GROUP = 32
FILE, EMBEDDINGS = "gguf_file", "token_embd.weight"


@dataclass
class GgufWeights:
    """What a file holds, by the names of transformers: `tensors`, and the layers that are `stored` in codes."""

    skeleton: Any  # the model without weights
    processor: Any
    names: dict[str, str]
    tensors: dict[str, Tensor] = field(default_factory=dict)
    stored: dict[str, StoredLinear] = field(default_factory=dict)
    tied_head: StoredLinear | None = None  # the codes of the embeddings, where the head has the same weight

    @staticmethod
    def of(skeleton: Any, architecture: str) -> GgufWeights:
        """Nothing yet of a file of this architecture. Raises NotImplementedError for one without known names."""
        processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=skeleton.config.to_dict())
        return GgufWeights(skeleton, processor, get_gguf_hf_weights_map(skeleton, processor))

    def take(self, tensor: Any) -> None:
        """Take in a tensor of the file."""
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
        """The rows in transformers' order; None where it does more to a weight than to move its rows."""
        rows = np.arange(tensor.data.shape[0], dtype=np.float64)[:, None]
        found = self.processor.process(weights=rows, name=tensor.name, **self._beside())
        if found.name != tensor.name or found.weights.shape != rows.shape:
            return None
        order = torch.from_numpy(np.ascontiguousarray(found.weights[:, 0])).long()
        return order if torch.equal(order.sort().values, torch.arange(len(rows))) else None

    def _take_numbers(self, tensor: Any) -> None:
        from gguf import dequantize

        weights = dequantize(tensor.data, tensor.tensor_type)
        found = self.processor.process(weights=weights, name=tensor.name, **self._beside())
        if found.name in self.names:
            self.tensors[self.names[found.name]] = torch.from_numpy(np.array(found.weights))

    def _beside(self) -> dict[str, Any]:
        """What processors of experts look at, which put their tensors among the others themselves."""
        return {"tensor_key_mapping": self.names, "parsed_parameters": {"tensors": self.tensors}}


def _stored(tensor: Any, bits: int, order: Tensor) -> StoredLinear:
    """A layer from its blocks, each of a scale in float16 and whole numbers, which a scale of one gives as they are."""
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
    """The model of a .gguf file, as `kind.from_pretrained` gives one with its account; None where transformers has to
    read it: none of its weights fits, its architecture has no known names, or it does not go to a CPU in one piece."""
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
