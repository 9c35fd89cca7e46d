"""A corpus of token sequences with a suffix array, to find earlier occurrences of a text and what followed them.

As in REST (arXiv 2311.08252), the longest suffix of a text is looked up, and the tokens that followed it most often are
the draft.
The array is sorted by the first DEPTH tokens of every suffix only, which bounds the work on texts that repeat
themselves; no lookup is longer. Tokens are stored with the high byte first, so that bytes compare as tokens do and a
binary search compares slices of memory.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from slipstream.files import TensorFileKind, save_tensors

KIND = TensorFileKind("corpus", "slipstream.corpus", "2", "build it with `slipstream draft build`")
DEPTH = 64  # the number of tokens of the longest match, the default of suffix decoding (arXiv 2411.04975)
SAMPLE = 32  # the number of occurrences whose continuations are compared; of more, those at even distances in the array
Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class Match:
    """A continuation of a text's longest suffix: `length` tokens matched, `tokens` (n,) followed them most often.

    `chances` (n,) are the shares of the occurrences that continue with tokens[: i + 1]. Their sum is the mean number of
    tokens that would be kept if the text continued as its occurrences did.
    """

    length: int = 0
    tokens: tuple[int, ...] = ()
    chances: tuple[float, ...] = ()


class Corpus:
    """The tokens of documents, each followed by the id `vocab`, and their sorted suffixes.

    Ids above `vocab` may be used in a document as marks: they are matched, never drafted. `tokenizer` is the name of
    the tokenizer (see `drafter.fingerprint`). Arrays may be mapped from a file: lookups read a few pages of it.
    """

    def __init__(self, text: Array, suffixes: Array, vocab: int, tokenizer: str = "", documents: int = 0) -> None:
        """Make a corpus of tokens as bytes (tokens, width), high byte first, and the sorted starts of its suffixes."""
        self.vocab, self.tokenizer, self.documents = vocab, tokenizer, documents
        self.text, self.suffixes = text, suffixes
        self._width = text.shape[1]
        self._tokens = text.reshape(-1).view(f">u{self._width}")
        self._bytes, self._order = text.reshape(-1).data, suffixes.data

    def __len__(self) -> int:
        """Return the number of tokens, including the ends of documents."""
        return len(self._tokens)

    @staticmethod
    def build(
        documents: Iterable[Sequence[int] | Array | torch.Tensor], vocab: int, tokenizer: str = "", marks: int = 0
    ) -> Corpus:
        """Index documents, each an array of token ids (length,). Needs about 40 bytes of memory per token.
        `marks` ids above `vocab` are allowed too. Raises ValueError for ids outside the vocabulary and no tokens."""
        if vocab < 1:
            raise ValueError(f"vocab={vocab} is not possible: it must be 1 or more.")
        parts = list[Array]()
        for ids in map(as_ids, documents):
            if not ids.size:
                continue
            if ids.min() < 0 or ids.max() > vocab + marks or (ids == vocab).any():
                raise ValueError(f"token ids {ids.min()}..{ids.max()} do not fit a vocabulary of {vocab}.")
            parts.append(np.append(ids, vocab).astype(np.int32))
        if not parts:
            raise ValueError("there are no tokens to index: give at least one document that is not empty.")
        tokens = np.concatenate(parts)
        suffixes = sort_suffixes(tokens, vocab + 1 + marks, DEPTH)
        width = 2 if vocab + marks < 1 << 16 else 4
        text = tokens.astype(f">u{width}").view(np.uint8).reshape(-1, width)
        return Corpus(text, suffixes, vocab, tokenizer, len(parts))

    @property
    def facts(self) -> str:
        return f"{self.documents} documents, {len(self) - self.documents} tokens"

    def match(self, context: Sequence[int], count: int) -> Match:
        """Return the longest suffix of `context` in the corpus, and up to `count` tokens that followed it most often.
        Of equally frequent tokens it takes the one of the earliest occurrence. It ends where a document ends."""
        length, low, high = self._longest(context)
        if not length or not count:
            return Match(length)
        step = max(1, (high - low) / SAMPLE)
        starts = sorted(self._order[low + int(i * step)] for i in range(min(SAMPLE, high - low)))
        places = np.array(starts)[:, None] + np.arange(length, length + count)
        # The most frequent continuation, token by token, among the occurrences that agree with it so far.
        rows = self._tokens[places.clip(max=len(self) - 1)].tolist()
        total, tokens, chances = len(rows), list[int](), list[float]()
        for place in range(len(rows[0])):
            token, votes = Counter(row[place] for row in rows).most_common(1)[0]
            if token >= self.vocab:  # the end of a document, or a mark
                break
            rows = [row for row in rows if row[place] == token]
            tokens.append(token)
            chances.append(votes / total)
        return Match(length, tuple(tokens), tuple(chances))

    def save(self, path: str | os.PathLike[str]) -> None:
        arrays = {"text": torch.from_numpy(self.text), "suffixes": torch.from_numpy(self.suffixes)}
        about = {"vocab": str(self.vocab), "tokenizer": self.tokenizer, "documents": str(self.documents)}
        save_tensors(path, KIND, arrays, about)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Corpus:
        """Map a file into memory. Raises FileNotFoundError, and ValueError if it is damaged or not a corpus."""
        with KIND.contents(path) as (tensors, about):
            text, suffixes = tensors["text"].numpy(), tensors["suffixes"].numpy()
            shaped = text.ndim == 2 and text.shape[1] in (2, 4) and suffixes.shape == text.shape[:1] and len(text)
            if not shaped or text.dtype != np.uint8 or suffixes.dtype.kind not in "iu":
                raise ValueError("its arrays do not fit together")
            return Corpus(text, suffixes, int(about["vocab"]), about["tokenizer"], int(about["documents"]))

    def _longest(self, context: Sequence[int]) -> tuple[int, int, int]:
        """Find the longest suffix that occurs -> its length in tokens, and its range in the array, from and up to."""
        tail = np.array(context[-DEPTH:], f">u{self._width}").tobytes()
        low, high, first = 0, len(tail) // self._width, 0
        while low < high:  # if a text occurs, so do its suffixes: bisection finds the longest
            middle = (low + high + 1) // 2
            wanted = tail[-middle * self._width :]
            place = bisect_left(self._order, wanted, key=self._reader(len(wanted)))
            if place < len(self) and self._reader(len(wanted))(self._order[place]) == wanted:
                low, first = middle, place
            else:
                high = middle - 1
        size = low * self._width
        if not size:
            return 0, 0, 0
        return low, first, bisect_right(self._order, tail[-size:], first, key=self._reader(size))

    def _reader(self, size: int) -> Callable[[int], bytes]:
        text, width = self._bytes, self._width
        return lambda start: text[start * width : start * width + size].tobytes()


def as_ids(document: Any) -> Array:
    """Return a document's token ids (length,). Raises ValueError for anything else."""
    ids = np.asarray(document)
    if ids.size and (ids.ndim != 1 or ids.dtype.kind not in "iu"):
        raise ValueError(f"a text has shape {ids.shape} of {ids.dtype}: give token ids, one array per text.")
    return ids.astype(np.int64 if ids.dtype.itemsize > 4 else np.int32)


