"""Weights as integers of 8 or 4 bits, with a scale for each group of inputs of a feature.

A weight is scale * (code - zero), or scale * code + offset. It takes a half or a quarter of the bytes of bfloat16, and
reading weights takes most of the time of a pass of a few tokens on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

PANEL = 32  # features that lie side by side; lanes.h has the same number
STEP = {torch.float32: 1, torch.bfloat16: 2}  # inputs of a feature that lie side by side


def fits_panels(weight: Tensor) -> bool:
    """Whether `into_panels` accepts a weight: float32, or bfloat16 with an even number of inputs."""
    return weight.dtype in STEP and weight.shape[1] % STEP[weight.dtype] == 0


def panel_bytes(weight: Tensor) -> int:
    return -(-weight.shape[0] // PANEL) * PANEL * weight.shape[1] * weight.element_size()


def into_panels(weight: Tensor, room: Callable[..., Tensor] = torch.empty) -> Tensor:
    """Reorder (features, inputs) -> (panels, inputs / STEP, PANEL, STEP), with the last panel filled up with zeros.
    They are written to the tensor that `room` returns for a shape and a dtype."""
    features, inputs = weight.shape
    if not fits_panels(weight):
        raise ValueError(f"a weight of {features} x {inputs} in {weight.dtype} has no packed form.")
    step = STEP[weight.dtype]
    plain = weight.is_contiguous() and features % PANEL == weight.storage_offset() % step == 0
    full = weight if plain else pad(weight, (0, 0, 0, -features % PANEL)).contiguous()
    panels = room((len(full) // PANEL, inputs // step, PANEL, step), dtype=weight.dtype)
    # What lies side by side moves as one number of 32 bits, in a tenth of the time.
    panels.view(torch.int32).copy_(full.view(torch.int32).view(-1, PANEL, inputs // step, 1).transpose(1, 2))
    return panels


QUAD = 4  # inputs that one instruction multiplies; quantized.cpp has the same number
GROUPS = (16, 32, 64, 128, 256)  # the possible numbers of inputs of a feature that share a scale
GROUP = {8: 64, 4: 32}  # the default numbers of inputs that share a scale, by bits
NEAREST, GPTQ = ROUNDINGS = ("nearest", "gptq")  # the ways of choosing codes; `kept_codes` has the second


class QuantizedPanels(NamedTuple):
    """A quantized weight as the kernel reads it; weights.h describes the layout.

    Codes are (panels, inputs / step, PANEL, QUAD), scales and zeros (panels, groups, PANEL). Zeros of uint8 are codes
    of zero, others are offsets. With `steps` (panels, groups, 1 or 2, PANEL) of int8, scales and offsets belong to
    blocks of several groups, and those of a group are so many of them.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    steps: Tensor | None = None

    def map(self, move: Callable[[Tensor], Tensor]) -> QuantizedPanels:
        zeros, steps = (None if each is None else move(each) for each in (self.zeros, self.steps))
        return QuantizedPanels(move(self.codes), move(self.scales), zeros, steps)


