"""Zeros of which only the pages that are written take memory, so that a store's rows may be unequally long (CPU).

A store has as many slots in every row as the longest text needs; what the system has to find is the pages of slots that
were ever written. Elsewhere, on GPUs, whole stores are allocated.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterable
from math import prod

import torch
from torch import Tensor

LINUX = sys.platform == "linux"
NO_RESERVE = 0x4000  # MAP_NORESERVE: what is never written need not be there


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros of a shape; on a CPU with Linux, pages take memory when they are first written."""
    if not (size := prod(shape) * dtype.itemsize) or not in_pages(device):
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
    tensor = torch.frombuffer(memory, dtype=dtype).view(shape)  # which keeps the memory
    _advise(tensor, mmap.MADV_NOHUGEPAGE)  # a huge page holds several short rows; systems without them refuse
    return tensor


def in_pages(device: torch.device) -> bool:
    return LINUX and device.type == "cpu"


def clear(part: Tensor) -> None:
    """Zero a part (heads, slots, width) of a row of `zeros`; whole pages are given back."""
    if not in_pages(part.device):
        part.zero_()
        return
    for piece in (part,) if part.is_contiguous() else part:
        start, size = piece.data_ptr(), piece.numel() * piece.element_size()
        first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, (start + size) // mmap.PAGESIZE * mmap.PAGESIZE
        if first >= last:
            piece.zero_()
            continue
        flat = piece.flatten().view(torch.uint8)
        whole = flat[first - start : last - start]
        if _advise(whole, mmap.MADV_DONTNEED):
            whole.zero_()
        flat[: first - start] = flat[last - start :] = 0


def bytes_taken(store: Tensor, rows: int, slots: int, lengths: Iterable[int]) -> int:
    """Return the most bytes that a store (rows, heads, slots, width) like this one takes for rows of these lengths."""
    heads, slot = store.shape[1], store.shape[3] * store.element_size()
    if not in_pages(store.device):
        return rows * heads * slots * slot
    return sum(heads * (-(-length * slot // mmap.PAGESIZE) + 1) * mmap.PAGESIZE for length in lengths if length * slot)


def _advise(tensor: Tensor, advice: int) -> int:
    """Tell the system how the memory of a tensor is used -> 0, unless it refuses."""
    size = ctypes.c_size_t(tensor.numel() * tensor.element_size())
    return int(ctypes.CDLL(None).madvise(ctypes.c_void_p(tensor.data_ptr()), size, advice))