def sort_suffixes(tokens: Array, ids: int, depth: int) -> Array:
    """Sort the suffixes of `tokens` (n,) by their first `depth` tokens -> where each begins, (n,).

    Prefix doubling (Manber and Myers 1990), in which only suffixes that are still tied are sorted again (Larsson and
    Sadakane 1999). The first sort packs as many tokens as fit into one number. `ids` is the size of the alphabet.
    """
    count, kind = len(tokens), np.int32 if len(tokens) < 1 << 31 else np.int64
    bits = ids.bit_length()
    done = min(depth, 63 // bits)
    keys = np.zeros(count, np.int64)
    for ahead in range(done):
        keys <<= bits
        keys[: max(0, count - ahead)] |= tokens[ahead:] + 1  # 0 is past the end
    order = np.argsort(keys).astype(kind)
    rank = np.empty(count, kind)
    tied = _rank(rank, order, keys[order], np.arange(count, dtype=kind))
    del keys
    while done < depth and len(tied):
        starts: Array = order[tied]
        beyond = np.where(starts < count - done, rank[np.minimum(starts, count - done - 1) + done] + 1, 0)
        keys = rank[starts].astype(np.int64) * (count + 1) + beyond
        by_key = np.argsort(keys)
        order[tied] = starts[by_key]
        tied = _rank(rank, order[tied], keys[by_key], tied)
        done *= 2
    return order.astype(np.uint32) if count < 1 << 32 else order


def _rank(rank: Array, starts: Array, keys: Array, places: Array) -> Array:
    """Give the suffixes at `starts`, sorted by `keys`, the first place of equal ones as rank -> the places of ties."""
    new = np.append(True, keys[1:] != keys[:-1])
    rank[starts] = np.maximum.accumulate(np.where(new, places, 0))
    return places[~(new & np.append(new[1:], True))]
