"""Draft by copying where a text repeats itself, and else what the target usually writes next: c is about 0.

In rounds of a small target on a CPU two or three positions cost little more than one, so that a guess pays that is
right every few times. Every position has a chance of its own, from the length of the match or from counts of texts
that the target wrote, and a draft ends before it would be kept too rarely (as in suffix decoding, arXiv 2411.04975).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from slipstream.core.protocols import Traits
from slipstream.core.request import Row
from slipstream.drafters.copying import CopyingDrafter, SuffixAutomaton
from slipstream.drafters.datastore.corpus import as_ids
from slipstream.files import TensorFileKind, save_tensors

KIND = TensorFileKind("table of phrases", "slipstream.phrases", "1", "make it by Phrases.fit")
ORDER = 3  # the longest context, in tokens: longer ones added nothing
MOST_TOKENS = (1 << 21) - 2  # the largest vocabulary: contexts of ORDER tokens fit into 63 bits
TEXTS = 2  # in how many texts a context must occur
LEAST = 0.1  # the smallest chance of a draft's last token, all before it included
HALF = 9  # the square of the length of a match at which a copied token stands half the time
Array = np.ndarray[Any, np.dtype[Any]]


class Phrases:
    """A table of contexts of 1 to ORDER tokens: the likeliest next token, and its chance."""

    def __init__(self, next: Mapping[int, tuple[int, float]], vocab: int) -> None:
        self.vocab, self._next = vocab, next

    @property
    def facts(self) -> str:
        return f"{len(self._next)} contexts of up to {ORDER} tokens"

    def after(self, text: Sequence[int]) -> tuple[int, float]:
        """Return the likeliest token after the longest context that is known, and its chance: 0 if none is known."""
        keys = _keys(text[-ORDER:], self.vocab)
        return next((found for key in keys[::-1] if (found := self._next.get(key))), (0, 0.0))

    @staticmethod
    def fit(texts: Iterable[Sequence[int] | Array], vocab: int) -> Phrases:
        """Count texts, each token ids, that a target wrote.

        A continuation counts once in every text, so that one that repeats itself has no more weight. Chances are
        interpolated with those of shorter contexts (Witten-Bell). Raises ValueError for a vocabulary that is too large,
        and for ids outside it.
        """
        if not 1 <= vocab <= MOST_TOKENS:
            raise ValueError(f"vocab={vocab} is not possible: it must be between 1 and {MOST_TOKENS}.")
        parts = [ids for ids in map(as_ids, texts) if ids.size]
        stream = np.concatenate([np.empty(0, np.int64), *parts])
        if stream.size and not 0 <= stream.min() <= stream.max() < vocab:
            raise ValueError(f"token ids {stream.min()}..{stream.max()} do not fit a vocabulary of {vocab}.")
        lengths = [len(part) for part in parts]
        text = np.repeat(np.arange(len(parts)), lengths)
        age = np.arange(len(stream)) - np.repeat(np.cumsum([0, *lengths])[:-1], lengths)  # places in their texts
        likeliest: dict[int, tuple[int, float]] = {}
        keys, chances = np.zeros_like(stream), np.zeros(len(stream))  # of contexts of this size, and of tokens there
        for size in range(ORDER + 1):
            here = np.flatnonzero(age >= size)
            if size:
                keys[here] += (stream[here - size] + 1) * (vocab + 1) ** (size - 1)
            contexts, context = np.unique(keys[here], return_inverse=True)
            # A pair is a context and a token after it; `first` is a place of each.
            pairs, first, pair = np.unique(context * vocab + stream[here], return_index=True, return_inverse=True)
            counts = np.bincount(np.unique(pair * len(parts) + text[here]) // max(1, len(parts)))
            owners, tokens = np.divmod(pairs, vocab)
            total, kinds = np.bincount(owners, counts), np.bincount(owners)
            law = (counts + kinds[owners] * chances[here[first]]) / (total + kinds)[owners]
            chances[here] = law[pair]
            if size:
                order = np.lexsort((tokens, -law, owners))  # the likeliest of each context first
                best = order[np.unique(owners[order], return_index=True)[1]][total >= TEXTS]
                found = zip(tokens[best].tolist(), law[best].tolist(), strict=True)
                likeliest |= zip(contexts[total >= TEXTS].tolist(), found, strict=True)
        return Phrases(likeliest, vocab)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the table; chances are rounded to 1/255."""
        keys = sorted(self._next)
        tokens, chances = zip(*(self._next[key] for key in keys), strict=True) if keys else ((), ())
        arrays = {
            "keys": np.array(keys, np.int64),
            "tokens": np.array(tokens, np.uint16 if self.vocab <= 1 << 16 else np.int32),
            "chances": (np.array(chances) * 255).round().astype(np.uint8),
        }
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        save_tensors(path, KIND, tensors, {"vocab": str(self.vocab)})

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Phrases:
        """Read a table. Raises FileNotFoundError, and ValueError if it is damaged, another format or version."""
        with KIND.contents(path) as (tensors, about):
            keys, tokens, chances = (tensors[name].numpy() for name in ("keys", "tokens", "chances"))
            vocab = int(about["vocab"])
            if not keys.shape == tokens.shape == chances.shape or (tokens >= vocab).any() or (tokens < 0).any():
                raise ValueError("its arrays do not fit together")
            pairs = zip(tokens.tolist(), (chances / 255).tolist(), strict=True)
            return Phrases(dict(zip(keys.tolist(), pairs, strict=True)), vocab)


def _keys(context: Sequence[int], vocab: int) -> list[int]:
    """Return the numbers of the last 1, 2, ... tokens of a context."""
    keys, key, place = list[int](), 0, 1
    for token in reversed(context):
        key += (token + 1) * place
        place *= vocab + 1
        keys.append(key)
    return keys


class PhraseDrafter(CopyingDrafter[SuffixAutomaton]):
    """Copies what followed the longest match in the text, or drafts a phrase where that is likelier to stand.

    A draft ends where the chance that all of it stands falls below LEAST. q is a point mass, so that a drafted x is
    kept with chance p(x): what is drafted depends on the text alone.
    """

    traits = Traits(by_text=True)

    def __init__(self, phrases: Phrases, vocab: int) -> None:
        """Make the drafter; `vocab` is the size of the target's logits. Raises ValueError if the table's differs."""
        super().__init__()
        if phrases.vocab != vocab:
            raise ValueError(f"the table of phrases knows {phrases.vocab} token ids, the target {vocab}: make another.")
        self.phrases, self.facts = phrases, phrases.facts

    def begin(self, row: Row) -> SuffixAutomaton:
        return SuffixAutomaton()

    def copy(self, row: Row, gamma: int) -> list[int]:
        automaton = self.known[row]
        automaton.follow(row.tokens)
        copied, draft, stands = automaton.following(gamma), list[int](), 1.0
        text = row.tokens[-ORDER:]
        for place in range(gamma):
            token, chance = self.phrases.after(text)
            if place < len(copied):
                square = (automaton.length + place) ** 2
                if (own := square / (square + HALF)) >= chance:
                    token, chance = copied[place], own
                elif token != copied[place]:
                    copied = []
            stands *= chance
            if stands < LEAST:
                break
            draft.append(token)
            text = [*text[1 - ORDER :], token]
        return draft
