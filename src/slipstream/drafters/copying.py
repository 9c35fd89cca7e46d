"""What the drafters that copy share: a record per running row, and drafts of copied tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

import torch

from slipstream.core.draft import Draft, padded
from slipstream.core.law import Law
from slipstream.core.protocols import Drafter
from slipstream.core.request import Row
from slipstream.core.round import Context, Round
from slipstream.decoding.grammar import Grammar

CPU = torch.device("cpu")
T = TypeVar("T")


class CopyingDrafter(Drafter, Generic[T]):
    """Drafts copies, where q is a point mass on each token. Tokens are on the CPU.

    What is `known` of a row is made by `begin` when it is new, and kept while the row runs; `copy` drafts from it.
    """

    def __init__(self) -> None:
        self.known: WeakKeyDictionary[Row, T] = WeakKeyDictionary()  # weak, since streams are closed with rows in them

    def begin(self, row: Row) -> T:
        raise NotImplementedError

    def copy(self, row: Row, gamma: int) -> list[int]:
        """Return up to `gamma` tokens to copy for a row, at least 1; [] if nothing matches."""
        raise NotImplementedError

    def propose(self, context: Context, gammas: Sequence[int]) -> Draft:
        if len(self.known) != len(context.rows) or not all(row in self.known for row in context.rows):
            kept = {row: self.known[row] if row in self.known else self.begin(row) for row in context.rows}
            self.known = WeakKeyDictionary(kept)
        pairs = zip(context.rows, gammas, strict=True)
        return sure([ended(self.copy(row, gamma), row) if gamma else [] for row, gamma in pairs])

    def observe(self, round: Round) -> None:
        for row in round.rows:
            if row.finish_reason:
                self.known.pop(row, None)


def source_tokens(row: Row, vocab: int) -> tuple[int, ...]:
    """Return the tokens of the row's source to copy from, none if they are not of the decoder's vocabulary."""
    source = row.request.source
    return source if isinstance(source, tuple) and max(source) < vocab else ()


def grammar_of(row: Row) -> Grammar | None:
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