@dataclass(frozen=True)
class Precision:
    """The precision of quantized weights: codes of `bits`, with a scale for every `group` inputs of a feature.

    `rounding` is "nearest" for the nearest codes, or "gptq" for codes chosen for the inputs of layers in text that the
    model writes itself. Raises ValueError for other values.
    """

    bits: int
    group: int
    rounding: str = NEAREST

    def __post_init__(self) -> None:
        if self.bits not in GROUP:
            raise ValueError(f"weights of {self.bits} bits are not possible: use int8 or int4.")
        if self.group not in GROUPS:
            raise ValueError(f"group={self.group} is not possible: use {', '.join(map(str, GROUPS))}.")
        if self.rounding not in ROUNDINGS:
            raise ValueError(f"rounding={self.rounding} is not possible: use {' or '.join(ROUNDINGS)}.")

    def __str__(self) -> str:
        options = [f"group={self.group}"] if self.group != GROUP[self.bits] else []
        options += [f"rounding={self.rounding}"] if self.rounding != NEAREST else []
        return f"int{self.bits}" + (f"?{'&'.join(options)}" if options else "")

    @staticmethod
    def named(name: str, group: int | None = None, rounding: str = NEAREST) -> Precision:
        bits = {"int8": 8, "int4": 4}.get(name)
        if bits is None:
            raise ValueError(f"{name!r} is no precision of weights: use int8 or int4.")
        return Precision(bits, GROUP[bits] if group is None else group, rounding)

    @staticmethod
    def read(text: str) -> Precision:
        """Read a precision as `str` writes it: "int8", or "int4?group=64&rounding=gptq". ValueError for other texts."""
        name, mark, tail = str(text).partition("?")
        options = dict(pair.split("=", 1) for pair in tail.split("&") if "=" in pair)
        group = options.pop("group", None)
        right = (group is None or group.isdecimal()) and options.keys() <= {"rounding"} and bool(mark) == bool(tail)
        if not right or tail.count("&") + bool(tail) != len(options) + (group is not None):
            raise ValueError(f"{text!r} is no precision of weights: write int8, int4 or int4?group=64&rounding=gptq.")
        return Precision.named(name, None if group is None else int(group), **options)

    @property
    def middle(self) -> int:
        """The code of the weight zero, unless `Codes.zeros` gives another."""
        return 1 << (self.bits - 1)

    def bytes_of(self, features: int, inputs: int) -> int:
        """Return the bytes of a quantized weight (features, inputs) in panels."""
        groups = -(-inputs // self.group)
        return -(-features // PANEL) * PANEL * groups * (self.group * self.bits // 8 + 2)


@dataclass(frozen=True)
class Codes:
    """A quantized weight: integer `codes` (features, groups * group) from 0, and `scales` (features, groups).

    Scales are bfloat16 or float16. The code of zero is the middle of the range, or in `zeros` (features, groups) of
    uint8. Zeros of float16, as the scales then are, are offsets: the weights of the code 0. Inputs that only fill up
    the last group have the weight zero, or their offset.
    """

    precision: Precision
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None

    def weight(self) -> Tensor:
        parts = self.codes.unflatten(1, (-1, self.precision.group)).int()
        scales = self.scales.float()[..., None]
        if self.zeros is not None and self.zeros.dtype != torch.uint8:
            return (parts * scales + self.zeros.float()[..., None]).flatten(1)
        zeros = self.precision.middle if self.zeros is None else self.zeros.int()[..., None]
        return ((parts - zeros) * scales).flatten(1)

    def into_panels(self) -> QuantizedPanels:
        """Return the weight in the layout of the kernel, with the last panel filled up with scales of zero."""
        codes = pad(self.codes, (0, 0, 0, -len(self.codes) % PANEL))
        parts = codes.view(len(codes) // PANEL, PANEL, -1, 8 // self.precision.bits, QUAD)
        low, *high = parts.unbind(3)
        zeros = None if self.zeros is None else _groups_in_panels(self.zeros)
        packed = low | (high[0] << 4) if high else low
        return QuantizedPanels(packed.transpose(1, 2).contiguous(), _groups_in_panels(self.scales), zeros)


def _groups_in_panels(tensor: Tensor) -> Tensor:
    """Lay out numbers of groups in panels: (features, groups) -> (panels, groups, PANEL)."""
    full = pad(tensor, (0, 0, 0, -len(tensor) % PANEL))
    return full.view(-1, PANEL, tensor.shape[1]).transpose(1, 2).contiguous()


@torch.no_grad()
def quantize(weight: Tensor, precision: Precision) -> Codes:
    """Quantize a weight (features, inputs) to the nearest codes around zero, by the kernel, which has to be loaded.

    Each group gets, of the scales that are tried, the one with the least squared error: for 8 bits that of its greatest
    weight, for 4 bits also smaller ones, since to cut off the greatest weight may cost less than coarser steps for all
    others. Of 16 codes one more lies below zero than above it; the sign of a scale puts it on the side of the greatest.
    """
    full = weight if weight.dtype in (torch.float32, torch.bfloat16) else weight.float()
    codes, scales = torch.ops.slipstream.nearest_codes(full.contiguous(), precision.group, precision.bits)
    return Codes(precision, codes, scales)
