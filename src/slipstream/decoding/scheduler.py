"""The scheduler of continuous batching: requests join and leave between rounds, and rows of all kinds share a batch."""

from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from operator import attrgetter
from queue import SimpleQueue
from time import monotonic
from typing import Self

from slipstream.cache.prefixes import PrefixCache
from slipstream.core.media import check_media
from slipstream.core.protocols import Scorer, TakesMemory
from slipstream.core.request import Request, Row
from slipstream.core.round import PREFILL_CHUNK, Round
from slipstream.core.source import check_source
from slipstream.core.values import OptionError, PromptTooLong, whole_number
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.reading import PromptReader
from slipstream.decoding.speculate import play_round
from slipstream.kernels.threads import release_threads


@dataclass(frozen=True)
class MemoryLimit:
    """A limit in bytes for the keys and values of all rows, in the target and the models that draft.

    Drafts are counted at the greatest gamma. What counts is what the caches take: on CPUs the pages that hold
    tokens, on GPUs as many slots in every row as the longest needs, doubled; keys and values of an encoder's sources
    are not counted. None is no limit.
    Raises ValueError below 1 byte, and if a model cannot compute what its cache takes.
    """

    bytes: int | None
    decoder: Decoder
    scorers: tuple[TakesMemory, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        if self.bytes is None:
            return
        if self.bytes < 1:
            raise ValueError(f"memory={self.bytes} is not possible: give 1 byte or more, or None for no limit.")
        scorers = self.decoder.scorers
        object.__setattr__(self, "scorers", tuple(each for each in scorers if isinstance(each, TakesMemory)))
        if len(self.scorers) < len(scorers):
            names = ", ".join(each.name for each in scorers if not isinstance(each, TakesMemory))
            raise ValueError(f"memory={self.bytes} cannot be kept: {names} cannot tell what rows take. Leave it out.")

    def fits(self, rows: Sequence[Row]) -> bool:
        gammas = (self.decoder.controller.most if row.request.gamma is None else row.request.gamma for row in rows)
        return self.holds([len(row.tokens) + gamma + 1 for row, gamma in zip(rows, gammas, strict=True)])

    def holds(self, lengths: Sequence[int]) -> bool:
        return self.bytes is None or sum(each.bytes_for(lengths) for each in self.scorers) <= self.bytes


class Scheduler:
    """Plays rounds with the requests that were added and have not ended, at most `decoder.batch_size` at a time.

    One thread owns the models: it calls `step` while the scheduler is `busy`, and `close` in the end. `add` and `abort`
    may be called by any thread at any time; they take effect when the next step begins. Rows wait in the order of their
    priority, then of their arrival.

    Prompts are read in pieces of `prefill_chunk` tokens, one between two rounds (chunked prefill): running rows wait
    for one piece at most, which is up to `prefill_growth` times as long while that many prompts wait for each of them,
    or none runs. Equal prompts are read once. With a `prefix_cache`, or the bytes of a new one, the target and the
    models that draft reuse the states of prefixes that were read before. With `memory`, the bytes that the caches of
    both may take at the greatest gamma, rows wait until there is room; if a running row cannot grow, the youngest of
    the lowest priority is preempted: its tokens stay, and it is read again and continued when there is room. A row that
    does not fit even alone ends like one that fills the target's context.

    In the target's cache the running rows come first, then the texts that are being read. While it `holds`, no row that
    waits gets a place: once it is `idle`, others may use the models between two steps. Raises RuntimeError if the
    target still serves another scheduler.
    """

    def __init__(
        self,
        decoder: Decoder,
        prefill_chunk: int = PREFILL_CHUNK,
        prefix_cache: PrefixCache | int | None = None,
        memory: int | None = None,
        prefill_growth: int = 1,
    ) -> None:
        if decoder.target.lengths:
            raise RuntimeError(f"{decoder.target.name} serves one call at a time: drain or close the stream before.")
        whole_number("prefill_chunk", prefill_chunk, 1)
        whole_number("prefill_growth", prefill_growth, 1)
        self.decoder, self.prefill_chunk, self.prefill_growth = decoder, prefill_chunk, prefill_growth
        self.running: list[Row] = []
        self.waiting: list[Row] = []
        self.holds = False
        self._reader = PromptReader(decoder.target, decoder.stores[0], prefill_chunk, prefill_growth)
        self._admission = MemoryLimit(memory, decoder)
        self._arrivals: SimpleQueue[Row] = SimpleQueue()
        self._aborted: SimpleQueue[Row] = SimpleQueue()
        self._numbers, self._turns = count(), count()
        self._state = decoder.experience.begin(decoder.controller)
        if isinstance(prefix_cache, int):
            prefix_cache = PrefixCache(prefix_cache) if prefix_cache else None
        for store in decoder.stores:
            store.use_prefixes(prefix_cache)

    @property
    def reading(self) -> list[Row]:
        return self._reader.rows

    def add(self, request: Request, number: int | None = None) -> Row:
        """Queue a request -> its row, which grows as rounds are played. Its index is `number`, or counted from 0."""
        number = next(self._numbers) if number is None else number
        self.check(request, number)
        row = Row(request, number, list(request.prompt))
        self._arrivals.put(row)
        return row

    def check(self, request: Request, number: int = 0) -> None:
        """Raises ValueError, which names the prompt by its number, if the target cannot take a request or there is no
        memory for its prompt."""
        check_request(self.decoder.target, request, number)
        if not self._admission.fits([Row(request, number, list(request.prompt))]):
            raise PromptTooLong(
                f"prompt {number} has {len(request.prompt)} tokens, for which the memory of the caches is too small: "
                "shorten it, or allow more memory."
            )

    @property
    def busy(self) -> bool:
        queued = not (self._arrivals.empty() and self._aborted.empty())
        return bool(queued or self.running or self._reader.groups or self.waiting)

    @property
    def idle(self) -> bool:
        return not (self.running or self._reader.groups)

    def abort(self, row: Row) -> None:
        """End a row before the next round, with the finish reason "abort"; nothing happens to one that has ended."""
        self._aborted.put(row)

    def step(self) -> Round | None:
        """Read a piece of the prompts that wait, and play one round -> the round; None if no row can run yet."""
        for row in _drained(self._arrivals):
            row.turn = (row.request.priority, next(self._turns))
            insort(self.waiting, row, key=attrgetter("turn"))
        for row in _drained(self._aborted):
            row.finish_reason = row.finish_reason or "abort"
        self.waiting = [row for row in self.waiting if not row.finish_reason]
        self._dismiss()
        self._admit()
        self.running += self._reader.read(len(self.running))
        for row in self.running:
            if not row.request.max_new_tokens:  # only its prompt was to be scored
                row.finish_reason = "length"
        self._dismiss()
        if not self.running:
            return None
        controller = self.decoder.controller
        chosen = zip(self.running, controller.gammas(self._state, self.running), strict=True)
        gammas = [gamma if row.request.gamma is None else row.request.gamma for row, gamma in chosen]
        round = play_round(self.decoder, self.running, gammas, self.prefill_chunk * self.prefill_growth)
        self._state = controller.update(self._state, round)
        # End the rows that fill the target's context or all memory, or whose time is over.
        context = self.decoder.target.context
        for row in self.running:
            if row.finish_reason:
                continue
            full = (context and len(row.tokens) >= context) or not self._admission.fits([row])
            row.timed_out = row.late and not full
            if full or row.timed_out:
                row.finish_reason = "length"
        self._dismiss()
        return round

    def rounds(self) -> Iterator[Round]:
        while self.busy:
            if (round := self.step()) is not None:
                yield round

    def close(self) -> None:
        """Free all rows; those that have not ended stay as they are. The next scheduler may run in another thread."""
        self.decoder.target.free(range(len(self.decoder.target.lengths)))
        self.running, self.waiting, self._reader.groups = [], [], []
        self.decoder.experience.keep(self.decoder.controller, self._state)
        release_threads()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def _admit(self) -> None:
        here = [*self.running, *self.reading]
        while len(here) > 1 and not self._admission.fits(here):
            youngest = max(here, key=attrgetter("turn"))
            here.remove(youngest)
            self._leave([youngest])
            insort(self.waiting, youngest, key=attrgetter("turn"))
        while self.waiting and not self.holds and len(here) < self.decoder.batch_size:
            if here and not self._admission.fits([*here, self.waiting[0]]):
                break
            here.append(self.waiting.pop(0))
            here[-1].started = here[-1].started or monotonic()  # a preempted row has started before
            self._reader.add(here[-1])

    def _dismiss(self) -> None:
        if leaving := [row for row in [*self.running, *self.reading] if row.finish_reason]:
            self._leave(leaving)

    def _leave(self, leaving: Sequence[Row]) -> None:
        target = self.decoder.target
        places = [place for place, row in enumerate(self.running) if row in leaving]
        self._reader.drop(leaving, len(self.running))
        for place in places:
            row = self.running[place]
            if row.finish_reason != "error" and row.request.media is None:  # its tokens do not identify them
                self.decoder.stores[0].remember(place, row.tokens[: target.lengths[place]], row.request.cache_salt)
        if places:
            target.free(places)
            self.running = [row for row in self.running if row not in leaving]


def check_requests(target: Scorer, requests: Sequence[Request]) -> None:
    for index, request in enumerate(requests):
        check_request(target, request, index)


def check_request(target: Scorer, request: Request, index: int) -> None:
    length = len(request.prompt)
    if not length:
        raise ValueError(f"prompt {index} is empty: it needs at least one token.")
    if request.max_new_tokens < (request.prompt_logprobs is None):
        raise OptionError(f"max_new_tokens={request.max_new_tokens} is not possible: it must be at least 1.")
    if target.context and length >= target.context:
        raise PromptTooLong(
            f"prompt {index} has {length} tokens, but {target.name} holds {target.context}; "
            f"shorten it to at most {target.context - 1}."
        )
    check_media(request.media, request.prompt, f"prompt {index}")
    check_source(target.source_form, request.source, f"prompt {index}", target.name)
    if not 0 <= min(request.prompt) <= max(request.prompt) < target.vocab:
        raise ValueError(f"prompt {index} has token ids outside 0..{target.vocab - 1}, which {target.name} knows.")


def _drained(queue: SimpleQueue[Row]) -> list[Row]:
    return [queue.get() for _ in range(queue.qsize())]  # only this thread takes rows out, so that none is waited for
