"""Table models on three tokens, in pairs of a target and a draft."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from functools import cache

from slipstream.models.tables import Table, TableScorer
from toys.enumeration import Distribution

VOCAB = 3


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
