"""The scheduler: which rows run. Requests come and go between rounds, and rows of every kind share a batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import count
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Self

from slipstream.core.protocols import Scorer
from slipstream.core.request import Request, Row
from slipstream.core.round import Round
from slipstream.core.source import check_source
from slipstream.decoding.accounting import Stopwatch
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.speculate import play_round

PREFILL_CHUNK = 512
"""Tokens of prompts that are read between two rounds while other rows run."""


class Scheduler:
    """Plays rounds with the requests that were added and have not ended, at most `decoder.batch_size` at a time.

    One thread owns the models: it calls `step` until that returns None, and `close` in the end. `add` and `abort` may
    be called by any thread at any time; they take effect when the next step begins. A prompt that arrives while others
    run is read in pieces of `prefill_chunk` tokens, one between two rounds: running rows wait for one piece at most.

    In the target's cache the running rows come first, then those whose prompts are being read, in the order in which
    they will be done. Raises RuntimeError if the target still serves another scheduler.
    """

    def __init__(self, decoder: Decoder, prefill_chunk: int = PREFILL_CHUNK) -> None:
        if decoder.target.lengths:
            raise RuntimeError(f"{decoder.target.name} serves one call at a time: drain or close the stream before.")
        if prefill_chunk < 1:
            raise ValueError(f"prefill_chunk={prefill_chunk} is not possible: it must be at least 1 token.")
        self.decoder, self.prefill_chunk = decoder, prefill_chunk
        self.running: list[Row] = []
        self.reading: list[Row] = []
        self.waiting: deque[Row] = deque()
        self._arrivals: SimpleQueue[Row] = SimpleQueue()
        self._aborted: SimpleQueue[Row] = SimpleQueue()
        self._numbers = count()
        self._state = decoder.controller.init()

    def add(self, request: Request, number: int | None = None) -> Row:
        """Queue a request -> its row, which grows as rounds are played and has a `finish_reason` once it has ended.

        `number` becomes the row's index; without one, rows are counted from 0. Raises ValueError if the target cannot
        take the request.
        """
        number = next(self._numbers) if number is None else number
        self.check(request, number)
        row = Row(request, number, list(request.prompt))
        self._arrivals.put(row)
        return row

    def check(self, request: Request, number: int = 0) -> None:
        """Raises ValueError, which names the prompt by its number, if the target cannot take a request."""
        check_request(self.decoder.target, request, number)

    @property
    def busy(self) -> bool:
        """Whether a step has anything to do."""
        queued = not (self._arrivals.empty() and self._aborted.empty())
        return bool(queued or self.running or self.reading or self.waiting)

    def abort(self, row: Row) -> None:
        """End a row before the next round, with the finish reason "abort"; nothing happens to one that has ended."""
        self._aborted.put(row)

    def step(self) -> Round | None:
        """Read a piece of the prompts that wait, and play one round -> the round; None if no row is left to run."""
        self._take_in()
        self._read()
        if not self.running:
            return None
        controller = self.decoder.controller
        chosen = zip(self.running, controller.gammas(self._state, self.running), strict=True)
        gammas = [gamma if row.request.gamma is None else row.request.gamma for row, gamma in chosen]
        round = play_round(self.decoder, self.running, gammas)
        self._state = controller.update(self._state, round)
        self._end_at_limits()
        self._dismiss()
        return round

    def close(self) -> None:
        """Free all rows; those that have not ended stay as they are."""
        self.decoder.target.free(range(len(self.decoder.target.lengths)))
        self.running, self.reading, self.waiting = [], [], deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def _take_in(self) -> None:
        """What other threads asked for since the last step; then free places of the batch are filled."""
        self.waiting += _drained(self._arrivals)
        for row in _drained(self._aborted):
            row.finish_reason = row.finish_reason or "abort"
        self.waiting = deque(row for row in self.waiting if not row.finish_reason)
        self._dismiss()
        free = self.decoder.batch_size - len(self.running) - len(self.reading)
        new = [self.waiting.popleft() for _ in range(min(len(self.waiting), free))]
        if new:
            self.decoder.target.add(len(new), [row.request.source for row in new])
            for row in new:
                row.started = row.started or monotonic()
            self.reading += new

    def _read(self) -> None:
        """Read prompts: whole ones if nobody waits for that, else one piece, first come, first served."""
        if not self.reading:
            return
        watch, target, first = Stopwatch(), self.decoder.target, len(self.running)
        left = self.prefill_chunk if self.running else sum(len(row.tokens) for row in self.reading)
        pieces = []
        for row, have in zip(self.reading, target.lengths[first:], strict=True):
            pieces.append(row.tokens[have:-1][:left])
            left -= len(pieces[-1])
        target.prefill(pieces, first)
        watch.lap("prefill")
        share = watch.laps["prefill"] / sum(map(bool, pieces)) if any(pieces) else 0.0
        for row, piece in zip(self.reading, pieces, strict=True):
            row.stats.seconds["prefill"] = row.stats.seconds.get("prefill", 0.0) + share * bool(piece)
        read = [have + 1 >= len(row.tokens) for row, have in zip(self.reading, target.lengths[first:], strict=True)]
        done = read.index(False) if False in read else len(read)  # a row behind one that is not done has to wait for it
        self.running += self.reading[:done]
        self.reading = self.reading[done:]

    def _end_at_limits(self) -> None:
        """A row that fills the target's context, or whose time is over, has ended."""
        context = self.decoder.target.context
        for row in self.running:
            if row.finish_reason:
                continue
            full = bool(context and len(row.tokens) >= context)
            row.timed_out = row.late and not full
            if full or row.timed_out:
                row.finish_reason = "length"

    def _dismiss(self) -> None:
        """Free the rows that have ended."""
        ended = [place for place, row in enumerate([*self.running, *self.reading]) if row.finish_reason]
        if ended:
            self.decoder.target.free(ended)
            self.running = [row for row in self.running if not row.finish_reason]
            self.reading = [row for row in self.reading if not row.finish_reason]


def check_requests(target: Scorer, requests: Sequence[Request]) -> None:
    """Raises ValueError if one of the requests is not possible; see `check_request`."""
    for index, request in enumerate(requests):
        check_request(target, request, index)


def check_request(target: Scorer, request: Request, index: int) -> None:
    """Raises ValueError if a prompt is empty, does not fit the target, or asks for less than one token."""
    length = len(request.prompt)
    if not length:
        raise ValueError(f"prompt {index} is empty: it needs at least one token.")
    if request.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={request.max_new_tokens} is not possible: it must be at least 1.")
    if target.context and length >= target.context:
        raise ValueError(
            f"prompt {index} has {length} tokens, but {target.name} holds {target.context}; "
            f"shorten it to at most {target.context - 1}."
        )
    check_source(target.source_form, request.source, f"prompt {index}", target.name)
    if not all(0 <= token < target.vocab for token in request.prompt):
        raise ValueError(f"prompt {index} has token ids outside 0..{target.vocab - 1}, which {target.name} knows.")


def _drained(queue: SimpleQueue[Row]) -> list[Row]:
    """Take everything out of a queue without waiting."""
    found = []
    try:
        while True:
            found.append(queue.get_nowait())
    except Empty:
        return found
