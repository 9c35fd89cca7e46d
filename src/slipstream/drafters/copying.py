"""The parts that drafters that copy share: a record per running row, and tokens that are sure as a draft."""

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
    """Something of every row that runs. Rows are known by identity, and none is kept alive by being known."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[ref[Row], T]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def __getitem__(self, row: Row) -> T:
        return self._known[id(row)][1]

    def follow(self, rows: Sequence[Row], make: Callable[[Row], T]) -> None:
        """Know these rows, the new ones by what `make` gives, and no others."""
        known = {}
        for row in rows:
            entry = self._known.get(id(row))
            if entry is None or entry[0]() is not row:  # the address may be one that is used again
                entry = (ref(row, self._lost), make(row))
            known[id(row)] = entry
        self._known = known

    def forget(self, row: Row) -> None:
        """Its text has ended."""
        self._known.pop(id(row), None)

    def _lost(self, gone: ref[Row]) -> None:
        """Forget a row that has been garbage collected, because its stream was closed."""
        self._known = {key: entry for key, entry in self._known.items() if entry[0] is not gone}


def source_tokens(row: Row, vocab: int) -> tuple[int, ...]:
    """Return the tokens of the row's source, which is worth copying from; empty without an encoder.

    It is also empty where the source has ids that a decoder of `vocab` tokens does not know.
    """
    source = row.request.source
    return source if isinstance(source, tuple) and max(source) < vocab else ()


def grammar_of(row: Row) -> Grammar | None:
    """The grammar that a row's text has to fit, if there is one."""
    return getattr(row.request.sampler, "grammar", None)


def ended(copy: list[int], row: Row) -> list[int]:
    """A copy up to its first end-of-text token, and before its first token that the row's grammar forbids.

    Nothing behind them can be emitted. A copy is known before anything is drawn, so that cutting it is exact; what
    could not stand is not scored, nor counted as drafted.
    """
    copy = copy[: next((place for place, token in enumerate(copy, 1) if token in row.request.eos), len(copy))]
    grammar = grammar_of(row)
    return copy[: grammar.fitting(row.output, copy)] if grammar is not None and copy else copy


def sure(copies: Sequence[Sequence[int]], device: torch.device = CPU, windowed: tuple[int, ...] = ()) -> Draft:
    """Tokens per row, possibly none, as a draft (rows, longest): q is a point mass on each."""
    tokens, lengths = padded(copies, device), tuple(map(len, copies))
    return Draft(tokens, Law(tokens=tokens) if any(lengths) else None, lengths, windowed)
