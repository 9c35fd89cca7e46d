"""Converting quantized weights of checkpoints (GPTQ, AWQ, compressed-tensors) to our codes, without rounding again.

Only scales in float32 are rounded, to bfloat16: the kernel reads that and float16.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from slipstream.kernels.cpu import quantized_rows
from slipstream.kernels.quantization import GROUP, GROUPS, Codes, Precision, QuantizedPanels

AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The places of the features 0 to 7 in a word of AWQ, which stores 0, 2, 4, 6, 1, 3, 5, 7, the lowest bits first."""


class UnreadFormat(ValueError):
    """Raised for a variant of a method that is not read here; the message names it, and what can be read."""


@dataclass(frozen=True)
class StoredLinear:
    """A linear layer of a checkpoint, with codes for its inputs in the given `order`; None keeps their order."""

    precision: Precision
    panels: QuantizedPanels
    shape: tuple[int, int]  # features and inputs
    order: Tensor | None = None

    def weight(self) -> Tensor:
        features, inputs = self.shape
        weight = quantized_rows(torch.arange(features), self.panels, self.precision.bits, inputs)
        return weight if self.order is None else weight[:, self.order.argsort()]


@dataclass(frozen=True)
class StoredFormat:
    """The format of quantized layers in a checkpoint: each has the tensor `mark`, and usually `parts`."""

    bits: int
    mark: str
    parts: tuple[str, ...]
    read: Callable[[Mapping[str, Tensor], int], StoredLinear]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the tensors that store a layer's weight."""
        return self.mark, *self.parts


def stored_format(settings: Mapping[str, Any]) -> StoredFormat | None:
    """Return the format that a `quantization_config` describes; None for methods that are not read here.
    Raises UnreadFormat, whose message is only the fault, for variants of a method that are not read."""
    make = METHODS.get(str(settings.get("quant_method")))
    return make(settings) if make else None


def _gptq(settings: Mapping[str, Any]) -> StoredFormat:
    kind = settings.get("checkpoint_format", "gptq")
    _refuse_unless(kind in ("gptq", "gptq_v2"), f"its GPTQ weights are laid out as {kind!r}", "gptq or gptq_v2")
    less, size = int(kind == "gptq"), _inputs_of_group(settings.get("group_size"))

    def read(tensors: Mapping[str, Tensor], bits: int) -> StoredLinear:
        codes = unpacked(tensors["qweight"].T, bits)
        zeros = (unpacked(tensors["qzeros"], bits) + less) & ((1 << bits) - 1)
        return _stored(codes, tensors["scales"].T, zeros.T, bits, tensors.get("g_idx"), size)

    return StoredFormat(_bits(settings.get("bits")), "qweight", ("qzeros", "scales", "g_idx"), read)


def _awq(settings: Mapping[str, Any]) -> StoredFormat:
    """Return AWQ's format: codes and zeros packed along the features, eight of them interleaved in a word."""
    kind, bits = settings.get("version", "gemm"), settings.get("bits", settings.get("w_bit"))
    _refuse_unless(str(kind).lower() == "gemm", f"its AWQ weights are laid out as {kind!r}", "gemm")
    _refuse_unless(bits == 4, f"its AWQ weights have {bits} bits", "4")
    size = _inputs_of_group(settings.get("group_size", settings.get("q_group_size")))

    def read(tensors: Mapping[str, Tensor], bits: int) -> StoredLinear:
        codes, zeros = (unpacked(tensors[name], bits).unflatten(1, (-1, 8)) for name in ("qweight", "qzeros"))
        codes, zeros = (each[..., list(AWQ_PLACES)].flatten(1).T for each in (codes, zeros))
        return _stored(codes, tensors["scales"].T, zeros, bits, None, size)

    return StoredFormat(4, "qweight", ("qzeros", "scales"), read)


