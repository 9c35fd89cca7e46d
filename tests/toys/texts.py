"""Requests, rows, controllers and clocks in one line each."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from slipstream.core.request import Request, Row, Sampler
from slipstream.core.round import Round
from slipstream.decoding.sampling import Sampling

SAMPLE = Sampling(temperature=1.0)
GREEDY = Sampling()


def request(prompt: Sequence[int], count: int, sampler: Sampler = SAMPLE, **kwargs: Any) -> Request:
    return Request(tuple(prompt), sampler, count, **kwargs)


RAGGED = ([3, 1, 4, 1, 5, 9, 2, 6], [2], [7, 1, 8, 2, 8])
"""Three prompts of different lengths."""


def closed(**properties: Any) -> dict[str, Any]:
    """The schema of an object that has all of these properties and no others."""
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def rare(*values: Any) -> list[Any]:
    """Values of a parameter that only the slow tests try: the behaviour is that of the values beside them."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def ragged(sampler: Any = GREEDY, count: int = 12) -> list[Any]:
    """Requests for these prompts, each with a key of its own."""
    return [request(prompt, count, sampler, key=number) for number, prompt in enumerate(RAGGED)]


def row(text: Sequence[int], prompt_length: int | None = None, sampler: Sampler = SAMPLE, index: int = 0) -> Row:
    prompt = text[: len(text) if prompt_length is None else prompt_length]
    return Row(request(prompt, 100, sampler, key=index), index, list(text))


@dataclass(frozen=True)
class Cycle:
    """A controller that runs through a list of gammas."""

    sequence: tuple[int, ...]

    @property
    def most(self) -> int:
        return max(self.sequence)

    def init(self) -> int:
        return 0

    def gammas(self, state: int, rows: Sequence[Row]) -> list[int]:
        return [self.sequence[state % len(self.sequence)]] * len(rows)

    def update(self, state: int, round: Round) -> int:
        return state + 1


class Clock:
    """Time that passes only when somebody says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now
