"""Nearest-neighbour search of vectors: exact with numpy, or with an index of faiss for very many."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, Protocol

import numpy as np

EXACT = 100_000
"""The number of vectors that numpy searches in some milliseconds; more are searched with faiss."""

Array = np.ndarray[Any, np.dtype[Any]]


class Embedder(Protocol):
    """Turns the token ids of a request into a vector (dimension,) of length one, float32."""

    @property
    def name(self) -> str:
        """The name of the embedding; vectors of the same name may be compared."""
        ...

    @property
    def dimension(self) -> int: ...

    def __call__(self, tokens: Sequence[int]) -> Array: ...


class Index(Protocol):
    """An index of vectors of length one, whose products are cosines."""

    def add(self, names: Array, vectors: Array) -> None:
        """Add vectors (n, dimension) under ascending numbers (n,)."""
        ...

    def keep(self, names: Array) -> None:
        """Drop all vectors except those of these numbers."""
        ...

    def search(self, vector: Array, count: int) -> list[tuple[float, int]]:
        """Return (cosine, number) of the nearest vectors, nearest first; of equal ones, the latest first."""
        ...


def index(dimension: int, entries: int) -> Index:
    """Make an empty index for at most `entries` vectors. Raises ValueError if that needs faiss and it is missing."""
    if entries <= EXACT:
        return ExactIndex(dimension)
    try:
        return FaissIndex(dimension, import_module("faiss"))
    except ImportError as error:
        raise ValueError(
            f"more than {EXACT} entries need faiss: pip install slipstream[faiss], or lower the limit."
        ) from error


class ExactIndex:
    """An exact index, which computes all products with numpy."""

    def __init__(self, dimension: int) -> None:
        self._names = np.empty(0, np.int64)
        self._vectors = np.empty((0, dimension), np.float32)
        self._count = 0

    def add(self, names: Array, vectors: Array) -> None:
        """Append vectors; the arrays grow by doubling."""
        count = self._count + len(names)
        if count > len(self._names):
            grow = max(count, 2 * len(self._names)) - len(self._names)
            self._names = np.pad(self._names, (0, grow))
            self._vectors = np.pad(self._vectors, ((0, grow), (0, 0)))
        self._names[self._count : count], self._vectors[self._count : count] = names, vectors
        self._count = count

    def keep(self, names: Array) -> None:
        stay = np.flatnonzero(np.isin(self._names[: self._count], names))
        self._names, self._vectors, self._count = self._names[stay], self._vectors[stay], len(stay)

    def search(self, vector: Array, count: int) -> list[tuple[float, int]]:
        near = self._vectors[: self._count] @ vector
        best = np.argpartition(-near, count)[:count] if len(near) > count else np.arange(len(near))
        nearest = [(float(near[place]), int(self._names[place])) for place in best]
        return sorted(nearest, key=lambda pair: (-pair[0], -pair[1]))


class FaissIndex:
    """An index of faiss: an inverted file once there are enough vectors to train it, a flat index before."""

    LISTS, PROBES = 1024, 32
    TRAIN = 40 * LISTS  # faiss needs at least 39 vectors per list

    def __init__(self, dimension: int, faiss: Any) -> None:
        self._faiss, self._dimension = faiss, dimension
        self._index = faiss.IndexIDMap2(faiss.IndexFlatIP(dimension))
        self._lists = False

    def add(self, names: Array, vectors: Array) -> None:
        """Append vectors; at `TRAIN` vectors the flat index becomes an inverted file."""
        self._index.add_with_ids(np.ascontiguousarray(vectors, np.float32), names.astype(np.int64))
        if self._lists or self._index.ntotal < self.TRAIN:
            return
        names = self._faiss.vector_to_array(self._index.id_map)
        vectors = self._index.index.reconstruct_n(0, self._index.ntotal)
        kind = self._faiss.METRIC_INNER_PRODUCT
        lists = self._faiss.IndexIVFFlat(self._faiss.IndexFlatIP(self._dimension), self._dimension, self.LISTS, kind)
        lists.train(vectors)
        lists.add_with_ids(vectors, names)
        lists.nprobe, self._index, self._lists = self.PROBES, lists, True

    def keep(self, names: Array) -> None:
        faiss = self._faiss
        self._index.remove_ids(faiss.IDSelectorNot(faiss.IDSelectorBatch(names.astype(np.int64))))

    def search(self, vector: Array, count: int) -> list[tuple[float, int]]:
        """Return (cosine, number) of the nearest, nearest first; with an inverted file, from the nearest lists."""
        near, names = self._index.search(np.ascontiguousarray(vector[None], np.float32), count)
        nearest = [(float(x), int(name)) for x, name in zip(near[0], names[0], strict=True) if name >= 0]
        return sorted(nearest, key=lambda pair: (-pair[0], -pair[1]))
