"""Zeros of which only the pages that are written take memory, so that a store's rows may be unequally long (CPU).

A store has as many slots in every row as the longest text needs; what the system has to find is the pages of slots that
were ever written. Elsewhere, on GPUs, whole stores are allocated.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterable
from functools import cache
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
    _advise(tensor.data_ptr(), size, mmap.MADV_NOHUGEPAGE)  # one holds several short rows; systems without them refuse
    return tensor


def in_pages(device: torch.device) -> bool:
    return LINUX and device.type == "cpu"


def clear(row: Tensor, start: int, stop: int) -> None:
    """Zero the written slots start..stop of a row (heads, slots, width) of `zeros`; whole pages are given back."""
    part = row[:, start:stop]
    if not in_pages(part.device):
        part.zero_()
        return
    for piece in part if start else (row,):  # all of it is one piece, and pages that were never written are not there
        begin, end = piece.data_ptr(), piece.data_ptr() + piece.nbytes
        first, last = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if first >= last or _advise(first, last - first, mmap.MADV_DONTNEED):
            piece.zero_()
        else:
            ctypes.memset(begin, 0, first - begin)
            ctypes.memset(last, 0, end - last)


def bytes_taken(store: Tensor, rows: int, slots: int, lengths: Iterable[int]) -> int:
    """Return the most bytes that a store (rows, heads, slots, width) like this one takes for rows of these lengths."""
    heads, slot = store.shape[1], store.shape[3] * store.element_size()
    if not in_pages(store.device):
        return rows * heads * slots * slot
    return sum(heads * (-(-length * slot // mmap.PAGESIZE) + 1) * mmap.PAGESIZE for length in lengths if length * slot)


def _advise(address: int, size: int, advice: int) -> int:
    """Tell the system how memory is used -> 0, unless it refuses."""
    return int(_library().madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), advice))


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(None)
