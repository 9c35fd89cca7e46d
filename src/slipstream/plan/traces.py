"""Load curves: the times of requests, the lengths of prompts and outputs, from traces that clusters publish."""

from __future__ import annotations

import csv
import gzip
import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

NAMES = {
    "time": ("TIMESTAMP", "timestamp", "arrived_at", "time"),
    "prompt": ("ContextTokens", "num_prefill_tokens", "prompt_tokens", "input_tokens"),
    "tokens": ("GeneratedTokens", "num_decode_tokens", "completion_tokens", "output_tokens"),
}
"""The possible names of a trace's columns: Azure's traces of 2023 and 2024, Vidur's, and plain words."""

JITTER = 5.0  # copies of a request arrive within this many seconds of it, where a trace is taken several times


@dataclass(frozen=True)
class Arrival:
    """A request: its arrival, in seconds from the beginning, and its numbers of prompt and output tokens."""

    time: float
    prompt: int
    tokens: int


def read_trace(path: str | Path) -> list[Arrival]:
    """Read a trace, a CSV file with names in its first line, possibly packed as .gz -> its requests by time.

    Times are dates or seconds. Raises ValueError if columns are missing or a line is not possible.
    """
    arrivals = list[Arrival]()
    open_ = gzip.open if str(path).endswith(".gz") else open
    with open_(path, "rt", encoding="utf-8", newline="") as file:
        lines = csv.DictReader(file)
        try:
            columns = []
            for what, names in NAMES.items():
                if not (known := [name for name in names if name in (lines.fieldnames or ())]):
                    raise ValueError(f"there is no column for the {what}: call it {' or '.join(names)}.")
                columns.append(known[0])
            for line in lines:
                time, prompt, tokens = (line[name] for name in columns)
                arrivals.append(Arrival(_seconds(time), int(prompt), int(tokens)))
                if arrivals[-1].prompt < 0 or arrivals[-1].tokens < 0:
                    raise ValueError(f"a request of {prompt} and {tokens} tokens is not possible.")
        except (ValueError, TypeError, OSError, EOFError, csv.Error) as error:
            raise ValueError(f"{path}, line {lines.line_num}: {error}") from error
    if not arrivals:
        raise ValueError(f"{path} holds no request.")
    begin = min(each.time for each in arrivals)
    return sorted(
        (Arrival(each.time - begin, each.prompt, each.tokens) for each in arrivals), key=lambda each: each.time
    )


def multiplied(arrivals: Sequence[Arrival], load: float, seed: int = 0) -> list[Arrival]:
    """Return `load` times the requests: below 1, some are left out; above 1, copies arrive some seconds apart."""
    if not 0 < load < float("inf"):
        raise ValueError(f"a load of {load:g} is not possible: it is above 0, and 1 takes the trace as it is.")
    chance, copies = random.Random(seed), list[Arrival]()
    for each in arrivals:
        for copy in range(int(load) + (chance.random() < load % 1)):
            shift = chance.uniform(-JITTER, JITTER) if copy else 0.0
            copies.append(Arrival(max(0.0, each.time + shift), each.prompt, each.tokens))
    return sorted(copies, key=lambda each: each.time)


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return datetime.fromisoformat(text.strip()[:26]).timestamp()  # Azure writes tenths of microseconds
