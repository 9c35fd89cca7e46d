"""Draft by an n-gram model: table lookup with a full law q, so that c is about 0 (section 3.6 of the paper).

The tables are smoothed by interpolated modified Kneser-Ney (Chen and Goodman 1998, section 3), which predicts best
in their comparison and in ours with Witten-Bell: its lower orders count in how many contexts a token appears, not
how often.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.core.draft import Draft
from slipstream.core.law import Law
from slipstream.core.protocols import Drafter, Traits
from slipstream.core.round import Context
from slipstream.drafters.datastore.corpus import as_ids
from slipstream.drafters.sampled import law_of, sample_chain
from slipstream.files import TensorFileKind, save_tensors

ORDERS = range(1, 6)
MOST_TOKENS = 1 << 24  # the largest vocabulary: above all real ones, small enough for tables with an entry per token
KIND = TensorFileKind("n-gram model", "slipstream.ngram", "2", "build it with `slipstream draft build`")

FALLBACK = (0.5, 1.0, 1.5)
"""The discounts of counts 1, 2, 3 or more if there is too little text to compute them (KenLM's values)."""

Array = np.ndarray[Any, np.dtype[Any]]

State = tuple[int, ...]
"""The known contexts of a position, shortest first: entry k is the place of the last k tokens in the tables."""

Level = tuple[float, Array, Array]
"""A step of interpolation, gamma * lower + alpha at tokens: (gamma, tokens (n,), alpha (n,))."""


@dataclass(frozen=True, slots=True)
class Table:
    """The n-grams of one order, sorted by context: those of context c lie at starts[c] up to starts[c + 1].

    A context is the place of its own n-gram in the table one order lower (its token, for bigrams; the id `vocab`
    stands for the start of a text). `tokens` and `alpha` (ngrams,) are the last token of each n-gram and its
    discounted probability; `gamma` (contexts,) is the mass that a context leaves to the lower order.
    """

    starts: Array
    tokens: Array
    alpha: Array
    gamma: Array

    def level(self, context: int) -> Level:
        """Return the interpolation step of a context: its gamma, and tokens with alpha."""
        here = slice(int(self.starts[context]), int(self.starts[context + 1]))
        return float(self.gamma[context]), self.tokens[here], self.alpha[here]

    def find(self, context: int, token: int) -> int | None:
        """Return the place of an n-gram, by binary search; None if it was never seen."""
        start, end = int(self.starts[context]), int(self.starts[context + 1])
        place = start + int(self.tokens[start:end].searchsorted(self.tokens.dtype.type(token)))
        return place if place < end and int(self.tokens[place]) == token else None

    def check(self, contexts: int) -> None:
        """Raises ValueError if the sizes of the arrays do not fit together."""
        grams = len(self.tokens)
        if (len(self.starts), len(self.alpha), len(self.gamma)) != (contexts + 1, grams, contexts):
            raise ValueError("its tables have sizes that do not fit together")
        if (int(self.starts[0]), int(self.starts[-1])) != (0, grams):
            raise ValueError("its index has the wrong ends")


@dataclass(frozen=True, eq=False)
class NgramModel:
    """An immutable n-gram model. `unigram` (vocab,) is p_1, positive everywhere; `tables` are orders 2, 3, ...
    p_n(w | h) = alpha_n(w | h) + gamma_n(h) p_{n-1}(w | h without its first token); unseen contexts pass on p_{n-1}."""

    unigram: Array
    tables: tuple[Table, ...] = ()

    @property
    def order(self) -> int:
        return 1 + len(self.tables)

    @property
    def vocab(self) -> int:
        return len(self.unigram)

    @property
    def sizes(self) -> list[int]:
        return [self.vocab, *(len(table.tokens) for table in self.tables)]

    @property
    def facts(self) -> str:
        grams = ", ".join(f"{count} of order {n}" for n, count in enumerate(self.sizes, 1))
        return f"order {self.order}, {self.vocab} token ids; n-grams: {grams}"

    @staticmethod
    def fit(sequences: Iterable[Sequence[int] | Array | torch.Tensor], order: int, vocab: int) -> NgramModel:
        """Make a model by counting and smoothing texts, each an array of token ids (length,).

        It needs 100 to 200 bytes of memory per token. Raises ValueError for an order outside 1..5, ids outside the
        vocabulary, and no tokens at all.
        """
        if order not in ORDERS:
            raise ValueError(f"order={order} is not possible: it must be between {ORDERS[0]} and {ORDERS[-1]}.")
        if not 1 <= vocab <= MOST_TOKENS:
            raise ValueError(f"vocab={vocab} is not possible: it must be between 1 and {MOST_TOKENS}.")
        unigram, tables = np.empty(0), list[Table]()
        for n, grams in enumerate(_count(*_stream(sequences, vocab), order, vocab), 1):
            table = _discounted(grams, vocab)
            if n == 1:  # it has every token, in order, and shares the mass that is left equally
                unigram = table.alpha + table.gamma / np.float32(vocab)
            else:
                tables.append(table)
        return NgramModel(unigram, tuple(tables))

    def state(self, text: Sequence[int]) -> State:
        """Return the state after a text, given whole or by at least its last order - 1 tokens."""
        short = len(text) < self.order - 1
        state = self.advance((0,), self.vocab) if short else (0,)
        for token in text[max(0, len(text) - self.order + 1) :]:
            state = self.advance(state, token)
        return state

    def advance(self, state: State, token: int) -> State:
        """Return the state one token later, with one binary search per order."""
        known = [0, token][: self.order]
        for table, context in zip(self.tables[:-1], state[1:], strict=False):
            place = table.find(context, token)
            if place is None:  # then longer contexts were not seen either
                break
            known.append(place)
        return tuple(known)

    def law(self, state: State) -> Array:
        """Return q (vocab,) of the next token."""
        levels = [table.level(context) for table, context in zip(self.tables, state[1:], strict=False)]  # lowest first
        parts, weight = [], 1.0
        for gamma, tokens, alpha in reversed(levels):
            parts.append((tokens, weight * alpha))
            weight *= gamma
        q = self.unigram * weight
        for tokens, mass in parts:
            q[tokens] += mass
        return q

    def save(self, path: str | os.PathLike[str]) -> None:
        arrays = {"1.unigram": self.unigram}
        for n, table in enumerate(self.tables, 2):
            arrays |= {f"{n}.{name}": getattr(table, name) for name in Table.__slots__}
        tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
        save_tensors(path, KIND, tensors, {"order": str(self.order), "vocab": str(self.vocab)})

    @staticmethod
    def load(path: str | os.PathLike[str]) -> NgramModel:
        """Map a file into memory, after reading it once to verify its checksum.
        Raises FileNotFoundError, and ValueError if it is damaged, another format or another version."""
        with KIND.contents(path) as (tensors, about):
            arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
            orders = range(2, int(about["order"]) + 1)
            tables = [Table(*(arrays.pop(f"{n}.{name}") for name in Table.__slots__)) for n in orders]
            model = NgramModel(arrays.pop("1.unigram"), tuple(tables))
            if model.order not in ORDERS or model.vocab != int(about["vocab"]) or arrays:
                raise ValueError("its order or vocabulary is not the one it names")
            contexts = [model.vocab + 1, *(len(table.tokens) for table in tables)]
            for table, count in zip(tables, contexts, strict=False):
                table.check(count)
        return model


@dataclass(frozen=True, slots=True)
class _Grams:
    """The different n-grams of one order: `keys` (sorted) are context * vocab + token, `counts` Kneser-Ney's."""

    keys: Array
    counts: Array
    contexts: int


def _stream(sequences: Iterable[Sequence[int] | Array | torch.Tensor], vocab: int) -> tuple[Array, Array]:
    """Concatenate all texts, each after the id `vocab` -> the ids, and every token's place in its text, from 1."""
    start, parts = np.array([vocab], np.int32), list[Array]()
    for ids in map(as_ids, sequences):
        if not ids.size:
            continue
        if ids.min() < 0 or ids.max() >= vocab:
            raise ValueError(f"token ids {ids.min()}..{ids.max()} do not fit a vocabulary of {vocab}.")
        parts += [start, ids.astype(np.int32)]
    if not parts:
        raise ValueError("there are no tokens to count: give at least one sequence that is not empty.")
    stream = np.concatenate(parts)
    starts = np.flatnonzero(stream == vocab)
    lengths = np.diff(starts, append=len(stream))
    return stream, np.arange(len(stream)) - np.repeat(starts, lengths)


def _count(stream: Array, age: Array, order: int, vocab: int) -> Iterator[_Grams]:
    """Yield the n-grams of order 1, 2, ... with the counts of Kneser-Ney.

    Below the highest order an n-gram counts the different tokens before it, the start of a text being one; an n-gram
    that begins with the start of a text has nothing before it and keeps its plain count.
    """
    ids = stream.astype(np.int64)  # of the n-gram that ends at each token; for order 1 the token itself, or the start
    keys, contexts = np.arange(vocab), 1
    counts, first = np.bincount(stream, minlength=vocab)[:vocab], np.zeros(vocab, bool)
    for n in range(2, order + 1):
        ends = np.flatnonzero(age >= n - 1)
        longer = ids[ends - 1] * vocab + stream[ends]
        by_key = np.argsort(longer)
        longer = longer[by_key]
        new = np.flatnonzero(np.diff(longer, prepend=-1))
        one = ends[by_key[new]]  # the end of one occurrence of each different n-gram
        # Its last n - 1 tokens are an n-gram of the order below, which this one's first token stands before.
        before = np.bincount(ids[one], minlength=len(keys))[: len(keys)]
        yield _Grams(keys, np.where(first, counts, before), contexts)
        contexts = vocab + 1 if n == 2 else len(keys)
        keys, counts, first = longer[new], np.diff(new, append=len(longer)), age[one] == n - 1
        if n < order:
            ids = np.empty_like(ids)
            ids[ends[by_key]] = np.repeat(np.arange(len(new)), counts)
    yield _Grams(keys, counts, contexts)


def _discounted(grams: _Grams, vocab: int) -> Table:
    """Make the table: alpha(w | h) = (c(h w) - D(c(h w))) / c(h), gamma(h) = sum of its D / c(h), 1 if c(h) is 0."""
    contexts, tokens = np.divmod(grams.keys, vocab)
    lost = np.array([0.0, *discounts(grams.counts)])[np.minimum(grams.counts, 3)]
    total = np.bincount(contexts, grams.counts, grams.contexts)
    left = np.bincount(contexts, lost, grams.contexts)
    starts = np.concatenate([[0], np.bincount(contexts, minlength=grams.contexts).cumsum()])
    return Table(
        starts.astype(np.uint32 if starts[-1] < 1 << 32 else np.int64),
        tokens.astype(np.uint16 if vocab <= 1 << 16 else np.uint32),
        ((grams.counts - lost) / total[contexts]).astype(np.float32),
        np.where(total > 0, left / np.maximum(total, 1), 1).astype(np.float32),
    )


def discounts(counts: Array) -> tuple[float, ...]:
    """Return the discounts of counts 1, 2, 3 and more: equation 26 of Chen and Goodman, from the counts of counts."""
    numbers = np.bincount(np.minimum(counts, 5), minlength=6)
    if not numbers[1:5].all():
        return FALLBACK
    y = numbers[1] / (numbers[1] + 2 * numbers[2])
    estimates = tuple(float(k - (k + 1) * y * numbers[k + 1] / numbers[k]) for k in (1, 2, 3))
    return estimates if all(0 <= lost <= k for k, lost in enumerate(estimates, 1)) else FALLBACK


class Ngram(Drafter):
    """Samples a chain from an n-gram model, with the request's own sampling settings."""

    traits = Traits(by_text=True)

    def __init__(self, model: NgramModel, vocab: int) -> None:
        """Make the drafter; `vocab` is the size of the target's logits. Raises ValueError if the model's differs."""
        if model.vocab != vocab:
            raise ValueError(f"the n-gram model knows {model.vocab} token ids, the target {vocab}: build it for those.")
        self.model, self.facts = model, model.facts

    def propose(self, context: Context, gammas: Sequence[int]) -> Draft:
        states = [self.model.state(row.tokens[-self.model.order :]) for row in context.rows]

        def law_after(tokens: Tensor) -> Law:
            for place, (token,) in enumerate(tokens[:, -1:].tolist() if tokens.shape[1] else ()):
                states[place] = self.model.advance(states[place], token)
            logits = torch.from_numpy(np.log(np.stack(list(map(self.model.law, states))))).unsqueeze(1)
            return law_of(context, logits, tokens, "the n-gram model")

        return sample_chain(context, law_after, gammas, torch.device("cpu"))
