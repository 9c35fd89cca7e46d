"""Scorers from plain functions and tables, whose laws can be enumerated, and pairs of them on three tokens."""

import math
import random
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from slipstream.core.draft import Tree
from slipstream.core.protocols import Shape
from slipstream.core.source import Source, SourceForm
from toys.enumeration import Distribution

VOCAB = 3
Table = Callable[[tuple[int, ...]], Sequence[float]]  # a function from a prefix to the probabilities of the next token


class TableScorer:
    """An autoregressive process given by a function of the prefix, in float64. The cache, `texts`, holds the tokens."""

    device = torch.device("cpu")
    source_form: SourceForm | None = None

    def __init__(self, table: Table, vocab: int, name: str = "table", context: int | None = None) -> None:
        self.table, self.vocab, self.name, self.context = table, vocab, name, context
        self.texts: list[list[int]] = []

    @property
    def lengths(self) -> list[int]:
        return [len(text) for text in self.texts]

    def add(self, rows: int, sources: Sequence[Source | None] = ()) -> None:
        self.texts += [[] for _ in range(rows)]

    def fork(self, rows: Sequence[int]) -> None:
        self.texts += [list(self.texts[row]) for row in rows]

    def free(self, rows: Sequence[int]) -> None:
        self.texts = [text for place, text in enumerate(self.texts) if place not in set(rows)]

    def rollback(self, lengths: Sequence[int]) -> None:
        assert len(lengths) <= len(self.texts), "one length per row, of the first rows"
        assert all(new <= old for new, old in zip(lengths, self.lengths, strict=False)), "rollback only shortens"
        for text, length in zip(self.texts, lengths, strict=False):
            del text[length:]

    def scrub(self) -> None:
        """Do nothing: a text that was freed leaves no state in a table."""

    def extend(self, tokens: Tensor, counts: Sequence[int], first: int = 0, tree: Tree | None = None) -> Tensor:
        """Feed tokens (rows, n) to the rows from `first` on -> log probabilities (rows, n, vocab)."""
        laws: list[list[Sequence[float]]] = [[(1.0,) * self.vocab] * tokens.shape[1] for _ in counts]
        for r, (row, count) in enumerate(zip(tokens.tolist(), counts, strict=True)):
            text = self.texts[first + r]
            held, seen = (0, None) if tree is None else tree.of_row(r)
            base = len(text) - held
            for j, new in enumerate(row[:count]):
                text.append(new)
                line = text[base:] if seen is None else [text[base + k] for k in seen[j].nonzero()[:, 0].tolist()]
                laws[r][j] = self.table((*text[:base], *line))
        return torch.tensor(laws, dtype=torch.float64).view(*tokens.shape, self.vocab).log()

    def keep(self, starts: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        for text, start, path in zip(self.texts[: len(starts)], starts, paths, strict=True):
            text[start : start + len(path)] = [text[start + place] for place in path]

    def prefill(self, texts: Sequence[Sequence[int]], first: int = 0) -> None:
        for text, new in zip(self.texts[first : first + len(texts)], texts, strict=True):
            text.extend(new)

    def fix_shape(self, shape: Shape | None) -> None:
        """Do nothing: a table gives the same numbers in any batch."""


def dirichlet_table(seed: int, support: Callable[[random.Random], Sequence[int]] | None = None) -> Table:
    """Reproducible random laws, one per prefix, on the tokens that `support` picks for the prefix."""

    @cache
    def table(prefix: tuple[int, ...]) -> tuple[float, ...]:
        rng = random.Random(f"{seed} {prefix}")
        tokens = set(range(VOCAB)) if support is None else set(support(rng))
        weights = [rng.gammavariate(0.7, 1.0) + 1e-3 if token in tokens else 0.0 for token in range(VOCAB)]
        return tuple(weight / math.fsum(weights) for weight in weights)

    return table


def some(rng: random.Random) -> list[int]:
    """One to three tokens."""
    return rng.sample(range(VOCAB), rng.choice([1, 2, 2, 3]))


def one(rng: random.Random) -> list[int]:
    """One token: a point mass in dense form."""
    return [rng.randrange(VOCAB)]


def one_or_all(rng: random.Random) -> list[int]:
    """A point mass for half of the prefixes."""
    return one(rng) if rng.random() < 0.5 else list(range(VOCAB))


def _disjoint(seed: int) -> tuple[Table, Table]:
    @cache
    def left(prefix: tuple[int, ...]) -> tuple[int, ...]:
        rng = random.Random(f"side {seed} {prefix}")
        return tuple(rng.sample(range(VOCAB), rng.choice([1, 2])))

    first, second = dirichlet_table(7), dirichlet_table(8)

    def cut(table: Table, inside: bool) -> Table:
        def law(prefix: tuple[int, ...]) -> tuple[float, ...]:
            weights = [x if (i in left(prefix)) == inside else 0.0 for i, x in enumerate(table(prefix))]
            return tuple(weight / math.fsum(weights) for weight in weights)

        return cache(law)

    return cut(first, True), cut(second, False)


PAIRS: dict[str, tuple[Table, Table]] = {
    "generic": (dirichlet_table(1), dirichlet_table(2)),
    "zeros": (dirichlet_table(13, some), dirichlet_table(35, some)),
    "disjoint": _disjoint(5),
    "same": (dirichlet_table(5), dirichlet_table(5)),
    "points": (dirichlet_table(36, one_or_all), dirichlet_table(26, one_or_all)),
}
"""name -> (target, draft)."""


def scorer(table: Table, name: str = "table", vocab: int = VOCAB, context: int | None = None) -> TableScorer:
    return TableScorer(table, vocab, name, context)


Step = Callable[[tuple[int, ...]], Sequence[float]]


def plain_law(step: Step, prompt: Sequence[int], count: int, ends: Sequence[int] = ()) -> Distribution:
    """The oracle: the law of the first `count` tokens (fewer after one of `ends`), one step after the other."""
    law: Distribution = {(): 1.0}
    for _ in range(count):
        longer: Distribution = {}
        for text, chance in law.items():
            if text and text[-1] in ends:
                longer[text] = chance
                continue
            for token, weight in enumerate(step((*prompt, *text))):
                if weight > 0:
                    longer[(*text, token)] = chance * weight
        law = longer
    return law
