"""The rows of a model that run together: the keys and values of their texts, their sources and their images."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import Cache

from slipstream.cache.prefixes import PrefixCache
from slipstream.cache.rows import RowCache
from slipstream.cache.stores import FloatStore, Store
from slipstream.core.media import Media
from slipstream.core.source import Source
from slipstream.models.encoder_decoder import SourceDecoder, Sources


class _Owner:
    """The key of a model's shelf in a prefix cache; a new one hides what was stored under the old one."""


class Memory:
    """The rows of a model that run together.

    `texts` holds their keys and values, `sources` what the encoder read, None without an encoder. `media` are the
    images and sounds of each row's text. `shifts` are the differences between positions and numbers of tokens after
    them: a model may give all tokens of an image fewer positions than there are tokens.
    """

    def __init__(self, decoder: SourceDecoder | None = None) -> None:
        self._decoder = decoder
        self._prefixes: PrefixCache | None = None
        self._owner = _Owner()
        self.clear()

    def clear(self, format: type[Store] = FloatStore) -> None:
        self.texts = RowCache(format)
        self.media: list[Media | None] = []
        self.shifts: list[int] = []
        self.sources = Sources(self._decoder, format) if self._decoder else None

    def use_prefixes(self, cache: PrefixCache | None) -> None:
        """Store texts in this prefix cache, and look them up there; None for no cache.

        It is not used with an encoder: a decoder's keys depend on the source, its texts are short, and the source is
        what takes time to read.
        """
        self._prefixes = None if self.sources else cache

    def forget_prefixes(self) -> None:
        """Ignore the prefixes stored so far: from now on more is stored per token, such as hidden states."""
        self._owner = _Owner()

    def recall(self, row: int, text: Sequence[int], salt: str) -> int:
        if self._prefixes is None or not (blocks := self._prefixes.shelf(self._owner).longest(text, salt)):
            return 0
        self.texts.paste(row, blocks, self._prefixes.block)
        return self.texts.lengths[row]

    def remember(self, row: int, text: Sequence[int], salt: str) -> None:
        if self._prefixes is not None:
            covered = text[: self.texts.lengths[row]]
            self._prefixes.shelf(self._owner).store(
                covered, salt, lambda start, stop: self.texts.copy(row, start, stop)
            )

    def add(self, rows: int, sources: Sequence[Source | None] = ()) -> None:
        self.texts.add(rows)
        self.media += [None] * rows
        self.shifts += [0] * rows
        if self.sources and rows:
            self.sources.add(rows, sources)

    def fork(self, rows: Sequence[int]) -> None:
        self.texts.fork(rows)
        self.media += [self.media[row] for row in rows]
        self.shifts += [self.shifts[row] for row in rows]
        if self.sources and rows:
            self.sources.fork(rows)

    def free(self, rows: Sequence[int]) -> None:
        self.texts.free(rows)
        freed = set(rows)
        self.media = [each for row, each in enumerate(self.media) if row not in freed]
        self.shifts = [each for row, each in enumerate(self.shifts) if row not in freed]
        if self.sources and rows:
            self.sources.free(rows)


class OnMemory:
    """A Scorer's calls about its rows, as its memory answers them (see `core.protocols.Scorer`)."""

    _memory: Memory

    @property
    def lengths(self) -> list[int]:
        return self._memory.texts.lengths

    def add(self, rows: int, sources: Sequence[Source | None] = ()) -> None:
        self._memory.add(rows, sources)

    def fork(self, rows: Sequence[int]) -> None:
        self._memory.fork(rows)

    def free(self, rows: Sequence[int]) -> None:
        self._memory.free(rows)

    def rollback(self, lengths: Sequence[int]) -> None:
        self._memory.texts.rollback(lengths)

    def scrub(self) -> None:
        self._memory.texts.scrub()

    def keep(self, starts: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        self._memory.texts.keep(starts, paths)

    def bytes_for(self, lengths: Sequence[int]) -> int:
        return self._memory.texts.bytes_for(lengths)


class HFCache(Cache):
    """The Cache interface of transformers over the texts of a memory."""

    def __init__(self, memory: Memory) -> None:
        super().__init__(layers=[])
        self.memory = memory

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return self.memory.texts.update(layer_idx, key_states, value_states)

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor:
        return self.memory.texts.update_indexer(layer_idx, indexer_key_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.memory.texts.past

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        return self.memory.texts.end, 0
