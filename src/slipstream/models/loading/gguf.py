"""Loading checkpoints of llama.cpp (.gguf) on a CPU: weights in most of its formats keep their stored codes.

Names and the order of rows are those of llama.cpp, which interleaves the halves of what it rotates; this is undone.
All other weights are dequantized.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.kernels.cpu import kernel_missing, quantized_rows
from slipstream.kernels.packing import Stretch, can_embed
from slipstream.kernels.quantization import PANEL, QUAD, Precision, QuantizedPanels
from slipstream.kernels.stored_codes import StoredLinear
from slipstream.models.loading.gguf_config import FAMILIES, GROUPED, RAISED, ROTATED, TRANSPOSED, generation_config_of
from slipstream.models.loading.gguf_file import GgufFile, Stored
from slipstream.models.loading.origin import Origin
from slipstream.models.loading.quantized import INT8, PLACED_OTHERWISE, Loaded, Reading, assembled, compute_dtype


@dataclass(frozen=True)
class BlockFormat:
    """A format of blocks of `inputs`, of which every `group` has its own scale, and perhaps an offset.
    Codes of ours of `bits` hold its codes. Scales are float16, or bfloat16 where they are powers of two."""

    number: int
    bits: int
    group: int
    inputs: int = 32
    offsets: bool = False
    powers: bool = False

    def panels(self, rows: int, width: int, stretch: Stretch) -> QuantizedPanels:
        panels, blocks, groups = -(-rows // PANEL), width // self.inputs, width // self.group
        codes = stretch.room((panels, width * self.bits // 8 // QUAD, PANEL, QUAD), torch.uint8)
        kind = torch.bfloat16 if self.powers else torch.float16
        scales = stretch.room((panels, blocks, PANEL), kind)
        zeros = stretch.room((panels, blocks, PANEL), kind) if self.offsets else None
        places = 2 if self.offsets else 1
        steps = stretch.room((panels, groups, places, PANEL), torch.int8) if groups > blocks else None
        return QuantizedPanels(codes, scales, zeros, steps)

    def bytes_of(self, rows: int, width: int) -> int:
        """Return the bytes of the panels of a weight (rows, width)."""
        places, blocks, groups = 2 if self.offsets else 1, width // self.inputs, width // self.group
        of_feature = width * self.bits // 8 + places * (2 * blocks + (groups if groups > blocks else 0))
        return -(-rows // PANEL) * PANEL * of_feature


FORMATS = {  # the formats that are read from their own codes, by llama.cpp's numbers; blocks.cpp unpacks them
    each.number: each
    for each in (
        BlockFormat(2, 4, 32),  # Q4_0
        BlockFormat(3, 4, 32, offsets=True),  # Q4_1
        BlockFormat(6, 8, 32),  # Q5_0
        BlockFormat(7, 8, 32, offsets=True),  # Q5_1
        BlockFormat(8, 8, 32),  # Q8_0
        BlockFormat(10, 4, 16, 256, offsets=True),  # Q2_K
        BlockFormat(11, 4, 16, 256),  # Q3_K
        BlockFormat(12, 4, 32, 256, offsets=True),  # Q4_K
        BlockFormat(13, 8, 32, 256, offsets=True),  # Q5_K
        BlockFormat(14, 8, 16, 256),  # Q6_K
        BlockFormat(20, 8, 32),  # IQ4_NL
        BlockFormat(23, 8, 32, 256),  # IQ4_XS
        BlockFormat(34, 4, 256, 256),  # TQ1_0
        BlockFormat(35, 4, 256, 256),  # TQ2_0
        BlockFormat(39, 8, 32, powers=True),  # MXFP4
    )
}
FLOATS = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16, 28: torch.float64}
Q8_K = 15
BOTH = re.compile(r"layers\.(\d+)\..*(experts\.gate_up_proj|input_linear\.weight)$")
"""The names of what has the gates of all experts, and then their inputs, which a file holds apart."""
HALF = re.compile(r"ffn_(gate|up)_exps\.")
KNOWN_UNUSED = ("rope_freqs.", "rope_factors_long.", "rope_factors_short.")  # the configuration has what they say


@dataclass
class GgufWeights:
    """The weights of a file by transformers' names: `tensors`, and the layers that are `stored` in codes."""

    file: GgufFile
    skeleton: Any  # the model without weights
    heads: tuple[int, int]  # of queries, and of keys and values
    names: dict[str, str]
    shapes: dict[str, torch.Size]
    tensors: dict[str, Tensor] = field(default_factory=dict)
    stored: dict[str, StoredLinear] = field(default_factory=dict)
    dequantized: set[str] = field(default_factory=set)  # formats of matrices that were dequantized
    unknown: list[str] = field(default_factory=list)  # tensors that the model has no place for

    @staticmethod
    def of(file: GgufFile, skeleton: Any) -> GgufWeights:
        heads, groups = (file.value(f"attention.head_count{each}") or 0 for each in ("", "_kv"))
        shapes = {name: tensor.shape for name, tensor in skeleton.state_dict().items()}
        return GgufWeights(file, skeleton, (heads, groups or heads), _names(file, skeleton), shapes)

    def read(self, keep_codes: bool) -> None:
        """Read all tensors: as codes where they fit a linear layer or embeddings, otherwise dequantized."""
        kept = dict(self._kept()) if keep_codes else {}
        stretch = Stretch(sum(FORMATS[tensor.format].bytes_of(*tensor.shape) for _, tensor, _ in kept.values()))
        for layer, tensor, order in kept.values():
            precision = Precision(FORMATS[tensor.format].bits, FORMATS[tensor.format].group)
            panels, shape = unpacked(tensor, stretch, order), (len(tensor.data), tensor.shape[1])
            self.stored[layer] = StoredLinear(precision, panels, shape)
        halves = dict[str, dict[str, Tensor]]()
        for name, tensor in self.file.tensors.items():
            if name in kept:
                continue
            if place := self.names.get(name):
                weights = self._restored(dequantized(tensor), name).contiguous()
                if half := HALF.search(name):
                    halves.setdefault(place, {})[half[1]] = weights
                else:
                    self.tensors[place] = weights.view(self.shapes[place])
            elif not name.startswith(KNOWN_UNUSED):
                self.unknown.append(name)
            if len(tensor.shape) > 1 and tensor.format not in FLOATS:
                self.dequantized.add(format_name(tensor.format))
        whole = {place: both for place, both in halves.items() if len(both) == 2}
        self.tensors |= {place: torch.cat([both["gate"], both["up"]], 1) for place, both in whole.items()}
        self.file.forget_pages()

    def missing(self) -> set[str]:
        loaded = {*self.tensors, *(f"{name}.weight" for name in self.stored)}
        tied = set(getattr(self.skeleton, "all_tied_weights_keys", None) or ())
        return self.shapes.keys() - loaded - tied

    def _kept(self) -> Iterator[tuple[str, tuple[str, Stored, Tensor | None]]]:
        """Yield the tensors that keep their codes, in the model's order: name, with layer, tensor and order of rows."""
        in_file = {name: stored for stored, name in self.names.items()}
        for layer, module in self.skeleton.named_modules():
            tensor = self.file.tensors.get(in_file.get(f"{layer}.weight", ""))
            if tensor is None or tensor.format not in FORMATS or len(tensor.shape) != 2:
                continue
            packs = type(module) is nn.Linear or can_embed(module)
            if packs and (order := self._order_of_rows(tensor)) is not None:
                straight = torch.equal(order, torch.arange(len(order)))
                yield tensor.name, (layer, tensor, None if straight else order)

    def _order_of_rows(self, tensor: Stored) -> Tensor | None:
        """Return the rows in transformers' order; None if it does more to the weight than to reorder its rows."""
        rows = torch.arange(tensor.shape[0])[:, None]
        order = self._restored(rows, tensor.name)
        return order[:, 0] if order.shape == rows.shape and torch.equal(order.sort(0).values, rows) else None

    def _restored(self, weights: Tensor, name: str) -> Tensor:
        """Return the weights of a tensor as transformers has them, where llama.cpp's layout of its family differs."""
        (heads, groups), layout = self.heads, FAMILIES[self.file.architecture].layout
        if layout == ROTATED and (".attn_q." in name or ".attn_k." in name):
            pairs = weights.unflatten(0, (heads if ".attn_q." in name else groups, -1, 2))
            return pairs.transpose(1, 2).reshape(weights.shape)
        if layout == GROUPED and ".attn_qkv." in name:
            parts = weights.unflatten(0, (heads + 2 * groups, -1)).split((heads, groups, groups))
            return torch.cat([each.reshape(groups, -1, *weights.shape[1:]) for each in parts], 1).reshape(weights.shape)
        if layout == TRANSPOSED and name.startswith("blk.") and weights.ndim == 2:
            return weights.T
        if layout == RAISED and name.endswith("norm.weight"):
            return weights - 1
        return torch.log(-weights) if name.endswith("ssm_a") else weights


