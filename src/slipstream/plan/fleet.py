"""A simulation by events of a fleet of replicas under a load curve, from costs that a plan has measured.

Between two events (a request comes, a prompt is read, a text ends) all rows of a replica decode at the same pace, which
depends on their number: the seconds per token that were measured for so many rows. While a prompt is read, the rows
wait, for as long as reading it was measured to take. Of two replicas drawn at random, a request goes to the one with
the shorter queue.
"""

import csv
import gzip
import random
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

from slipstream.engine.plan_file import Plan

NAMES = {  # the possible names of a trace's columns: Azure's traces of 2023 and 2024, Vidur's, and plain words
    "time": ("TIMESTAMP", "timestamp", "arrived_at", "time"),
    "prompt": ("ContextTokens", "num_prefill_tokens", "prompt_tokens", "input_tokens"),
    "tokens": ("GeneratedTokens", "num_decode_tokens", "completion_tokens", "output_tokens"),
}
JITTER = 5.0  # copies of a request arrive within this many seconds of it, where a trace is taken several times


@dataclass(frozen=True)
class Arrival:
    """A request: its arrival, in seconds from the beginning, and its numbers of prompt and output tokens."""

    time: float
    prompt: int
    tokens: int


def read_trace(path: str | Path) -> list[Arrival]:
    """Read a trace, a CSV file with names in its first line, possibly packed as .gz -> its requests by time.
    Times are dates or seconds. Raises ValueError if columns are missing or a line is not possible."""
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


QUANTILES = (0.5, 0.95, 0.99)


