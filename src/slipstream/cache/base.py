"""`Cache`, the protocol of a model's cache for a batch of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Cache(Protocol):
    """A model's cache of every row's text: keys and values of its tokens, or a recurrent state that summarizes them.

    One forward pass is `reserve`, then the writes of the model by methods that differ between caches, then `advance`.
    How far a row can be rolled back depends on the cache: one of keys and values can drop any number of tokens, one of
    states only as many as it holds earlier states for. Every row can be rolled back to 0.
    """

    @property
    def lengths(self) -> Sequence[int]:
        """The number of tokens in the cache, per row."""
        ...

    @property
    def bytes_per_token(self) -> int:
        """The bytes of one more token in all layers: 0 before the first pass, and if the size does not grow."""
        ...

    def add(self, rows: int) -> None:
        """Append empty rows."""
        ...

    def fork(self, rows: Sequence[int]) -> None:
        """Append copies of these rows, in this order; a row may be named several times."""
        ...

    def free(self, rows: Sequence[int]) -> None:
        """Remove rows; the others move up and keep their order."""
        ...

    def reserve(self, count: int, first: int = 0, stop: int | None = None) -> None:
        """Begin a pass over the rows first..stop (None: all from `first` on): make room for `count` tokens each."""
        ...

    def advance(self, counts: Sequence[int]) -> None:
        """Commit the pass: row first + r has `counts[r]` more tokens, 0 to `count` of those fed."""
        ...

    def rollback(self, lengths: Sequence[int]) -> None:
        """Drop everything after `lengths[r]` tokens of the first rows; rows after them stay as they are."""
        ...

    def scrub(self) -> None:
        """Zero the entries of rolled-back tokens: NaN passes any mask, since 0 * NaN is NaN."""
        ...

    def keep(self, starts: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Move a tree's path together, in the first rows: the entry at starts[r] + paths[r][i] goes to starts[r] + i.
        A cache of states, which cannot take tokens out of the middle of a text, raises ValueError."""
        ...