def _names(file: GgufFile, skeleton: Any) -> dict[str, str]:
    """Return transformers' names of a model's tensors by those of the file, with or without the name of its base."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    [family] = [number for number, name in MODEL_ARCH_NAMES.items() if name == file.architecture]
    known = get_tensor_name_map(family, skeleton.config.num_hidden_layers)
    found: dict[str, str] = {}
    for whole in skeleton.state_dict():
        stem, dot, part = whole.rpartition(".")
        stem, suffix = (stem, dot + part) if part in ("weight", "bias") else (whole, "")
        if experts := BOTH.search(whole):
            found |= {f"blk.{experts[1]}.ffn_{half}_exps.weight": whole for half in ("gate", "up")}
        if whole.endswith("e_score_correction_bias"):
            found[f"blk.{whole.split('.')[2]}.exp_probs_b.bias"] = whole
        names = (stem, stem.replace("block_sparse_moe.", "mlp.").replace("mlp.router", "mlp.gate"))
        known_as = [known.get_name(each) or known.get_name(each.partition(".")[2]) for each in names]
        if in_file := next(filter(None, known_as), None):
            found |= {in_file + each: whole for each in ([suffix] if suffix else ["", ".weight"])}
    return found


def unpacked(tensor: Stored, stretch: Stretch, order: Tensor | None = None) -> QuantizedPanels:
    rows = tensor.data.shape[0]
    panels = FORMATS[tensor.format].panels(rows, tensor.shape[-1], stretch)
    torch.ops.slipstream.unpack_blocks(tensor.data, tensor.format, order, *panels)
    return panels


def dequantized(tensor: Stored) -> Tensor:
    """Return the numbers that a tensor stands for, in float32. Raises ValueError for formats that nobody reads."""
    rows, width = tensor.data.shape[0], tensor.shape[-1]
    if tensor.format in FLOATS:
        return tensor.data.view(FLOATS[tensor.format]).float().view(tensor.shape).clone()
    if tensor.format in FORMATS:
        form = FORMATS[tensor.format]
        panels = unpacked(tensor, Stretch(form.bytes_of(rows, width)))
        return quantized_rows(torch.arange(rows), panels, form.bits, width).view(tensor.shape)
    if tensor.format == Q8_K:  # a scale in float32, 256 codes, and sums of the codes
        blocks = tensor.data.view(rows, -1, 292)
        scales = blocks[..., :4].contiguous().view(torch.float32)
        return (scales * blocks[..., 4:260].view(torch.int8)).view(tensor.shape)
    from gguf import GGMLQuantizationType, dequantize

    try:
        numbers = dequantize(tensor.data.numpy(), GGMLQuantizationType(tensor.format))
    except NotImplementedError as error:
        raise ValueError(f"{tensor.name} is in the format {format_name(tensor.format)}, which is not read") from error
    return torch.from_numpy(numbers).float().view(tensor.shape)


def format_name(number: int) -> str:
    from gguf import GGMLQuantizationType

    return str(GGMLQuantizationType(number).name)


@torch.no_grad()
def load_gguf(
    kind: Any, origin: Origin, place: torch.device, dtype: str | torch.dtype, reading: Reading, options: dict[str, Any]
) -> Loaded | None:
    """Load a .gguf file -> the model and a loading report, as `kind.from_pretrained` returns them.

    Codes are kept on a CPU. None where transformers has to read it: a family that is not in `FAMILIES`, no
    kernels of ours, or options that place the parts of a model.
    """
    path = origin.gguf
    if path is None or kernel_missing() or options.keys() & PLACED_OTHERWISE:
        return None
    file, config = GgufFile.read(path), origin.config()
    if file.architecture not in FAMILIES:
        return None
    with torch.device("meta"):
        skeleton = kind.from_config(config)
    weights, keep_codes = GgufWeights.of(file, skeleton), place.type == "cpu" and not reading.dequantize
    weights.read(keep_codes)
    if wrong := sorted({*weights.missing(), *weights.unknown}):
        raise ValueError(
            f"it differs from the models of its family ({file.architecture}) in {len(wrong)} tensors "
            f"({', '.join(wrong[:3])}): take the model in safetensors"
        )
    formats = {tensor.format for tensor in file.tensors.values() if len(tensor.shape) > 1}
    own = torch.bfloat16 if formats == {30} else torch.float32  # which holds the file's numbers
    wanted = own if isinstance(dtype, str) else dtype
    wanted = compute_dtype(config, wanted) if place.type == "cpu" else wanted
    model, about = assembled(type(skeleton), config, weights.tensors, weights.stored, wanted, reading, options)
    model.config.name_or_path = str(path)
    model.generation_config = generation_config_of(file)
    model.notes = []
    if weights.stored and reading.activations == INT8:
        model.notes.append(
            f"{path.name} multiplies inputs rounded to 8 bits, as llama.cpp does; activations='float' "
            "(--activations float) leaves them unrounded."
        )
    if weights.dequantized:
        names, why = ", ".join(sorted(weights.dequantized)), " have no kernel, and" if keep_codes else ""
        model.notes.append(f"weights of {path.name} in {names}{why} were dequantized.")
    return model, about
