"""An enumerator of all outcomes: it runs a function once for every sequence of draws."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from slipstream.core.draws import Key, Rng
from slipstream.core.law import Law

Outcome = Any
Distribution = dict[Outcome, float]


@dataclass
class Script:
    """A seam that replays choices and then goes on with the first possible one. Point laws give no choice."""

    choices: list[int]
    weights: list[list[tuple[int, float]]] = field(default_factory=list)  # of every choice met so far
    seen: set[tuple[Any, ...]] = field(default_factory=set)
    coupled = False

    def chances(self, key: Key, positions: int) -> None:
        """Choices are no inversions."""

    def select(self, places: Sequence[int]) -> Script:
        return self

    def __call__(self, law: Law, key: Key) -> Tensor:
        if law.probs is None:
            assert law.tokens is not None
            return law.tokens
        assert law.probs.dtype in {torch.float32, torch.float64}
        rows = [
            [self._choose(weights, (*names, start + j, key.name)) for j, weights in enumerate(row)]
            for *names, start, row in zip(
                key.seeds, key.requests, key.origins, key.positions, law.probs.tolist(), strict=True
            )
        ]
        return torch.tensor(rows, dtype=torch.long).view(law.probs.shape[:2])

    def _choose(self, weights: Sequence[float], name: tuple[Any, ...]) -> int:
        # Two draws under one name would be one and the same number: not the independent draws that we count.
        assert name not in self.seen, f"the key {name} is used twice"
        self.seen.add(name)
        assert all(weight >= 0 for weight in weights), f"negative or NaN weights: {weights}"
        possible = [(token, weight) for token, weight in enumerate(weights) if weight > 0]
        if not possible:  # a coin that nobody looks at (padding); inversion falls off its end
            return len(weights)
        if len(self.weights) == len(self.choices):
            self.choices.append(0)
        choice = self.choices[len(self.weights)]
        self.weights.append(possible)
        return possible[choice][0]

    @property
    def probability(self) -> float:
        chances = [
            options[choice][1] / math.fsum(weight for _, weight in options)
            for options, choice in zip(self.weights, self.choices, strict=True)
        ]
        return math.prod(chances)

    def following(self) -> list[int] | None:
        """The choices of the next branch, depth first; None after the last."""
        choices = list(self.choices)
        while choices and choices[-1] + 1 == len(self.weights[len(choices) - 1]):
            choices.pop()
        return [*choices[:-1], choices[-1] + 1] if choices else None


@dataclass
class SharedScript(Script):
    """A script of coupled draws: all that look at one position invert one number, known as far as they have told it.

    A draw chooses among the tokens that the number may still give, and the number then lies in that token's part.
    """

    known: dict[tuple[Any, ...], tuple[float, float]] = field(default_factory=dict)
    coupled = True

    def __call__(self, law: Law, key: Key) -> Tensor:
        if law.probs is None:
            assert law.tokens is not None
            return law.tokens
        rows = [
            [self._shared(weights, (seed, request, start + j)) for j, weights in enumerate(row)]
            for seed, request, start, row in zip(
                key.seeds, key.requests, key.positions, law.probs.tolist(), strict=True
            )
        ]
        return torch.tensor(rows, dtype=torch.long)

    def _shared(self, weights: Sequence[float], place: tuple[Any, ...]) -> int:
        low, high = self.known.get(place, (0.0, 1.0))
        total = math.fsum(weights)
        if not total:  # see `_choose`
            return len(weights)
        ends = [math.fsum(weights[:count]) / total for count in range(len(weights) + 1)]
        parts = [(max(low, begin), min(high, end)) for begin, end in pairwise(ends)]
        sizes = [end - begin if end - begin > ROUNDING else 0.0 for begin, end in parts]
        token = self._choose(sizes, (*place, len(self.weights)))
        self.known[place] = parts[token]
        return token


@dataclass
class NumberedScript(SharedScript):
    """A script of draws by inversion, in which all draws under one name invert one number, as those of a draft do that
    is thrown away and made again for another text."""

    coupled = False

    def __call__(self, law: Law, key: Key) -> Tensor:
        if law.probs is None:
            assert law.tokens is not None
            return law.tokens
        rows = [
            [self._shared(weights, (*names, start + j, key.name)) for j, weights in enumerate(row)]
            for *names, start, row in zip(
                key.seeds, key.requests, key.origins, key.positions, law.probs.tolist(), strict=True
            )
        ]
        return torch.tensor(rows, dtype=torch.long).view(law.probs.shape[:2])


ROUNDING = 1e-15
"""A part of the numbers from 0 to 1 that is no larger is there by rounding alone."""


def enumerate_outcomes(
    run: Callable[[Rng], Outcome], limit: int = 20_000, script_of: type[Script] = Script
) -> Distribution:
    """The exact law of `run(rng)`: it is run once for every sequence of draws that has a positive chance."""
    law: Distribution = {}
    choices: list[int] | None = []
    for _ in range(limit):
        script = script_of(choices or [])
        outcome = run(script)
        law[outcome] = law.get(outcome, 0.0) + script.probability
        choices = script.following()
        if choices is None:
            return law
    raise AssertionError(f"more than {limit} branches")


def total_variation(left: Distribution, right: Distribution) -> float:
    """Half the L1 distance; also notices mass that is missing on one side."""
    return 0.5 * math.fsum(abs(left.get(x, 0.0) - right.get(x, 0.0)) for x in {*left, *right})


EXACT = 1e-12
WRONG = 1e-3  # a control that is off by less would be a weak one
