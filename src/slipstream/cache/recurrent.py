"""`StateCache`, a cache of recurrent states, with earlier states of each row for rollback."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

State = TypeVar("State")
MOST_KEPT = 64  # the greatest number of states kept per row: more than a round ever makes


@dataclass
class _Row(Generic[State]):
    """A row's length, and its states with the number of tokens that each summarizes, the newest last."""

    length: int = 0
    states: list[tuple[int, State]] = field(default_factory=list)


class StateCache(Generic[State]):
    """A cache of one recurrent state per row, of any type.

    Tokens cannot be removed from a state, so every pass stores a new one, and older ones stay until `rollback`. If that
    goes to a length between two states, `shorten(state, tokens)` may return the newer one without its last tokens. If
    it returns None, the row keeps the older state and lacks some tokens, which have to be read again before the next
    pass: `known` returns how many tokens its state summarizes. States are never written to, so that forked rows share
    them. They are not stored in the prefix cache, which holds blocks of tokens: a state cannot be cut into blocks.
    """

    def __init__(self, shorten: Callable[[State, int], State | None] = lambda state, tokens: None) -> None:
        self._shorten = shorten
        self._rows: list[_Row[State]] = []
        self._part = slice(0, 0)
        self._written: dict[int, State] = {}  # the states written in this pass, by row

    @property
    def lengths(self) -> list[int]:
        """The number of tokens per row, including those that its state lacks after a rollback."""
        return [row.length for row in self._rows]

    def add(self, rows: int) -> None:
        self._rows += [_Row() for _ in range(rows)]

    def fork(self, rows: Sequence[int]) -> None:
        self._rows += [_Row(self._rows[row].length, list(self._rows[row].states)) for row in rows]

    def free(self, rows: Sequence[int]) -> None:
        freed = set(rows)
        self._rows = [each for row, each in enumerate(self._rows) if row not in freed]

    def known(self, row: int) -> int:
        """Return how many tokens the newest state of a row summarizes; after some rollbacks fewer than its length."""
        states = self._rows[row].states
        return states[-1][0] if states else 0

    def state(self, row: int) -> State | None:
        states = self._rows[row].states
        return states[-1][1] if states else None

    def reserve(self, count: int, first: int = 0, stop: int | None = None) -> None:
        """Begin a pass over the rows first..stop (None: all from `first` on); states need no room for tokens."""
        self._part, self._written = slice(first, len(self._rows) if stop is None else stop), {}

    def write(self, row: int, state: State) -> None:
        self._written[row] = state

    def advance(self, counts: Sequence[int]) -> None:
        """Commit the pass: row first + r has `counts[r]` more tokens, and the state that was written for them."""
        for number, count in enumerate(counts, self._part.start):
            if count:
                row = self._rows[number]
                assert self.known(number) == row.length, "what was rolled back has to be read again first"
                row.length += count
                row.states = [*row.states, (row.length, self._written.pop(number))][-MOST_KEPT:]

    def bring_forward(self, row: int, state: State) -> None:
        """Store the state of all tokens of a row, after those that it lacked were read again."""
        assert self.known(row) < self._rows[row].length, "the row lacks nothing"
        self._rows[row].states = [(self._rows[row].length, state)]

    def rollback(self, lengths: Sequence[int]) -> None:
        assert len(lengths) <= len(self._rows), "one length per row, of the first rows"
        for row, length in zip(self._rows, lengths, strict=False):
            assert 0 <= length <= row.length, "rollback only shortens"
            row.length = length
            newer = next(((known, state) for known, state in row.states if known > length), None)
            row.states = [(known, state) for known, state in row.states if known <= length][-1:]
            lacking = length > (row.states[-1][0] if row.states else 0)
            if newer and lacking and (shorter := self._shorten(newer[1], newer[0] - length)) is not None:
                row.states = [(length, shorter)]

    def keep(self, starts: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Do nothing for paths of consecutive tokens. Raises ValueError for any other path."""
        if any(list(path) != list(range(len(path))) for path in paths):
            raise ValueError("a state cannot take tokens out of the middle of a text: draft chains instead of trees.")
