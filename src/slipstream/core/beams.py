"""Beam search as a request asks for it, the prefixes that it looks at, and the hypotheses that come of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from slipstream.core.law import Fault
from slipstream.core.values import is_finite, whole_number

STEEPEST = 50.0
"""The greatest length penalty, up or down: lengths to a higher power are no numbers any more."""


@dataclass(frozen=True)
class Beams:
    """The settings of beam search, under the names and with the meaning of transformers.

    Of every prompt the `num_beams` best continuations are kept, and `num_return_sequences` of the finished ones given.
    A finished one scores its summed log-probability / length ** `length_penalty`, the length being that of the output
    with its EOS token. `early_stopping` True ends when `num_beams` have finished, False when the best live one could
    not beat them at its present length, "never" when it could not at any length. Raises ValueError for what cannot be.
    """

    num_beams: int = 4
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    num_return_sequences: int = 1

    def __post_init__(self) -> None:
        whole_number("num_beams", self.num_beams, 2)
        whole_number("num_return_sequences", self.num_return_sequences, 1)
        if not is_finite(self.length_penalty) or abs(self.length_penalty) > STEEPEST:
            raise ValueError(
                f"length_penalty={self.length_penalty!r} is not possible: it is a number from -{STEEPEST:g} to "
                f"{STEEPEST:g}; above 0 favours long texts."
            )
        if not isinstance(self.early_stopping, bool | str) or self.early_stopping not in (True, False, "never"):
            raise ValueError(f'early_stopping={self.early_stopping!r} is not possible: it is True, False or "never".')
        if self.num_return_sequences > self.num_beams:
            raise ValueError(
                f"num_return_sequences={self.num_return_sequences} is above num_beams={self.num_beams}: of so many "
                "beams, at most so many texts can be returned."
            )

    def candidates(self, ends: int) -> int:
        """How many continuations of all beams are looked at in a step where `ends` tokens end a text: so many that
        enough are left if all of the best ones end."""
        return max(2, 1 + ends) * self.num_beams


Candidates = tuple[list[float], list[int]]
"""Log-probabilities and tokens of the best continuations of a prefix, the best first."""


class Prefix:
    """A beginning of the output: a node of the trie of all that a search has looked at.

    `best` are the target's best continuations, None before the target has scored it, and `fault` why there are none.
    `guess` are those of a draft, which say nothing about the result.
    """

    __slots__ = ("best", "children", "depth", "fault", "guess", "parent", "token")

    def __init__(self, token: int, parent: Prefix | None = None) -> None:
        self.token, self.parent = token, parent
        self.depth: int = 0 if parent is None else parent.depth + 1  # how many tokens of the output it has
        self.children: dict[int, Prefix] = {}
        self.best: Candidates | None = None
        self.guess: Candidates | None = None
        self.fault: Fault | None = None

    @property
    def scored(self) -> bool:
        """Whether the target was asked about it."""
        return self.best is not None or self.fault is not None

    def child(self, token: int) -> Prefix:
        """The prefix with one more token."""
        if token not in self.children:
            self.children[token] = Prefix(token, self)
        return self.children[token]

    def upward(self) -> Iterator[Prefix]:
        """Itself, then its beginnings, from the longest to the root."""
        node: Prefix | None = self
        while node is not None:
            yield node
            node = node.parent

    @property
    def tokens(self) -> list[int]:
        """The output so far; the root, which is the last token of the prompt, is none of it."""
        return [node.token for node in self.upward()][-2::-1]


@dataclass(frozen=True)
class Hypothesis:
    """A finished output and its score; `finish_reason` as in `Row`."""

    tokens: tuple[int, ...]
    score: float
    finish_reason: str
