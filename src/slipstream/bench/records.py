"""The records of the benchmark: settings, tasks, contenders and results; and the built-in prompts."""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from slipstream.core.source import SourceFrame
from slipstream.core.stats import Stats
from slipstream.core.values import check_least
from slipstream.decoding.rules import rule
from slipstream.measure.timing import Spread
from slipstream.text.jsontext import json_text

PLAIN, SPECULATIVE = "slipstream plain", "slipstream speculative"
GENERATE, ASSISTED = "transformers generate", "transformers assisted"
ASSISTED_AUTO, LOOKUP = "transformers auto", "transformers lookup"
EAGER, COMPILED = "eager", "compiled"

PROMPTS = (  # beginnings of Python programs, for a benchmark without a file; the quick one takes the first four
    'def moving_average(values, window):\n    """Return the mean of every run of `window` consecutive values."""\n',
    'def is_palindrome(text):\n    """Return True if the text reads the same backwards, ignoring case and spaces."""\n',
    'def merge(left, right):\n    """Merge two sorted lists.\n\n    >>> merge([1, 4], [2])\n    [1, 2, 4]\n    """\n',
    'def count_words(path):\n    """Read a file and return a dictionary from each word to how often it occurs."""\n',
    'import math\n\n\ndef is_prime(number):\n    """Return whether a positive integer is prime."""\n',
    'class Stack:\n    """Items with push, pop, peek and a length."""\n\n    def __init__(self):\n',
    'def binary_search(items, wanted):\n    """Return the index of `wanted` in a sorted list, or -1."""\n    low = 0\n',
    'from collections import deque\n\n\ndef breadth_first(graph, start):\n    """Yield the nodes by distance."""\n',
    'def flatten(nested):\n    """Return the items of lists within lists as one list."""\n',
    'import re\n\n\ndef find_dates(text):\n    """Return all dates like 2024-01-31 that a text contains."""\n',
    'def transpose(matrix):\n    """Swap rows and columns of a list of lists."""\n',
    'class Counter:\n    """Count hashable items."""\n\n    def __init__(self, items=()):\n',
    'def read_config(path):\n    """Read lines `name = value`, skip comments, return a dictionary."""\n',
    'import os\n\n\ndef total_size(folder):\n    """Return the sizes of all files below a folder."""\n',
    'def roman(number):\n    """Write a number between 1 and 3999 in Roman numerals."""\n',
    'def retry(function, attempts=3):\n    """Call a function until it does not raise, at most `attempts` times."""\n',
)


@dataclass(frozen=True)
class BenchSettings:
    """The settings of a benchmark. Every pair of batch and temperature is a race of its own.

    `rules` are the acceptance rules of Slipstream by name; none means the engine's own. `ignore_eos` gives all
    contenders exactly the same work; without it outputs end after EOS. With `seconds`, a race takes fewer prompts,
    tokens and repetitions where its share of that time is too short for all. Raises ValueError for impossible settings.
    """

    gammas: tuple[int, ...] = (3, 5, 8)
    batches: tuple[int, ...] = (1, 4, 16)
    temperatures: tuple[float, ...] = (0.0, 1.0)
    max_new_tokens: int = 64
    repetitions: int = 5
    ignore_eos: bool = True
    seed: int = 0
    rules: tuple[str, ...] = ()
    seconds: float | None = None

    def __post_init__(self) -> None:
        check_least(self, gammas=1, batches=1, temperatures=0, max_new_tokens=1, repetitions=1)
        for name in self.rules:
            rule(name)


FULL, QUICK = BenchSettings(), BenchSettings(gammas=(5,), batches=(1,), max_new_tokens=48, repetitions=3, seconds=60.0)
"""The default settings, and those that end within two minutes, loading included, also on a busy machine."""


@dataclass(frozen=True)
class BenchTask:
    """A task for a contender: continue `prompts` (token ids), `batch` at a time; with a `frame`, write from them as
    sources."""

    prompts: tuple[tuple[int, ...], ...]
    batch: int
    temperature: float
    max_new_tokens: int
    eos: frozenset[int]
    seed: int
    frame: SourceFrame | None = None


@dataclass(frozen=True)
class Output:
    """The new tokens of every prompt, and the figures that the contender counted.

    `calls` counts forward passes of the target, without a separate prefill; `stats` are those of Slipstream's
    contenders alone; `seconds` are set if the run was timed.
    """

    tokens: list[list[int]]
    stats: Stats = field(default_factory=Stats)
    calls: int = 0
    seconds: float = 0.0

    @property
    def emitted(self) -> int:
        return sum(map(len, self.tokens))

    @property
    def speed(self) -> float:
        return self.emitted / self.seconds


@dataclass(frozen=True)
class Contender:
    """A way to continue prompts, at most `largest_batch` at a time.
    `draft`, `rule` and `execution` ("eager", "compiled") are given where there is a choice."""

    name: str
    run: Callable[[BenchTask], Output]
    gamma: int | None = None
    largest_batch: int = sys.maxsize
    draft: str | None = None
    rule: str | None = None
    execution: str | None = None


@dataclass(frozen=True)
class Result:
    """A row of the report: one contender at one batch and temperature; figures that it lacks are None.

    `tokens` are those of all repetitions, `speeds` the tokens per second of each. `matches_*` count prompts with the
    same greedy tokens in every repetition. `milliseconds_per_call` is the wall time of a run, prefill included, divided
    by the passes of the target. `milliseconds`, of Slipstream's contenders, are per round: `round` is wall time without
    the target's prefill, `rest` what is not draft, target or accept, and `overhead` is round / (draft + target) - 1.
    """

    contender: str
    batch: int
    temperature: float
    gamma: int | None
    draft: str | None
    rule: str | None
    execution: str | None
    prompts: int
    tokens: int
    speeds: list[float]
    tokens_per_second: Spread
    ratio_to_plain: Spread | None
    ratio_to_transformers: Spread | None
    matches_plain: int | None
    matches_transformers: int | None
    milliseconds_per_call: Spread | None = None
    alpha: float | None = None
    mean_acceptance_length: float | None = None
    draft_acceptance_rate: float | None = None
    milliseconds: dict[str, float] | None = None
    overhead: float | None = None


@dataclass
class BenchReport:
    """A report of a benchmark: the environment, the settings and the results."""

    environment: dict[str, Any]
    settings: BenchSettings
    rows: list[Result] = field(default_factory=list)
    interrupted: bool = False

    def as_dict(self) -> dict[str, Any]:
        return json.loads(json_text(asdict(self)))