@dataclass(frozen=True)
class Pace:
    """The measured pace of one replica: seconds per token by the number of rows, and of a prompt's token.

    `seconds` are per token of a row, for each of the numbers of `rows` that ran together (ascending); `reading` is per
    token of a prompt. At most the last number of rows runs.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    reading: float

    def per_token(self, rows: int) -> float:
        """Return the seconds per token of each of `rows` rows, interpolated linearly between two measured numbers."""
        place = min(max(1, bisect_left(self.rows, rows)), len(self.rows) - 1)
        if rows <= self.rows[0] or len(self.rows) == 1:
            return self.seconds[0]
        (low, high), (before, after) = self.rows[place - 1 : place + 1], self.seconds[place - 1 : place + 1]
        return before + (after - before) * (rows - low) / (high - low)


def paces(plan: Plan) -> dict[str, Pace]:
    """Return the paces that a plan has measured: of plain decoding, and of the draft and the gammas that it chose."""
    try:
        figures = plan.figures
        name, reading = figures["draft"], figures["reading"]["seconds"] / figures["reading"]["tokens"]
        outlooks = {int(rows): outlook[name] for rows, outlook in figures["outlooks"].items()}
        rows = tuple(sorted(outlooks))
        plain = tuple(outlooks[count]["milliseconds_by_width"]["plain"]["seconds"]["median"] / 1000 for count in rows)
        shares = [1.0] * len(rows)  # the predicted time of a token over that of plain decoding
        for place, count in enumerate(rows):
            if gamma := plan.gammas[count]:
                chosen = next(each for each in outlooks[count]["predictions"] if each["gamma"] == gamma)
                shares[place] = chosen["round"] / chosen["tokens_per_call"]
    except (KeyError, TypeError, ZeroDivisionError, StopIteration) as error:
        raise ValueError(f"the plan lacks figures that a simulation needs ({error}): make it again.") from error
    ours = tuple(step * share for step, share in zip(plain, shares, strict=True))
    return {"plain": Pace(rows, plain, reading), "speculative": Pace(rows, ours, reading)}


@dataclass
class Fate:
    """The times of a simulated request: when it arrived, when its first token came, and when it ended; in seconds."""

    arrival: Arrival
    first: float = 0.0
    end: float = 0.0


@dataclass
class SimulatedReplica:
    """A simulated replica at time `now`: the rows that run, the prompt being read, and the requests that wait."""

    pace: Pace
    now: float = 0.0
    busy: float = 0.0
    _written: float = 0.0  # tokens that a row would have if it had run from the beginning
    _running: list[tuple[float, int, Fate]] = field(default_factory=list)  # a heap: `_written` at each row's end
    _reading: tuple[float, Fate] | None = None  # the time at which the prompt will have been read
    _waiting: deque[Fate] = field(default_factory=deque)
    _count: int = 0

    @property
    def load(self) -> int:
        return len(self._running) + len(self._waiting) + (self._reading is not None)

    def add(self, fate: Fate) -> None:
        self._waiting.append(fate)
        self._admit()

    def advance(self, time: float) -> None:
        while (event := self._next()) <= time and event < float("inf"):
            self._pass(event)
            if self._reading is not None:  # the prompt has been read, and the request's row starts
                fate, self._reading = self._reading[1], None
                self._count += 1
                fate.first = self.now + self.pace.per_token(len(self._running) + 1)
                heappush(self._running, (self._written + max(1, fate.arrival.tokens), self._count, fate))
            else:
                _, _, fate = heappop(self._running)
                fate.end = self.now
            self._admit()
        if time < float("inf"):
            self._pass(time)

    def _next(self) -> float:
        if self._reading is not None:
            return self._reading[0]
        if not self._running:
            return float("inf")
        left = max(0.0, self._running[0][0] - self._written)
        return self.now + left * self.pace.per_token(len(self._running))

    def _pass(self, time: float) -> None:
        if self._reading is None and self._running:
            self._written += (time - self.now) / self.pace.per_token(len(self._running))
        if self.load:
            self.busy += time - self.now
        self.now = time

    def _admit(self) -> None:
        if self._waiting and self._reading is None and len(self._running) < self.pace.rows[-1]:
            fate = self._waiting.popleft()
            self._reading = (self.now + fate.arrival.prompt * self.pace.reading, fate)


@dataclass(frozen=True)
class Service:
    """The figures of a simulated fleet: requests and tokens in so many seconds, and the times of requests.

    `busy` is the share of time that replicas worked. Quantiles in seconds are of the time to first token, of the time
    to the end (with its mean), and between tokens.
    """

    replicas: int
    requests: int
    tokens: int
    seconds: float
    busy: float
    first_token: dict[str, float]
    end: dict[str, float]
    end_mean: float
    between: dict[str, float]
    behind: float  # seconds from the last arrival until all requests are answered: large where the fleet is too small

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def cost(self, price: float) -> float:
        """Return the price of a million written tokens, if a replica costs `price` an hour."""
        return price * self.replicas * self.seconds / 3600 / self.tokens * 1e6

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "tokens_per_second": self.tokens_per_second}


def simulate(
    pace: Pace,
    replicas: int,
    arrivals: Sequence[Arrival],
    seed: int = 0,
    on_step: Callable[[int], object] = lambda number: None,
) -> Service:
    """Simulate a fleet on requests in order of their times; `on_step` is called with the index of each that arrives."""
    if replicas < 1 or not arrivals:
        raise ValueError(f"{replicas} replicas and {len(arrivals)} requests are not possible: both are at least 1.")
    chance, fleet = random.Random(seed), [SimulatedReplica(pace) for _ in range(replicas)]
    fates = [Fate(arrival) for arrival in arrivals]
    for number, fate in enumerate(fates):
        pair = [fleet[chance.randrange(replicas)] for _ in range(min(2, replicas))]
        for each in pair:
            each.advance(fate.arrival.time)
        min(pair, key=lambda each: each.load).add(fate)
        on_step(number)
    for each in fleet:
        each.advance(float("inf"))
    ends = [fate.end - fate.arrival.time for fate in fates]
    end, last = max(fate.end for fate in fates), fates[-1].arrival.time
    return Service(
        replicas=len(fleet),
        requests=len(fates),
        tokens=sum(max(1, fate.arrival.tokens) for fate in fates),
        seconds=end,
        busy=sum(each.busy for each in fleet) / (end * len(fleet)),
        first_token=_quantiles([fate.first - fate.arrival.time for fate in fates]),
        end=_quantiles(ends),
        end_mean=sum(ends) / len(ends),
        between=_quantiles([(fate.end - fate.first) / max(1, fate.arrival.tokens - 1) for fate in fates]),
        behind=end - last,
    )


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {f"p{100 * share:g}": ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in QUANTILES}