def _compressed_tensors(settings: Mapping[str, Any]) -> StoredFormat:
    """Return compressed-tensors' format: codes packed along inputs, zeros along features, both offset by the middle."""
    kind, schemes = settings.get("format"), list((settings.get("config_groups") or {}).values())
    _refuse_unless(kind == "pack-quantized", f"its weights are compressed as {kind!r}", "pack-quantized")
    weights = [scheme.get("weights") or {} for scheme in schemes]
    ways = {(each.get("num_bits"), each.get("group_size"), each.get("type", "int")) for each in weights}
    _refuse_unless(len(ways) == 1, f"its layers are quantized in {len(ways)} ways", "one way")
    bits, group_size, numbers = ways.pop()
    _refuse_unless(numbers == "int", f"its codes are of the type {numbers!r}", "int")
    size = _inputs_of_group(group_size)

    def read(tensors: Mapping[str, Tensor], bits: int) -> StoredLinear:
        features, inputs = tensors["weight_shape"].tolist()
        codes = unpacked(tensors["weight_packed"], bits)[:, :inputs]
        zeros, groups = tensors.get("weight_zero_point"), tensors.get("weight_g_idx")
        if zeros is not None:
            zeros = unpacked(zeros.T, bits).T[:features]
        return _stored(codes, tensors["weight_scale"], zeros, bits, groups, size)

    parts = ("weight_shape", "weight_scale", "weight_zero_point", "weight_g_idx")
    return StoredFormat(_bits(bits), "weight_packed", parts, read)


METHODS: dict[str, Callable[[Mapping[str, Any]], StoredFormat]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
}


def _bits(bits: Any) -> int:
    _refuse_unless(bits in GROUP, f"its weights have {bits} bits", "4 or 8")
    return int(bits)


def _refuse_unless(right: bool, what: str, allowed: str) -> None:
    if not right:
        raise UnreadFormat(f"{what}, and only {allowed} can be read from its own codes")


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Unpack words of 32 bits (rows, words) -> codes (rows, words * 32 / bits), the lowest bits of a word first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((words.int()[..., None] >> shifts) & ((1 << bits) - 1)).flatten(1).to(torch.uint8)


def _inputs_of_group(size: Any) -> int | None:
    return int(size) if size is not None and int(size) > 0 else None


def _stored(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, groups: Tensor | None, size: int | None
) -> StoredLinear:
    """Make a layer from codes (features, inputs), scales and zeros (features, groups).

    `groups` (inputs,) is the group of each input, if stored, and `size` the inputs of a group (None: all). Raises
    ValueError, whose message is only the fault, for tensors that do not fit or cannot be read.
    """
    inputs, middle = codes.shape[1], 1 << (bits - 1)
    size = size or inputs
    shape = (len(codes), -(-inputs // size))
    if scales.shape != shape or (zeros is not None and zeros.shape != shape):
        raise ValueError("its codes, scales and zeros have other shapes than its config.json says")
    order = None if groups is None else _order(groups, size)
    codes = codes if order is None else codes[:, order]
    width = _width(size, shape[1])
    repeats, most = -(-size // width), -(-inputs // width)
    scales = scales.repeat_interleave(repeats, 1)[:, :most]
    scales = scales if scales.dtype == torch.float16 else scales.bfloat16()
    if zeros is not None:
        zeros = zeros.repeat_interleave(repeats, 1)[:, :most] if bool((zeros != middle).any()) else None
    filled = pad(codes, (0, -inputs % width), value=middle)
    precision = Precision(bits, width)
    panels = Codes(precision, filled, scales, zeros).into_panels()
    return StoredLinear(precision, panels, (len(codes), inputs), order)


def _order(groups: Tensor, size: int) -> Tensor | None:
    """Return the order of inputs that makes groups contiguous; None if they are, or if all groups are negative."""
    plain = torch.arange(len(groups), device=groups.device) // size
    if bool((groups < 0).all()) or torch.equal(groups.long(), plain):
        return None
    order = groups.argsort(stable=True)
    if not torch.equal(groups[order].long(), plain):
        raise ValueError("its groups of inputs have other sizes than its config.json says")
    return order


def _width(size: int, count: int) -> int:
    """Return the size of the kernel's groups for `count` stored groups of `size` inputs: the same, or a divisor.
    A single stored group may end within a group of the kernel."""
    if count == 1:
        return max(each for each in GROUPS if each <= max(size, GROUPS[0]))
    fitting = [each for each in GROUPS if size % each == 0]
    _refuse_unless(bool(fitting), f"{size} inputs share a scale", "a multiple of 16")
    return fitting[-1]
