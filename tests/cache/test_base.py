"""The protocol of caches, obeyed by one of keys and values and by one of states that sum up a text."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from slipstream.cache.base import Cache
from slipstream.cache.rows import RowCache


class Keys(RowCache):
    """Holds the tokens themselves as keys of one number each."""

    def feed(self, tokens: Sequence[Sequence[int]]) -> None:
        """What a model writes in a pass."""
        new = torch.tensor(tokens, dtype=torch.float64)[:, None, :, None]
        self.update(0, new, new)

    def read(self, row: int) -> int:
        """The sum that a model would make of the row's text."""
        return sum(int(token) << place for place, token in enumerate(self.stores[0][0][row, 0, : self.lengths[row], 0]))


class States:
    """A toy of a recurrent state: the number that a text's tokens make, and the earlier ones, to be rolled back to."""

    bytes_per_token = 0

    def __init__(self) -> None:
        self._states: list[list[int]] = []
        self._part, self._fed = slice(0, 0), list[Sequence[int]]()

    @property
    def lengths(self) -> list[int]:
        return [len(states) - 1 for states in self._states]

    def add(self, rows: int) -> None:
        self._states += [[0] for _ in range(rows)]

    def fork(self, rows: Sequence[int]) -> None:
        self._states += [list(self._states[row]) for row in rows]

    def free(self, rows: Sequence[int]) -> None:
        self._states = [states for row, states in enumerate(self._states) if row not in set(rows)]

    def reserve(self, count: int, first: int = 0, stop: int | None = None) -> None:
        self._part = slice(first, stop)

    def feed(self, tokens: Sequence[Sequence[int]]) -> None:
        """What a model writes in a pass."""
        self._fed = list(tokens)

    def advance(self, counts: Sequence[int]) -> None:
        for states, tokens, count in zip(self._states[self._part], self._fed, counts, strict=True):
            for token in tokens[:count]:
                states.append(states[-1] + (token << len(states) - 1))

    def rollback(self, lengths: Sequence[int]) -> None:
        for states, length in zip(self._states[: len(lengths)], lengths, strict=True):
            del states[length + 1 :]

    def keep(self, starts: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        raise ValueError("a state cannot take tokens out of the middle of a text.")

    def read(self, row: int) -> int:
        """The state of a row."""
        return self._states[row][-1]


def feed(cache: Keys | States, tokens: Sequence[Sequence[int]], counts: Sequence[int], first: int = 0) -> None:
    """One pass, as any model makes it."""
    cache.reserve(len(tokens[0]), first, first + len(tokens))
    cache.feed(tokens)
    cache.advance(counts)


def held(cache: Keys | States) -> list[int]:
    """What every row has read."""
    return [cache.read(row) for row in range(len(cache.lengths))]


def number(*texts: Sequence[int]) -> list[int]:
    """What is to be made of texts."""
    return [sum(token << place for place, token in enumerate(text)) for text in texts]


@pytest.mark.parametrize("kind", [Keys, States])
def test_any_cache_runs_rows_apart(kind: type[Keys | States]) -> None:
    cache = kind()
    as_any: Cache = cache  # checked by types
    as_any.add(2)
    feed(cache, [[1, 2, 3], [4, 5, 6]], [3, 1])
    assert as_any.lengths == [3, 1] and held(cache) == number([1, 2, 3], [4])
    feed(cache, [[7, 8]], [2], first=1)
    assert held(cache) == number([1, 2, 3], [4, 7, 8])
    feed(cache, [[9, 9]], [1])  # only the first
    assert held(cache) == number([1, 2, 3, 9], [4, 7, 8])
    as_any.rollback([2])  # the second stays
    assert held(cache) == number([1, 2], [4, 7, 8])
    as_any.fork([0, 1, 0])
    feed(cache, [[3], [3], [4], [4], [5]], [1, 0, 1, 1, 1])
    assert held(cache) == number([1, 2, 3], [4, 7, 8], [1, 2, 4], [4, 7, 8, 4], [1, 2, 5])
    as_any.free([0, 3])
    as_any.rollback([3, 2, 0])
    assert as_any.lengths == [3, 2, 0] and held(cache) == number([4, 7, 8], [1, 2], [])
