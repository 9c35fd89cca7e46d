"""`PrefixCache` keeps keys and values of texts that were read, so that a text with the same beginning need not be."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable
from weakref import WeakKeyDictionary

from torch import Tensor

BLOCK = 16
"""Tokens of a block: the unit that is stored and found."""


@dataclass(eq=False)
class _Block:
    """The states of some tokens, given all blocks before it; a root holds none."""

    tokens: tuple[int, ...]
    parent: _Block | None
    states: Tensor | None = None
    following: dict[tuple[int, ...], _Block] = field(default_factory=dict)


class PrefixCache:
    """Keys and values of texts, in a budget of bytes: what was used least recently goes first.

    Texts are stored in blocks of `block` tokens. Those with a common beginning share its blocks, which are found by
    the tokens themselves, so that no two texts are ever confused. Every model has a shelf of its own, and on it every
    `cache_salt`, so that one tenant cannot learn by the clock what another has sent. One thread uses it at a time.

    Raises ValueError for sizes below 1.
    """

    def __init__(self, limit: int, block: int = BLOCK) -> None:
        if limit < 1 or block < 1:
            raise ValueError(f"{limit} bytes in blocks of {block} tokens are not possible: both must be 1 or more.")
        self.limit, self.block, self.bytes = limit, block, 0
        self._shelves: WeakKeyDictionary[object, Shelf] = WeakKeyDictionary()
        # From the least to the most recently used; a block is always behind those that follow it in a text.
        self._used: OrderedDict[_Block, None] = OrderedDict()

    def __len__(self) -> int:
        """How many blocks are stored."""
        return len(self._used)

    def shelf(self, owner: object) -> Shelf:
        """What is stored of one model's texts, known by an object that lives as long as the model does."""
        if owner not in self._shelves:
            self._shelves[owner] = Shelf(self)
        return self._shelves[owner]

    def touch(self, path: Sequence[_Block]) -> None:
        """These blocks, which follow each other, were used last."""
        for block in reversed(path):
            self._used.move_to_end(block)

    def put(self, block: _Block, path: Sequence[_Block]) -> bool:
        """Store a block behind those of `path`, in place of what was used least recently -> whether there is room."""
        assert block.states is not None and block.parent is not None
        size = block.states.nbytes
        while self.bytes + size > self.limit:
            oldest = next(iter(self._used), None)
            if oldest is None or oldest in path:
                return False
            self._drop(oldest)
        block.parent.following[block.tokens] = block
        self._used[block] = None
        self.bytes += size
        return True

    def _drop(self, block: _Block) -> None:
        assert block.states is not None and block.parent is not None and not block.following
        del self._used[block]
        del block.parent.following[block.tokens]
        self.bytes -= block.states.nbytes


class Shelf:
    """What is stored of one model's texts, apart by salt."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._roots: dict[str, _Block] = {}

    def longest(self, text: Sequence[int], salt: str) -> list[Tensor]:
        """The states of the first blocks of a text, as many as are stored."""
        path = self._path(text, salt)
        self._cache.touch(path)
        return [block.states for block in path if block.states is not None]

    def store(self, text: Sequence[int], salt: str, states: Callable[[int, int], Tensor]) -> None:
        """Store a text's whole blocks; `states(start, stop)` copies those of its tokens, and is asked for new ones."""
        size = self._cache.block
        path = self._path(text, salt)
        for start in range(len(path) * size, len(text) - size + 1, size):
            parent = path[-1] if path else self._root(salt)
            block = _Block(tuple(text[start : start + size]), parent, states(start, start + size))
            if not self._cache.put(block, path):
                break
            path.append(block)
        self._cache.touch(path)

    def _path(self, text: Sequence[int], salt: str) -> list[_Block]:
        return list(self._walk(text, self._roots[salt])) if salt in self._roots else []

    def _walk(self, text: Sequence[int], block: _Block) -> Iterator[_Block]:
        size = self._cache.block
        for start in range(0, len(text) - size + 1, size):
            found = block.following.get(tuple(text[start : start + size]))
            if found is None:
                return
            yield (block := found)

    def _root(self, salt: str) -> _Block:
        """Where the texts of a salt begin; salts of which nothing is left are forgotten."""
        if salt not in self._roots:
            self._roots = {name: root for name, root in self._roots.items() if root.following}
            self._roots[salt] = _Block((), None)
        return self._roots[salt]


@runtime_checkable
class Recalling(Protocol):
    """A model that can take over from a `PrefixCache` what was read before."""

    def use_prefixes(self, cache: PrefixCache | None) -> None:
        """Store texts there from now on, and look there for them; None: nowhere."""
        ...

    def recall(self, row: int, text: Sequence[int], salt: str) -> int:
        """Make an empty row one of the longest stored beginning of a text -> how many tokens that has."""
        ...

    def remember(self, row: int, text: Sequence[int], salt: str) -> None:
        """Store what a row holds of a text, whose tokens are those of the row."""
        ...


class Forgetful:
    """Stands for a model that cannot take over what was read before."""

    def use_prefixes(self, cache: PrefixCache | None) -> None:
        """Ignore the cache: this store keeps nothing."""

    def recall(self, row: int, text: Sequence[int], salt: str) -> int:
        """Return 0, the number of tokens that were recalled."""
        return 0

    def remember(self, row: int, text: Sequence[int], salt: str) -> None:
        """Store nothing."""


def recalling(scorer: object) -> Recalling:
    """The model itself if it can take over what was read before, else one that knows nothing."""
    return scorer if isinstance(scorer, Recalling) else Forgetful()
