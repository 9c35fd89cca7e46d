"""Nearest-neighbour search of vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


class Embedder(Protocol):
    """Turns the token ids of a request into a vector (dimension,) of length one, float32."""

    @property
    def name(self) -> str:
        """The name of the embedding; vectors of the same name may be compared."""

    @property
    def dimension(self) -> int: ...

    def __call__(self, tokens: Sequence[int]) -> Array: ...


class VectorIndex:
    """Vectors of length one, whose products are cosines; numpy searches 100,000 of them in some milliseconds."""

    def __init__(self, dimension: int) -> None:
        self._names = np.empty(0, np.int64)
        self._vectors = np.empty((0, dimension), np.float32)
        self._count = 0

    def add(self, names: Array, vectors: Array) -> None:
        """Add vectors (n, dimension) under ascending numbers (n,); the arrays grow by doubling."""
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
        """Return (cosine, number) of the nearest vectors, nearest first; of equal ones, the latest first."""
        near = self._vectors[: self._count] @ vector
        best = np.argpartition(-near, count)[:count] if len(near) > count else np.arange(len(near))
        nearest = [(float(near[place]), int(self._names[place])) for place in best]
        return sorted(nearest, key=lambda pair: (-pair[0], -pair[1]))
