"""`RowCache`, a KV cache of preallocated keys and values with one length per row.

New keys go to each row's own slots; rolling back moves a length and copies nothing. Slots beyond a row's length may
hold leftovers of rejected tokens or padding: the mask (slot <= position) hides them from every query, and the next
tokens overwrite them. On CPUs only pages that were ever written take memory, so that rows may be unequally long.
"""

import ctypes
import mmap
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import chain
from math import prod

import numpy as np
import torch
from torch import Tensor

from slipstream.cache.stores import FloatStore, Store, Stores, each_tensor

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


FIRST_SLOTS = 128
INDEXER = 1_000_000  # the first layer number under which keys of indexers are stored, above all numbers of layers


class RowCache:
    """A cache of keys and values of every layer in stores of one `format`, grown by doubling.

    One forward pass is `place(count, first, stop)`, then `update(layer, keys, values)` by every layer, then `advance`.
    """

    def __init__(self, format: type[Store] = FloatStore) -> None:
        self.lengths: list[int] = []
        self._format = format
        self._capacity = 0
        self._slots = FIRST_SLOTS
        self._layers: dict[int, Store] = {}
        self._views: tuple[slice, dict[int, Store], Stores] | None = None  # rows, and the stores of these
        self._dirty: list[int] = []  # slots that were ever written since a row was added
        self.least = 0  # slots that a pass reads at least, even if fewer are in use
        self.part = slice(0, 0)  # the rows that take part in this pass
        self._count = 0

    # ---- rows ----

    @torch.inference_mode()
    def add(self, rows: int) -> None:
        self.lengths = [*self.lengths, *[0] * rows]
        self._resize(rows=len(self.lengths))

    @torch.inference_mode()
    def fork(self, rows: Sequence[int]) -> None:
        """Append copies of these rows, in this order; only slots in use are copied."""
        start = len(self.lengths)
        self.add(len(rows))
        for copy, row in enumerate(rows, start):
            used = self.lengths[copy] = self._dirty[copy] = self.lengths[row]
            for store in chain.from_iterable(self._layers.values()):
                store[copy, :, :used] = store[row, :, :used]

    @torch.inference_mode()
    def free(self, rows: Sequence[int]) -> None:
        freed = set(rows)
        kept = [row for row in range(len(self.lengths)) if row not in freed]
        start = next((i for i, row in enumerate(kept) if i != row), len(kept))
        for i in range(start, len(kept)):  # ascending, so nothing is overwritten before it has moved
            row, used = kept[i], self.lengths[kept[i]]
            for store in chain.from_iterable(self._layers.values()):
                store[i, :, :used] = store[row, :, :used]
            self._dirty[i] = max(self._dirty[i], used)
            self._clear(i, used)
        for row in range(len(kept), len(self.lengths)):
            self._clear(row, 0)
        self.lengths = [self.lengths[row] for row in kept]

    def _clear(self, row: int, start: int) -> None:
        """Zero a row's slots from `start` on: a damaged text may have left NaN, which passes any mask (0 * NaN)."""
        for store in chain.from_iterable(self._layers.values()):
            clear(store[row], start, self._dirty[row])
        self._dirty[row] = min(self._dirty[row], start)

    @torch.inference_mode()
    def fill(self, row: int, layers: Mapping[int, tuple[Tensor, Tensor]], length: int) -> None:
        """Set a row to `length` tokens; layers have keys and values (heads, count, head_dim) of the last `count`.
        Raises ValueError for layers that texts have no keys in: programs have no inputs for them."""
        if self._layers and (others := layers.keys() - self._layers.keys()):
            raise ValueError(f"it keeps keys of its own in layers {', '.join(map(str, sorted(others)))}.")
        self._resize(slots=length + 1)
        for layer, (keys, values) in layers.items():
            part = self._store(layer, slice(row, row + 1), keys[None], values[None])
            part.write([length - keys.shape[1]], keys[None], values[None])
        self.lengths[row], self._dirty[row] = length, max(self._dirty[row], length)

    @torch.inference_mode()
    def copy(self, row: int, start: int, stop: int) -> Tensor:
        """Copy the bytes of all layers for a row's tokens start..stop to one flat tensor, on the first device."""
        stores = list(chain.from_iterable(self._layers[layer] for layer in sorted(self._layers)))
        parts = (store[row, :, start:stop].flatten().view(torch.uint8) for store in stores)
        return torch.cat([part.to(stores[0].device) for part in parts])

    @torch.inference_mode()
    def paste(self, row: int, blocks: Sequence[Tensor], size: int) -> None:
        """Set a row to the tokens that `copy` returned, in blocks of `size` tokens."""
        length, offset = len(blocks) * size, 0
        self._resize(slots=length + 1)
        together = torch.stack(tuple(blocks))
        for store in chain.from_iterable(self._layers[layer] for layer in sorted(self._layers)):
            heads, dim = store.shape[1], store.shape[3]
            end = offset + heads * size * dim * store.element_size()
            part = together[:, offset:end].clone().view(store.dtype).view(len(blocks), heads, size, dim)
            store[row, :, :length] = part.transpose(0, 1).reshape(heads, length, dim)
            offset = end
        self.lengths[row], self._dirty[row] = length, max(self._dirty[row], length)

    def rollback(self, lengths: Sequence[int]) -> None:
        assert len(lengths) <= len(self.lengths), "one length per row, of the first rows"
        assert all(0 <= new <= old for new, old in zip(lengths, self.lengths, strict=False)), "rollback only shortens"
        self.lengths = [*lengths, *self.lengths[len(lengths) :]]

    @torch.inference_mode()
    def scrub(self) -> None:
        """Zero the slots after each row's length that were ever written."""
        for row, length in enumerate(self.lengths):
            self._clear(row, length)

    @torch.inference_mode()
    def keep(self, starts: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        for row, (start, path) in enumerate(zip(starts, paths, strict=True)):
            if list(path) == list(range(len(path))):
                continue
            slots = [start + place for place in path]
            for store in chain.from_iterable(self._layers.values()):
                store[row, :, start : start + len(path)] = store[row][:, slots]

    # ---- one forward pass ----

    def place(self, count: int, first: int = 0, stop: int | None = None) -> Tensor:
        """Make room for `count` tokens after each of the rows first..stop -> their slots (rows, count), on the CPU."""
        self.reserve(count, first, stop)
        return torch.from_numpy(np.array(self._lengths, np.int64)[:, None] + np.arange(count))

    def reserve(self, count: int, first: int = 0, stop: int | None = None) -> None:
        """Make room for `count` tokens after each of the rows first..stop (None: all from `first` on)."""
        self.part, self._count = slice(first, len(self.lengths) if stop is None else stop), count
        self._resize(slots=self.end + 1)  # a pass over all slots has another layout, which needs new graphs
        for row, length in enumerate(self._lengths, first):
            self._dirty[row] = max(self._dirty[row], length + count)

    @property
    def _lengths(self) -> list[int]:
        return self.lengths[self.part]

    @property
    def stores(self) -> Stores:
        """The stores of every layer, of all rows, with all their slots; empty before the first pass."""
        return self._views_of(slice(0, len(self.lengths)))[1]

    @property
    def taking_part(self) -> Stores:
        return self._views_of(self.part)[1]

    def _views_of(self, rows: slice) -> tuple[dict[int, Store], Stores]:
        """Return the stores of these rows by number, and those of layers: hidden states, behind them, take no part."""
        if self._views is None or self._views[0] != rows:  # kept, as every pass would make dozens of views again
            parts = {layer: each_tensor(self._layers[layer], lambda each: each[rows]) for layer in sorted(self._layers)}
            self._views = rows, parts, Stores(store for layer, store in parts.items() if layer < INDEXER)
        return self._views[1:]

    def _store(self, layer: int, rows: slice, keys: Tensor, values: Tensor) -> Store:
        if layer not in self._layers:
            # What is no layer, keys of indexers and hidden states, stays as it is.
            format = self._format if layer < INDEXER else FloatStore
            like = format.of(keys[:, :, :1], values[:, :, :1])
            self._layers[layer], self._views = each_tensor(like, self._allocate), None
        return self._views_of(rows)[0][layer]

    @property
    def alike(self) -> bool:
        """Whether all rows of this pass have the same length."""
        return len(set(self._lengths)) == 1

    @property
    def past(self) -> int:
        return max(self._lengths, default=0)

    @property
    def end(self) -> int:
        """The number of slots that this pass reads, counted from the first."""
        return max(self.past + self._count, self.least)

    @torch.inference_mode()
    def update(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values (rows, heads, count, head_dim) -> all of the rows' so far, (rows, heads, end, ...)."""
        store = self._store(layer, self.part, keys, values)
        store.write(self._lengths, keys, values)
        return store.read(self.end)

    def look(self, layer: int, slots: Tensor) -> Tensor | None:
        """Return the entries of a layer with one head at slots (rows, n) of the first rows: keys and values
        concatenated, (rows, n, width); None before the first pass."""
        if layer not in self._layers:
            return None
        places = slots.to(self._layers[layer][0].device)  # layers may be on different devices
        rows = torch.arange(len(slots), device=places.device)[:, None]
        return torch.cat([store[rows, 0, places] for store in self._layers[layer]], -1).to(slots.device)

    def update_indexer(self, layer: int, keys: Tensor) -> Tensor:
        """Store the keys (rows, count, dim) by which a layer's indexer selects tokens -> all so far, (rows, end, dim).
        They are stored as the keys of one head, with values of size 0."""
        single = keys[:, None]
        return self.update(INDEXER + layer, single, single[..., :0])[0][:, 0]

    def advance(self, counts: Sequence[int]) -> None:
        """Commit the pass: row first + r has `counts[r]` more tokens."""
        for row, count in enumerate(counts, self.part.start):
            self.lengths[row] += count

    # ---- storage ----

    @property
    def bytes_per_token(self) -> int:
        stores = chain.from_iterable(self._layers.values())
        return sum(store.element_size() * store.shape[1] * store.shape[3] for store in stores)

    @property
    def bytes_allocated(self) -> int:
        """The bytes of all rows: of what was ever written in them, or elsewhere than on CPUs with what is ahead."""
        stores = chain.from_iterable(self._layers.values())
        return sum(bytes_taken(store, self._capacity, self._slots, self._dirty) for store in stores)

    def bytes_for(self, lengths: Sequence[int]) -> int:
        rows, slots = self._shape_for(len(lengths), max(lengths, default=0))
        return sum(bytes_taken(store, rows, slots, lengths) for store in chain.from_iterable(self._layers.values()))

    def _shape_for(self, rows: int, length: int) -> tuple[int, int]:
        return _doubled(1, rows), _doubled(FIRST_SLOTS, max(length, self.least) + 1)

    def _allocate(self, like: Tensor) -> Tensor:
        _, heads, _, dim = like.shape
        return zeros((self._capacity, heads, self._slots, dim), like.dtype, like.device)

    def _resize(self, rows: int = 0, slots: int = 0) -> None:
        """Reallocate if more rows or slots are needed, at the size that the present rows need: memory of a long text
        that has ended is freed then."""
        if rows <= self._capacity and slots <= self._slots:
            return
        shape = self._shape_for(max(rows, len(self.lengths)), max([*self.lengths, slots - 1]))
        (self._capacity, self._slots), self._views = shape, None
        used = [min(dirty, self._slots) for dirty in self._dirty[: self._capacity]]
        self._dirty = used + [0] * (self._capacity - len(used))
        with torch.inference_mode():
            for layer, stores in self._layers.items():
                self._layers[layer] = each_tensor(stores, self._allocate)
                for new, old in zip(self._layers[layer], stores, strict=True):
                    for row, end in enumerate(used):
                        new[row, :, :end] = old[row, :, :end]


def _doubled(size: int, least: int) -> int:
    while size < least:
        size *= 2
    return size
