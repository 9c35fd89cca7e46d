"""Parts shared by the drafters that copy: a record per running row, and drafts of copied tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar
from weakref import ref

import torch

from slipstream.core.draft import Draft, padded
from slipstream.core.law import Law
from slipstream.core.request import Row
from slipstream.decoding.grammar import Grammar

CPU = torch.device("cpu")
T = TypeVar("T")


class ByRow(Generic[T]):
    """A value per running row, keyed by the identity of the row, which is held by a weak reference."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[ref[Row], T]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def __getitem__(self, row: Row) -> T:
        return self._known[id(row)][1]

    def follow(self, rows: Sequence[Row], make: Callable[[Row], T]) -> None:
        """Keep the values of these rows only, and make values for new rows with `make`."""
        known = {}
        for row in rows:
            entry = self._known.get(id(row))
            if entry is None or entry[0]() is not row:  # another object may have got the address
                entry = (ref(row, self._lost), make(row))
            known[id(row)] = entry
        self._known = known

    def forget(self, row: Row) -> None:
        """Drop the value of a row that has ended."""
        self._known.pop(id(row), None)

    def _lost(self, collected: ref[Row]) -> None:
        """Drop the value of a row that was garbage collected, as happens when its stream is closed."""
        self._known = {key: entry for key, entry in self._known.items() if entry[0] is not collected}


def source_tokens(row: Row, vocab: int) -> tuple[int, ...]:
    """Return the tokens of the row's source, to copy from; empty without an encoder.

    It is also empty if the source has ids outside the decoder's vocabulary of `vocab` tokens.
    """
    source = row.request.source
    return source if isinstance(source, tuple) and max(source) < vocab else ()


def grammar_of(row: Row) -> Grammar | None:
    """Return the grammar of a row's request, or None."""
    return getattr(row.request.sampler, "grammar", None)


def ended(copy: list[int], row: Row) -> list[int]:
    """Cut a copy after its first end-of-text token, and before its first token that the row's grammar forbids.

    Nothing after them can be emitted. A copy is fixed before anything is drawn, so that cutting it is exact; tokens
    that could not stand are neither scored nor counted as drafted.
    """
    copy = copy[: next((place for place, token in enumerate(copy, 1) if token in row.request.eos), len(copy))]
    grammar = grammar_of(row)
    return copy[: grammar.fitting(row.output, copy)] if grammar is not None and copy else copy


def sure(copies: Sequence[Sequence[int]], device: torch.device = CPU, windowed: tuple[int, ...] = ()) -> Draft:
    """Make a draft (rows, longest) of the copies of each row, possibly none: q is a point mass on each token."""
    tokens, lengths = padded(copies, device), tuple(map(len, copies))
    return Draft(tokens, Law(tokens=tokens) if any(lengths) else None, lengths, windowed)
