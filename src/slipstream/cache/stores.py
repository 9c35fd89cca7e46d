"""The formats of keys and values: a class each, which alone writes and reads them, eagerly and inside graphs.

A store is a tuple of tensors (rows, heads, slots, width), so that graphs take it as inputs and a cache moves, copies
and frees rows of any format alike. What is read is a function of each token's own keys and values, never of the tokens
written with it: so the same text gives the same bits however it was divided into passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

Slots = Tensor | Sequence[int]
"""Where new tokens go: the slots (rows, n) of each, or the first of a run of slots in each row."""


class FloatStore(NamedTuple):
    """Keys and values of a layer as the model computes them."""

    keys: Tensor
    values: Tensor

    @staticmethod
    def of(keys: Tensor, values: Tensor) -> FloatStore:
        """Return keys and values (rows, heads, n, width) in this format."""
        return FloatStore(keys, values)

    def write(self, slots: Slots, keys: Tensor, values: Tensor) -> None:
        """Store keys and values (rows, heads, n, width) of new tokens at their slots."""
        _put(self, slots, self.of(keys, values))

    def read(self, end: int) -> tuple[Tensor, Tensor]:
        """Return keys and values (rows, heads, end, width) of the first slots."""
        return self.keys[:, :, :end], self.values[:, :, :end]


class Int8Store(NamedTuple):
    """Keys and values of a layer in 8 bits, with a scale, of the model's type, for each head of each token."""

    key_codes: Tensor
    key_scales: Tensor
    value_codes: Tensor
    value_scales: Tensor

    @staticmethod
    def of(keys: Tensor, values: Tensor) -> Int8Store:
        return Int8Store(*_int8(keys), *_int8(values))

    def write(self, slots: Slots, keys: Tensor, values: Tensor) -> None:
        _put(self, slots, self.of(keys, values))

    def read(self, end: int) -> tuple[Tensor, Tensor]:
        parts = ((self.key_codes, self.key_scales), (self.value_codes, self.value_scales))
        keys, values = (codes[:, :, :end].to(scales.dtype).mul_(scales[:, :, :end]) for codes, scales in parts)
        return keys, values


def _int8(states: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes of states (rows, heads, n, width), and their scales (rows, heads, n, 1)."""
    # The codes are made without the rounded scale, since graphs may leave out that rounding.
    peak = (wide := states.float()).abs().amax(-1, keepdim=True)
    return (wide * (127 / peak.clamp(min=1e-30))).round().to(torch.int8), (peak / 127).to(states.dtype)


Store = FloatStore | Int8Store


class Stores(tuple[Store, ...]):
    """The keys and values of every layer."""

    @cached_property
    def laid(self) -> tuple[list[Tensor], list[torch.Size], list[int]]:
        """Their tensors, and the shapes and addresses of these: asked for once, and not before every pass."""
        tensors = [*chain.from_iterable(self)]
        assert all(map(Tensor.is_contiguous, tensors)), "parts of stores are whole rows"
        return tensors, [tensor.shape for tensor in tensors], [tensor.data_ptr() for tensor in tensors]


def store_format(kv_dtype: str | None) -> type[Store]:
    formats: dict[str | None, type[Store]] = {None: FloatStore, "int8": Int8Store}
    if kv_dtype not in formats:
        raise ValueError(f"kv_dtype={kv_dtype!r} is not known: use 'int8', or None for the type of the model.")
    return formats[kv_dtype]


def each_tensor(store: Store, function: Callable[[Tensor], Tensor]) -> Store:
    return type(store)(*map(function, store))


def _put(stored: Store, slots: Slots, new: Store) -> None:
    if isinstance(slots, Tensor):
        rows = torch.arange(slots.shape[0], device=slots.device)[:, None]
        for tensor, part in zip(stored, new, strict=True):
            tensor[rows, :, slots] = part.transpose(1, 2)
        return
    count, alike = new[0].shape[2], len(set(slots)) == 1
    for tensor, part in zip(stored, new, strict=True):
        if alike:
            tensor[:, :, slots[0] : slots[0] + count] = part
        else:
            for row, start in enumerate(slots):
                tensor[row, :, start : start + count] = part[row]
