"""What the drafters that copy share: a record per running row, and drafts of copied tokens."""

import sys
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

DEPTH = 64
"""The number of nested suffixes whose latest occurrence is updated; only looping texts have more. Bounds the work."""


class SuffixAutomaton:
    """A growing text and the longest suffix of it that occurred before, in amortised constant time per token.

    A state stands for the substrings that end at the same places; `links` leads to the state of its longest suffix
    that also ends elsewhere. So the link of the whole text is the longest suffix that occurred before. `length` is
    its length, at most `limit`; 0 if the last token is new. Occurrences may overlap. `followers` maps, for every
    state, tokens to the states that they lead to.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit or sys.maxsize
        self._clear()

    def _clear(self) -> None:
        self.text: list[int] = []
        self.length = 0
        self.followers: list[dict[int, int]] = [{}]  # state 0 is the empty text
        self.links, self._longest = [-1], [0]
        self._recent = [0]  # where each state's latest known occurrence ends, except at the end of the text
        self._whole = self._match = 0

    def follow(self, tokens: list[int]) -> None:
        """Set the text: append the new tokens, or rebuild if the text was cut, as inside a draft that is refused."""
        if self.text != tokens[: len(self.text)]:
            self._clear()
        self.extend(tokens[len(self.text) :])

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            state = self._match  # the match and its suffixes now occur last at the end of the text
            for _ in range(DEPTH):
                if state:
                    self._recent[state] = len(self.text)
                    state = self.links[state]
            follower = self.followers[self._match].get(token, 0)
            # Extend the automaton by one token (Blumer's algorithm).
            new = self._add(self._longest[self._whole] + 1, 0, {}, len(self.text) + 1)
            state, self._whole = self._whole, new
            while state >= 0 and token not in self.followers[state]:
                self.followers[state][token] = new
                state = self.links[state]
            if state >= 0:
                self.links[new] = self._split(state, token)
            self.text.append(token)
            # The new match is the last one plus the token if that one had the greatest length.
            state = self.links[self._whole]
            if self._longest[state] > self._limit:
                state = follower
                while self._longest[self.links[state]] >= self._limit:
                    state = self.links[state]
            self._match, self.length = state, min(self._longest[state], self._limit)

    def following(self, count: int) -> list[int]:
        """Return the `count` tokens after the latest earlier occurrence of the match; none without a match.
        If the copy reaches the end of the text, it goes on with its own tokens, which continues a loop."""
        copy: list[int] = []
        start = self._recent[self._match] - len(self.text)  # negative: counted from the end
        for place in range(start, start + count) if self.length else ():
            copy.append(self.text[place] if place < 0 else copy[place])
        return copy

    def _split(self, state: int, token: int) -> int:
        """Return the state whose longest string is that of `state` plus the token, split off if needed."""
        old, length = self.followers[state][token], self._longest[state] + 1
        if self._longest[old] == length:
            return old
        # `old` also holds longer strings, which end at fewer places from now on: the shorter ones get their own state.
        clone = self._add(length, self.links[old], dict(self.followers[old]), self._recent[old])
        self.links[old] = clone
        while state >= 0 and self.followers[state].get(token) == old:
            self.followers[state][token] = clone
            state = self.links[state]
        return clone

    def _add(self, longest: int, link: int, following: dict[int, int], recent: int) -> int:
        self._longest.append(longest)
        self.links.append(link)
        self.followers.append(following)
        self._recent.append(recent)
        return len(self.followers) - 1


CPU = torch.device("cpu")
T = TypeVar("T")


class CopyingDrafter(Drafter, Generic[T]):
    """Drafts copies, where q is a point mass on each token. Tokens are on the CPU.
    What is `known` of a row is made by `begin` when it is new, and kept while the row runs; `copy` drafts from it."""

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


def sure(copies: Sequence[Sequence[int]], device: torch.device = CPU) -> Draft:
    """Make a draft (rows, longest) of the copies of each row, possibly none: q is a point mass on each token."""
    tokens, lengths = padded(copies, device), tuple(map(len, copies))
    return Draft(tokens, Law(tokens=tokens) if any(lengths) else None, lengths)
