"""`PrefixCache` stores keys and values of texts, so that a text with the same prefix need not be read again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable
from weakref import WeakKeyDictionary

from torch import Tensor

BLOCK = 16  # the number of tokens in a block, the unit that is stored and found


@dataclass(eq=False)
class _Block:
    """The keys and values of a block of tokens after all blocks before it; a root has none."""

    tokens: tuple[int, ...]
    parent: _Block | None
    states: Tensor | None = None
    following: dict[tuple[int, ...], _Block] = field(default_factory=dict)


class PrefixCache:
    """Stores keys and values of texts within a budget of bytes, and drops the least recently used ones first.

    Texts are stored in blocks of `block` tokens. Texts with a common prefix share its blocks, which are found by the
    tokens themselves, so that no two texts are ever confused. Every model has a shelf of its own, divided by
    `cache_salt`, so that response times do not reveal to one tenant what another has sent. It is not thread-safe.

    Raises ValueError for sizes below 1.
    """

    def __init__(self, limit: int, block: int = BLOCK) -> None:
        if limit < 1 or block < 1:
            raise ValueError(f"{limit} bytes in blocks of {block} tokens are not possible: both must be 1 or more.")
        self.limit, self.block, self.bytes = limit, block, 0
        self._shelves: WeakKeyDictionary[object, Shelf] = WeakKeyDictionary()
        # From the least to the most recently used; a block always comes after those that follow it in a text.
        self._used: OrderedDict[_Block, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._used)

    def shelf(self, owner: object) -> Shelf:
        """Return the shelf of one model, identified by an object that lives as long as the model does."""
        if owner not in self._shelves:
            self._shelves[owner] = Shelf(self)
        return self._shelves[owner]

    def touch(self, path: Sequence[_Block]) -> None:
        for block in reversed(path):
            self._used.move_to_end(block)

    def put(self, block: _Block, path: Sequence[_Block]) -> bool:
        """Store a block after those of `path`, dropping the least recently used ones -> whether there is room."""
        assert block.states is not None and block.parent is not None
        size = block.states.nbytes
        while self.bytes + size > self.limit:
            oldest = next(iter(self._used), None)
            if oldest is None or oldest in path:
                return False
            assert oldest.states is not None and oldest.parent is not None and not oldest.following
            del self._used[oldest]
            del oldest.parent.following[oldest.tokens]
            self.bytes -= oldest.states.nbytes
        block.parent.following[block.tokens] = block
        self._used[block] = None
        self.bytes += size
        return True


class Shelf:
    """The stored blocks of one model's texts, separate for each salt."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._roots: dict[str, _Block] = {}

    def longest(self, text: Sequence[int], salt: str) -> list[Tensor]:
        """Return the keys and values of the longest stored prefix of a text, one tensor per block."""
        path = self._path(text, salt)
        self._cache.touch(path)
        return [block.states for block in path if block.states is not None]

    def store(self, text: Sequence[int], salt: str, states: Callable[[int, int], Tensor]) -> None:
        """Store a text's whole blocks; `states(start, stop)` is called for new ones, to copy their keys and values."""
        size, path = self._cache.block, self._path(text, salt)
        if salt not in self._roots:  # a new one drops salts without blocks
            self._roots = {name: root for name, root in self._roots.items() if root.following}
            self._roots[salt] = _Block((), None)
        for start in range(len(path) * size, len(text) - size + 1, size):
            parent = path[-1] if path else self._roots[salt]
            block = _Block(tuple(text[start : start + size]), parent, states(start, start + size))
            if not self._cache.put(block, path):
                break
            path.append(block)
        self._cache.touch(path)

    def _path(self, text: Sequence[int], salt: str) -> list[_Block]:
        path, block, size = list[_Block](), self._roots.get(salt), self._cache.block
        for start in range(0, len(text) - size + 1, size):
            block = block and block.following.get(tuple(text[start : start + size]))
            if block is None:
                break
            path.append(block)
        return path


@runtime_checkable
class Recalling(Protocol):
    """A model that can reuse stored prefixes from a `PrefixCache`; by default nothing is stored and found."""

    def use_prefixes(self, cache: PrefixCache | None) -> None:
        """Use this cache to store and find prefixes from now on; None: use none."""
        return None

    def recall(self, row: int, text: Sequence[int], salt: str) -> int:
        """Fill an empty row with the longest stored prefix of a text -> the number of its tokens."""
        return 0

    def remember(self, row: int, text: Sequence[int], salt: str) -> None:
        """Store the prefix of a text that a row holds."""
        return None


class Forgetful(Recalling):
    """The store of a model that cannot reuse prefixes."""


def recalling(scorer: object) -> Recalling:
    """Return the model itself if it can reuse prefixes, else a store that finds nothing."""
    return scorer if isinstance(scorer, Recalling) else Forgetful()
