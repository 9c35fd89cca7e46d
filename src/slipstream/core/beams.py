"""The settings of beam search, the prefixes that a search examines, and the hypotheses that it returns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from slipstream.core.law import Fault
from slipstream.core.options import CALL
from slipstream.core.values import OptionError, whole_number


@dataclass(frozen=True)
class Beams:
    """The settings of beam search, under the names and with the meaning of transformers.

    The search keeps the `num_beams` best continuations of every prompt and returns `num_return_sequences` of those that
    finish. The score of a finished one is its summed log-probability / length ** `length_penalty`, where the length is
    that of the output with its EOS token. With `early_stopping` True the search ends when `num_beams` have finished,
    with False when the best unfinished one could not beat them at its present length, with "never" when it could not at
    any length. With `do_sample` the continuations that a step examines are drawn, without replacement and by the
    exponentials of their summed log-probabilities; the best of the drawn ones go on. Raises ValueError for values that
    are not possible.
    """

    num_beams: int = 4
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    num_return_sequences: int = 1
    do_sample: bool = False

    def __post_init__(self) -> None:
        whole_number("num_beams", self.num_beams, 2)
        whole_number("num_return_sequences", self.num_return_sequences, 1)
        CALL["length_penalty"].check(self.length_penalty)
        if not isinstance(self.early_stopping, bool | str) or self.early_stopping not in (True, False, "never"):
            raise OptionError(f'early_stopping={self.early_stopping!r} is not possible: it is True, False or "never".')
        if self.num_return_sequences > self.num_beams:
            raise OptionError(
                f"num_return_sequences={self.num_return_sequences} is above num_beams={self.num_beams}: of so many "
                "beams, at most so many texts can be returned."
            )

    def candidates(self, ends: int) -> int:
        """Return how many continuations of all beams one step examines, if `ends` tokens end a text: enough that
        `num_beams` unfinished ones remain even if the best ones all end."""
        return max(2, 1 + ends) * self.num_beams


class Candidates(NamedTuple):
    """The first continuations of a prefix in the order of their `ranks`, with their log-probabilities and tokens.

    A rank is the log-probability, to which a sampled search adds Gumbel noise: the greatest sums of a beam's score and
    a rank are then draws without replacement (arXiv 1903.06059).
    """

    values: list[float]
    tokens: list[int]
    ranks: list[float]


class Prefix:
    """A prefix of the output: a node of the trie of all prefixes that a search has examined.

    `best` are the target's best continuations, None before the target has scored the prefix; `fault` is the reason if
    there are none. `guess` are the best continuations of a draft, which do not influence the result.
    """

    __slots__ = ("best", "children", "depth", "fault", "guess", "parent", "token")

    def __init__(self, token: int, parent: Prefix | None = None) -> None:
        self.token, self.parent = token, parent
        self.depth: int = 0 if parent is None else parent.depth + 1  # the number of output tokens in the prefix
        self.children: dict[int, Prefix] = {}
        self.best: Candidates | None = None
        self.guess: Candidates | None = None
        self.fault: Fault | None = None

    @property
    def scored(self) -> bool:
        return self.best is not None or self.fault is not None

    def child(self, token: int) -> Prefix:
        if token not in self.children:
            self.children[token] = Prefix(token, self)
        return self.children[token]

    def upward(self) -> Iterator[Prefix]:
        """Yield this prefix, then its ancestors, from the longest to the root."""
        node: Prefix | None = self
        while node is not None:
            yield node
            node = node.parent

    @property
    def tokens(self) -> list[int]:
        """The tokens of the output so far, without the root, which is the last token of the prompt."""
        return [node.token for node in self.upward()][-2::-1]


@dataclass(frozen=True)
class Hypothesis:
    """A finished output of a beam search, its score, and its `finish_reason`, as in `Row`."""

    tokens: tuple[int, ...]
    score: float
    finish_reason: str
