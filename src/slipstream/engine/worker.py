"""The worker: the thread that owns the models, and the tickets through which an event loop uses it."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from time import monotonic
from typing import Protocol

from slipstream.core.garbage import give_back_freed_memory
from slipstream.core.protocols import LiesOnRanks
from slipstream.core.round import PREFILL_CHUNK, Round
from slipstream.core.stats import Stats
from slipstream.decoding.sampling import Sampling
from slipstream.decoding.scheduler import Scheduler
from slipstream.engine.beams import BeamTexts
from slipstream.engine.engine import Engine
from slipstream.engine.generation import Generation, Piece
from slipstream.engine.queued import QueueFull, Search, Times, Unavailable

EVERY_KIND = (Sampling(), Sampling(temperature=1.0), Sampling(temperature=1.0, top_p=0.9))
"""One `Sampling` for every kind of graph: greedy, at a temperature, and with more settings than that."""

CPU_CHUNK, CPU_GROWTH = 64, 4
"""The tokens of prompts that a CPU reads between two rounds, and their factor where many wait or no text runs.

Running texts wait for that long; 256 tokens take little more than twice the time of 64.
"""

STOPPING = "the server is ending: it finishes what it has, and takes nothing new."
FAILED = "the thread that runs the models has failed: the server has to be started again."
REST = 1.0  # the seconds without work after which freed memory goes back to the system


@dataclass(frozen=True)
class Capacity:
    """The amount of work that runs at a time.

    `rows` is the size of the batch; `cache_bytes` are for cached prefixes, `memory` bytes for running texts (None: no
    limit); `prefill_chunk` is the tokens of prompts read between two rounds (None: as many as the device reads at full
    speed).
    """

    rows: int
    cache_bytes: int = 512 << 20
    memory: int | None = None
    prefill_chunk: int | None = None


class Listener(Protocol):
    """Receives the events of the worker, on its thread, such as the metrics do."""

    def on_round(self, round: Round, worker: Worker) -> None:
        """Called after every round."""

    def on_tokens(self, ticket: Ticket, count: int, now: float) -> None:
        """Called when a request gets `count` tokens, before its times are updated."""

    def on_end(self, ticket: Ticket, now: float) -> None:
        """Called when a request has ended."""

    def on_search(self, search: Search, now: float) -> None:
        """Called when a beam search has ended, by its end or by an error."""


Delivery = tuple[int, list[Piece]] | Unavailable
"""The place of a ticket in its call and the pieces of a round; or the error that ends all tickets."""


@dataclass(eq=False)
class Ticket:
    """A generation that was submitted, the one at `place` in its call, and the queue of the call for its pieces."""

    generation: Generation
    place: int
    worker: Worker
    times: Times
    deliveries: asyncio.Queue[Delivery]

    @property
    def prompt_tokens(self) -> int:
        return self.generation.request.prompt_tokens

    @property
    def completion_tokens(self) -> int:
        return len(self.generation.row.output) if self.generation.row else 0

    @property
    def stats(self) -> Stats:
        return self.generation.row.stats if self.generation.row else Stats()

    @property
    def ended(self) -> bool:
        return self.generation.row is not None and self.generation.row.finish_reason is not None

    def cancel(self) -> None:
        self.worker.cancel(self)


async def rounds_of(tickets: Sequence[Ticket]) -> AsyncIterator[tuple[int, list[Piece]]]:
    """Yield what every round gives to one of the tickets of a call, with its place; ending early cancels them all."""
    left = len(tickets)
    try:
        while left:
            delivery = await tickets[0].deliveries.get()
            if isinstance(delivery, Unavailable):
                raise delivery
            left -= delivery[1][-1].completion is not None
            yield delivery
    finally:
        for ticket in tickets:
            ticket.cancel()


class Worker:
    """Runs an engine in a thread of its own, for requests that come from an event loop.

    Only the thread touches the models. `submit` may be called in any other one, since it takes its time for many texts;
    all else is called in the event loop. `on_death` is called there if the thread ends by an error, `on_ready` as soon
    as requests can be taken.
    """

    def __init__(
        self,
        engine: Engine,
        room: Capacity,
        max_queue: int,
        listeners: Sequence[Listener] = (),
        errors: tuple[type[QueueFull], type[Unavailable]] = (QueueFull, Unavailable),
    ) -> None:
        self.engine, self.room, self.max_queue, self.listeners = engine, room, max_queue, tuple(listeners)
        self._full, self._unavailable = errors
        self.failure: BaseException | None = None
        self.on_ready: Callable[[], object] = lambda: None
        self.on_death: Callable[[], object] = lambda: None
        self.ready = False
        self._tickets: dict[int, Ticket] = {}  # tickets of requests that have not ended, by the index of the row
        self._searches: deque[Search] = deque()
        self._searching = False
        self._numbers, self._submitting = count(), threading.Lock()
        self._scheduler = self._new_scheduler()
        self._wake, self._ending, self._draining = threading.Event(), False, False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="slipstream-worker", daemon=True)

    def start(self) -> None:
        """Start the thread, which warms the engine up first; `ready` is True when that is done."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def submit(self, generations: Sequence[Generation]) -> list[Ticket]:
        """Queue generations -> a ticket for each; if the target cannot take one of them, none is queued."""
        for generation in generations:
            self._scheduler.check(generation.request)
        now, deliveries = monotonic(), asyncio.Queue[Delivery]()
        tickets = [Ticket(each, place, self, Times(now), deliveries) for place, each in enumerate(generations)]
        with self._submitting:
            self.check()
            if self.waiting + len(tickets) > self.max_queue:
                raise self._full(f"{self.waiting} requests wait already, and {self.max_queue} may: try again later.")
            for ticket in tickets:
                number = next(self._numbers)
                self._tickets[number] = ticket  # before `add`, since the thread may run the row at once
                ticket.generation.row = self._scheduler.add(ticket.generation.request, number)
        self._wake.set()
        return tickets

    def submit_search(self, texts: BeamTexts) -> Search:
        """Queue a beam search -> the search, whose `found` can be awaited; one that is cancelled ends the search.

        It has the models for itself: it waits until the rows that run have ended, and new requests wait for it. Raises
        QueueFull or Unavailable.
        """
        self.check()
        if self.waiting >= self.max_queue:
            raise self._full(f"{self.waiting} requests wait already, and {self.max_queue} may: try again later.")
        search = Search(texts, asyncio.get_running_loop().create_future(), Times(monotonic()))
        self._searches.append(search)
        self._wake.set()
        return search

    def check(self) -> None:
        """Raise Unavailable unless requests can be taken."""
        if self.failure is not None:
            raise self._unavailable(FAILED)
        if self._draining:
            raise self._unavailable(STOPPING)
        if not self.ready and self._loop is None:
            raise self._unavailable("it was not started: enter it, as `async with AsyncEngine(engine) as served`.")
        if not self.ready:
            raise self._unavailable("the server is starting: the models are not ready yet.")

    def cancel(self, ticket: Ticket) -> None:
        row = ticket.generation.row
        if row is not None and not row.finish_reason:
            self._scheduler.abort(row)
            self._wake.set()

    @property
    def running(self) -> int:
        """The number of requests whose rows have a place in the batch, and of beam searches that run."""
        return self._rows + self._searching

    @property
    def waiting(self) -> int:
        return max(0, len(self._tickets) - self._rows) + len(self._searches)

    @property
    def _rows(self) -> int:
        return len(self._scheduler.running) + len(self._scheduler.reading)

    def drain(self) -> None:
        self._draining = True

    def wake(self) -> None:
        """Look for work; where there is none, freed memory goes back to the system soon."""
        self._wake.set()

    def halt(self) -> None:
        """Abort the requests that have not ended, and end the thread after the present round."""
        self._draining = self._ending = True
        self._wake.set()

    def stop(self) -> None:
        self.halt()
        if self._thread.is_alive():
            self._thread.join()

    def _new_scheduler(self) -> Scheduler:
        decoder = self.engine.shared_decoder
        chunk, growth = self.room.prefill_chunk or PREFILL_CHUNK, 1
        if self.room.prefill_chunk is None and decoder.target.device.type == "cpu":
            chunk, growth = CPU_CHUNK, CPU_GROWTH
        return Scheduler(decoder, chunk, self.room.cache_bytes, self.room.memory, growth)

    def _run(self) -> None:
        try:
            if self.engine.decoder.compiled:  # no graph is to be made while requests wait
                self.engine.warm_up((1, 2) if self.engine.decoder.batch_size > 1 else (1,), EVERY_KIND)
            else:
                self.engine.warm_up()
            self._scheduler = self._new_scheduler()  # warming up used schedulers of its own
            self.ready = True
            self._call(self.on_ready)
            target = self.engine.decoder.target
            if isinstance(target, LiesOnRanks):  # a lost rank is noticed between requests
                target.call_on_loss(self._wake.set)
            with self._scheduler:
                while not self._ending:
                    self._wake.clear()  # before the step: what arrives while it runs wakes us again
                    if isinstance(target, LiesOnRanks):
                        target.check()
                    self._search()
                    self._play(self._scheduler.step())
                for ticket in list(self._tickets.values()):
                    self.cancel(ticket)
                self._play(self._scheduler.step())
            self._drop_searches(self._unavailable(STOPPING))
        except BaseException as error:
            self.failure, self.ready = error, False
            why = self._unavailable(FAILED)
            self._drop_searches(why)
            left, self._tickets = [*self._tickets.values()], {}
            for queue in {ticket.deliveries for ticket in left}:
                self._call(partial(queue.put_nowait, why))
            self._call(self.on_death)

    def _search(self) -> None:
        self._scheduler.holds = bool(self._searches)
        while self._searches and self._scheduler.idle and not self._ending:
            search = self._searches.popleft()
            self._searching = True
            search.run(lambda: not self._ending)
            self._searching = False
            for listener in self.listeners:
                listener.on_search(search, monotonic())
            self._call(search.deliver)
            self._scheduler.holds = bool(self._searches)

    def _drop_searches(self, why: Unavailable) -> None:
        while self._searches:
            self._call(partial(self._searches.popleft().fail, why))

    def _play(self, round: Round | None) -> None:
        now = monotonic()
        deliveries: list[tuple[Ticket, list[Piece]]] = []
        for row in [*self._scheduler.running, *self._scheduler.reading]:
            times = self._tickets[row.index].times
            times.started = times.started or now
        if round is not None:
            deliveries = [self._follow(round, place, now) for place in range(len(round.rows))]
            for listener in self.listeners:
                listener.on_round(round, self)
        # The last pieces of requests that were aborted, including those that never ran.
        aborted = [(number, ticket) for number, ticket in list(self._tickets.items()) if ticket.ended]
        for number, _ in aborted:
            self._end(number, now)
        deliveries += [(ticket, [ticket.generation.end()]) for _, ticket in aborted]
        if deliveries:

            def deliver() -> None:
                for ticket, pieces in deliveries:
                    ticket.deliveries.put_nowait((ticket.place, pieces))

            self._call(deliver)
        if round is None and not self._scheduler.busy and not self._searches and not self._wake.wait(REST):
            give_back_freed_memory()
            self._wake.wait()

    def _follow(self, round: Round, place: int, now: float) -> tuple[Ticket, list[Piece]]:
        row = round.rows[place]
        ticket = self._tickets[row.index]
        ticket.generation.row = row
        pieces = list(ticket.generation.follow(round, place))
        for listener in self.listeners:
            listener.on_tokens(ticket, len(round.tokens[place]), now)
        times = ticket.times
        times.started = times.started or now
        times.first, times.last = times.first or now, now
        if row.finish_reason:
            self._end(row.index, now)
        return ticket, pieces

    def _end(self, number: int, now: float) -> None:
        ticket = self._tickets.pop(number)
        for listener in self.listeners:
            listener.on_end(ticket, now)

    def _call(self, function: Callable[[], object]) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(function)
