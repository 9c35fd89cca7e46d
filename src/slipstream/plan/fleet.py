"""What a fleet of replicas would do under a load curve: a simulation by events, from costs that a plan has measured.

Between two events (a request comes, a prompt is read, a text ends) the rows of a replica all write at one pace, which
depends on how many they are: the seconds per token that were measured for so many rows. While a prompt is read, the
rows wait, as long as reading it was measured to take. A request goes to the shorter one of two replicas' queues.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from heapq import heappop, heappush
from typing import Any

from slipstream.engine.plan_file import Plan
from slipstream.plan.traces import Arrival

QUANTILES = (0.5, 0.95, 0.99)


@dataclass(frozen=True)
class Pace:
    """How fast one replica works, as measured: `seconds` per token of a row, by the numbers of `rows` that ran together
    (ascending), and seconds of `reading` a token of a prompt. At most the last number of rows runs."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    reading: float

    def per_token(self, rows: int) -> float:
        """Seconds per token of each of so many rows, between two measured numbers on a straight line."""
        place = min(max(1, bisect_left(self.rows, rows)), len(self.rows) - 1)
        if rows <= self.rows[0] or len(self.rows) == 1:
            return self.seconds[0]
        (low, high), (before, after) = self.rows[place - 1 : place + 1], self.seconds[place - 1 : place + 1]
        return before + (after - before) * (rows - low) / (high - low)


def paces(plan: Plan) -> dict[str, Pace]:
    """The paces that a plan has measured: of plain decoding, and of the draft and the gammas that it chose.

    Raises ValueError if the plan lacks a figure, as those that older releases made do.
    """
    try:
        figures = plan.figures
        name, reading = figures["draft"], figures["reading"]["seconds"] / figures["reading"]["tokens"]
        found = {int(rows): outlook[name] for rows, outlook in figures["outlooks"].items()}
        rows = tuple(sorted(found))
        plain = tuple(found[count]["milliseconds_by_width"]["plain"]["seconds"]["median"] / 1000 for count in rows)
        shares = [_share(found[count], plan.gammas[count]) for count in rows]
    except (KeyError, TypeError, ZeroDivisionError, StopIteration) as error:
        raise ValueError(f"the plan lacks figures that a simulation needs ({error}): make it again.") from error
    ours = tuple(step * share for step, share in zip(plain, shares, strict=True))
    return {"plain": Pace(rows, plain, reading), "speculative": Pace(rows, ours, reading)}


def _share(outlook: Mapping[str, Any], gamma: int) -> float:
    """The time of a token over that of a plain one."""
    if not gamma:
        return 1.0
    chosen = next(each for each in outlook["predictions"] if each["gamma"] == gamma)
    return chosen["round"] / chosen["tokens_per_call"]


@dataclass
class Fate:
    """What became of a request: when it came, when its first token was there, and when it ended; in seconds."""

    arrival: Arrival
    first: float = 0.0
    end: float = 0.0


@dataclass
class Replica:
    """A simulated replica at time `now`: the rows that run, the prompt that is read, the requests that wait."""

    pace: Pace
    now: float = 0.0
    busy: float = 0.0
    _written: float = 0.0  # tokens that a row has got that has been there from the beginning
    _running: list[tuple[float, int, Fate]] = field(default_factory=list)  # by `_written` at their end
    _reading: tuple[float, Fate] | None = None  # until when
    _waiting: deque[Fate] = field(default_factory=deque)
    _count: int = 0

    @property
    def load(self) -> int:
        """Requests that have not ended."""
        return len(self._running) + len(self._waiting) + (self._reading is not None)

    def add(self, fate: Fate) -> None:
        """Queue a request, which comes now."""
        self._waiting.append(fate)
        self._admit()

    def advance(self, time: float) -> None:
        """Go on until a time."""
        while (event := self._next()) <= time and event < float("inf"):
            self._pass(event)
            if self._reading is not None:
                self._begin(self._reading[1])
            else:
                _, _, fate = heappop(self._running)
                fate.end = self.now
            self._admit()
        if time < float("inf"):
            self._pass(time)

    def _next(self) -> float:
        """When something happens."""
        if self._reading is not None:
            return self._reading[0]
        if not self._running:
            return float("inf")
        left = max(0.0, self._running[0][0] - self._written)
        return self.now + left * self.pace.per_token(len(self._running))

    def _pass(self, time: float) -> None:
        """Let time go by in which nothing begins or ends."""
        if self._reading is None and self._running:
            self._written += (time - self.now) / self.pace.per_token(len(self._running))
        if self.load:
            self.busy += time - self.now
        self.now = time

    def _begin(self, fate: Fate) -> None:
        """A prompt has been read: its row runs."""
        self._reading = None
        self._count += 1
        fate.first = self.now + self.pace.per_token(len(self._running) + 1)
        heappush(self._running, (self._written + max(1, fate.arrival.tokens), self._count, fate))

    def _admit(self) -> None:
        if self._waiting and self._reading is None and len(self._running) < self.pace.rows[-1]:
            fate = self._waiting.popleft()
            self._reading = (self.now + fate.arrival.prompt * self.pace.reading, fate)


@dataclass(frozen=True)
class Service:
    """How a fleet served a load: requests and tokens in so many seconds, the share of time that replicas worked, and
    quantiles in seconds of the time to the first token, to the end (with its mean), and between tokens."""

    replicas: int
    requests: int
    tokens: int
    seconds: float
    busy: float
    first_token: dict[str, float]
    end: dict[str, float]
    end_mean: float
    between: dict[str, float]
    behind: float
    """Seconds after the last request until everything was answered: large where the fleet is too small."""

    @property
    def tokens_per_second(self) -> float:
        """Tokens that were written, over the whole time."""
        return self.tokens / self.seconds

    def cost(self, price: float) -> float:
        """What a million tokens cost, written ones, if a replica costs `price` an hour."""
        return price * self.replicas * self.seconds / 3600 / self.tokens * 1e6

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "tokens_per_second": self.tokens_per_second}


def simulate(
    pace: Pace,
    replicas: int,
    arrivals: Sequence[Arrival],
    seed: int = 0,
    on_step: Callable[[int], object] = lambda number: None,
) -> Service:
    """Let a fleet serve requests, which are in the order of their times; `on_step` is told how many have come.

    Raises ValueError if there are no replicas or no requests.
    """
    if replicas < 1 or not arrivals:
        raise ValueError(f"{replicas} replicas and {len(arrivals)} requests are not possible: both are at least 1.")
    chance, fleet = random.Random(seed), [Replica(pace) for _ in range(replicas)]
    fates = [Fate(arrival) for arrival in arrivals]
    for number, fate in enumerate(fates):
        pair = [fleet[chance.randrange(replicas)] for _ in range(min(2, replicas))]
        for each in pair:
            each.advance(fate.arrival.time)
        min(pair, key=lambda each: each.load).add(fate)
        on_step(number)
    for each in fleet:
        each.advance(float("inf"))
    return _service(fates, fleet)


def _service(fates: Sequence[Fate], fleet: Sequence[Replica]) -> Service:
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
