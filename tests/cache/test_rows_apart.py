"""A cache of keys and values holds the text of every row, whatever becomes of the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slipstream.cache.rows import RowCache


class Keys(RowCache):
    """Holds the tokens themselves as keys of one number each."""

    def feed(self, tokens: Sequence[Sequence[int]]) -> None:
        new = torch.tensor(tokens, dtype=torch.float64)[:, None, :, None]
        self.update(0, new, new)

    def read(self, row: int) -> int:
        """The sum that a model would make of the row's text."""
        return sum(int(token) << place for place, token in enumerate(self.stores[0][0][row, 0, : self.lengths[row], 0]))


def feed(cache: Keys, tokens: Sequence[Sequence[int]], counts: Sequence[int], first: int = 0) -> None:
    cache.reserve(len(tokens[0]), first, first + len(tokens))
    cache.feed(tokens)
    cache.advance(counts)


def held(cache: Keys) -> list[int]:
    return [cache.read(row) for row in range(len(cache.lengths))]


def number(*texts: Sequence[int]) -> list[int]:
    return [sum(token << place for place, token in enumerate(text)) for text in texts]


def test_rows_run_apart() -> None:
    cache = Keys()
    cache.add(2)
    feed(cache, [[1, 2, 3], [4, 5, 6]], [3, 1])
    assert cache.lengths == [3, 1] and held(cache) == number([1, 2, 3], [4])
    feed(cache, [[7, 8]], [2], first=1)
    assert held(cache) == number([1, 2, 3], [4, 7, 8])
    feed(cache, [[9, 9]], [1])  # only the first
    assert held(cache) == number([1, 2, 3, 9], [4, 7, 8])
    cache.rollback([2])  # the second stays
    assert held(cache) == number([1, 2], [4, 7, 8])
    cache.fork([0, 1, 0])
    feed(cache, [[3], [3], [4], [4], [5]], [1, 0, 1, 1, 1])
    assert held(cache) == number([1, 2, 3], [4, 7, 8], [1, 2, 4], [4, 7, 8, 4], [1, 2, 5])
    cache.free([0, 3])
    cache.rollback([3, 2, 0])
    assert cache.lengths == [3, 2, 0] and held(cache) == number([4, 7, 8], [1, 2], [])
