"""Embeddings of requests, by which the response memory finds similar ones, and the search for the nearest."""

import hashlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

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


DIMENSION = 256
"""The size of stored vectors: wider embeddings are projected, which keeps angles to a few percent (Johnson and
Lindenstrauss)."""

WINDOW, HALF_LIFE = 512, 128
"""The number of last tokens that are used, and the distance from the end at which a token's weight is half."""


class InputEmbeddings:
    """Embeds requests by the mean of the target's own input embeddings, in some microseconds without another model.

    The question of a request is at its end, after instructions that all requests share: a token counts less the
    further it is from the end, each distinct one once. Embeddings are taken relative to their mean over the
    vocabulary, and rare tokens count more: with the rank r in the vocabulary, ordered by frequency as merges
    are, p is about 1 / (r ln vocab) (Zipf) and the weight a / (a + p), a = 0.001
    (Arora et al. 2017, "smooth inverse frequency").
    """

    def __init__(self, weights: Tensor) -> None:
        """Embed by the input embeddings `weights` (vocab, width), on any device; they are shared, not copied."""
        self._weights = weights.detach()
        vocab, width = weights.shape
        self.dimension = min(width, DIMENSION)
        some = torch.linspace(0, vocab - 1, min(vocab, 256), device=weights.device).long()
        rows = self._rows(some)
        self._mean = rows.mean(0)
        self.name = f"input-embeddings:{hashlib.sha256(rows.astype('<f4').tobytes()).hexdigest()[:16]}"
        # RandomState is frozen: the same numbers in every version of numpy, so files stay readable.
        signs = np.random.RandomState(0).randint(0, 2, (width, self.dimension)) * 2.0 - 1.0
        self._project = None if width <= DIMENSION else signs.astype(np.float32)

    def __call__(self, tokens: Sequence[int]) -> Array:
        last = {token: place for place, token in enumerate(tokens[-WINDOW:])}
        ids, places = np.array(list(last)), np.array(list(last.values()))
        p = 1 / ((ids + 1) * np.log(len(self._weights) + 1))
        weights = 0.5 ** ((len(tokens[-WINDOW:]) - 1 - places) / HALF_LIFE) * 1e-3 / (1e-3 + p)
        vector = weights.astype(np.float32) @ (self._rows(torch.from_numpy(ids)) - self._mean)
        return unit(vector if self._project is None else vector @ self._project)

    def _rows(self, ids: Tensor) -> Array:
        return self._weights[ids.to(self._weights.device)].float().cpu().numpy()


def unit(vector: Array) -> Array:
    """Scale a vector to length one; a zero vector stays."""
    return (vector / max(float(np.linalg.norm(vector)), 1e-12)).astype(np.float32)
