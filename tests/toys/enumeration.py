"""An enumerator of all outcomes: it runs a function once for every sequence of draws."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any

import torch
from torch import Tensor

from slipstream.core.draws import Key, Purpose, Rng
from slipstream.core.law import Law

Outcome = Any
Distribution = dict[Outcome, float]


Name = tuple[Any, ...]
Choice = tuple[list[tuple[int, float]], int]  # the possible tokens with their weights, and the place of the one chosen


@dataclass
class Script:
    """A seam that repeats choices and takes the first possible one where there is none. Point laws give no choice.

    No draft reaches the last token of a text, at `last`: draws for it and what follows are padding beside longer rows.
    """

    choices: dict[Name, Choice]
    last: int | None = None
    seen: set[Name] = field(default_factory=set)
    ended = False  # what is drawn from now on does not count
    coupled = False

    def chances(self, key: Key, positions: int) -> None:
        """Choices are no inversions."""

    def select(self, places: Sequence[int]) -> Script:
        return self

    def of(self, request: int) -> tuple[Script, int]:
        """The script of a row, by the key of its request, and that key in the script."""
        return self, request

    def __call__(self, law: Law, key: Key) -> Tensor:
        if law.probs is None:
            assert law.tokens is not None
            return law.tokens
        assert law.probs.dtype in {torch.float32, torch.float64}
        places = zip(map(self.of, key.requests), key.origins, key.positions, law.probs.tolist(), strict=True)
        rows = [
            [script.draw(weights, (one, start + j), (origin, key.name)) for j, weights in enumerate(row)]
            for (script, one), origin, start, row in places
        ]
        return torch.tensor(rows, dtype=torch.long).view(law.probs.shape[:2])

    def draw(self, weights: Sequence[float], place: tuple[int, int], use: tuple[Any, ...]) -> int:
        """One of the tokens with positive weight, for this place and this use of it."""
        # Two draws under one name would be one and the same number: not the independent draws that we count.
        name = (*place, *use)
        assert name not in self.seen, f"the key {name} is used twice"
        self.seen.add(name)
        assert all(weight >= 0 for weight in weights), f"negative or NaN weights: {weights}"
        possible = [(token, weight) for token, weight in enumerate(weights) if weight > 0]
        if not possible:  # a coin that nobody looks at (padding); inversion falls off its end
            return len(weights)
        padding = self.last is not None and place[1] + (use[1] != Purpose.NEXT) > self.last
        if len(possible) == 1 or padding or self.ended:
            return possible[0][0]
        known, choice = self.choices.setdefault(name, (possible, 0))
        assert [token for token, _ in known] == [token for token, _ in possible], "a row depends on the others"
        return possible[choice][0]

    @property
    def probability(self) -> float:
        return math.prod(options[at][1] / sum(weight for _, weight in options) for options, at in self.choices.values())

    def branches(self, given: int) -> Iterator[dict[Name, Choice]]:
        """The choices that differ from these in the last of them, which was not among the first, that were `given`."""
        for place, (name, (options, _)) in enumerate(self.choices.items()):
            if place >= given:
                before = dict(islice(self.choices.items(), place))
                yield from ({**before, name: (options, other)} for other in range(1, len(options)))


@dataclass
class SharedScript(Script):
    """A script of coupled draws: all that look at one position invert one number, known as far as they have told it.

    A draw chooses among the tokens that the number may still give, and the number then lies in that token's part.
    """

    known: dict[Name, tuple[float, float]] = field(default_factory=dict)
    coupled = True

    def draw(self, weights: Sequence[float], place: tuple[int, int], use: tuple[Any, ...]) -> int:
        number = place if self.coupled else (*place, *use)
        low, high = self.known.get(number, (0.0, 1.0))
        total = math.fsum(weights)
        if not total:  # see `Script.draw`
            return len(weights)
        ends = [math.fsum(weights[:count]) / total for count in range(len(weights) + 1)]
        parts = [(max(low, begin), min(high, end)) for begin, end in pairwise(ends)]
        sizes = [end - begin if end - begin > ROUNDING else 0.0 for begin, end in parts]
        token = super().draw(sizes, place, (*use, len(self.seen)))
        self.known[number] = parts[token]
        return token


class NumberedScript(SharedScript):
    """A script of draws by inversion, in which all draws under one name invert one number, as those of a draft do that
    is thrown away and made again for another text."""

    coupled = False


class Scripts(Script):
    """A script for each row of a batch, by the key of its request."""

    def __init__(self, rows: Sequence[Script]) -> None:
        self.rows = rows

    def of(self, request: int) -> tuple[Script, int]:
        return self.rows[request], 0


ROUNDING = 1e-15  # a part of the numbers from 0 to 1 that is no larger is there by rounding alone


def enumerate_outcomes(
    run: Callable[[Rng], Outcome], limit: int = 20_000, script_of: type[Script] = Script
) -> Distribution:
    """The exact law of `run(rng)`: it is run once for every sequence of draws that has a positive chance."""
    return enumerate_rows(lambda scripts: [run(script) for script in scripts], limit, script_of)


def enumerate_rows(
    run: Callable[[Sequence[Script]], Sequence[Outcome]],
    limit: int,
    script_of: type[Script] = Script,
    last: int | None = None,
) -> Distribution:
    """The exact law of what `run(scripts)` gives for each script, which is to depend on nothing but that script."""
    law: Distribution = {}
    waiting: list[dict[Name, Choice]] = [{}]
    while waiting:
        together, waiting = waiting[-ROWS:], waiting[:-ROWS]
        scripts = [script_of({**choices}, last) for choices in together]
        for given, script, outcome in zip(together, scripts, run(scripts), strict=True):
            law[outcome] = law.get(outcome, 0.0) + script.probability
            waiting += script.branches(len(given))
        limit -= len(together)
        assert limit >= len(waiting), "more branches than allowed"
    assert math.isclose(math.fsum(law.values()), 1), "chances do not add up"
    return law


ROWS = 64  # as many as a draft server takes; more at once take no less time


def total_variation(left: Distribution, right: Distribution) -> float:
    """Half the L1 distance; also notices mass that is missing on one side."""
    return 0.5 * math.fsum(abs(left.get(x, 0.0) - right.get(x, 0.0)) for x in {*left, *right})


EXACT = 1e-12
WRONG = 1e-3  # a control that is off by less would be a weak one
