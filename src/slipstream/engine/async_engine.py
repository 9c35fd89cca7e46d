"""`AsyncEngine`: an engine for asyncio programs, where calls that overlap share one batch."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any, Self

from slipstream.core.values import whole_number
from slipstream.engine.beams import BeamTexts
from slipstream.engine.engine import Engine, check_single
from slipstream.engine.generation import Completion, Piece
from slipstream.engine.requests import Prompt, read_prompts
from slipstream.engine.worker import Capacity, Ticket, Worker, rounds_of


class AsyncEngine:
    """Runs an `Engine` in a thread of its own for an event loop; calls that overlap share one batch, as in the server.

    Texts are those that the engine gives alone. `max_queue` texts may wait besides those that run; `cache_bytes` are
    for prefixes that prompts have in common, `memory` bytes for running texts (None: no limit). Cancelling a call, or
    closing a stream early, ends its texts after the present round.

    >>> async with AsyncEngine(slipstream.load()) as engine:  # doctest: +SKIP
    ...     answers = await engine.generate(["def f(", "class A"], max_new_tokens=32)
    ...     async for piece in engine.stream("import "):
    ...         print(piece.text, end="")
    """

    def __init__(
        self, engine: Engine, *, max_queue: int = 1024, cache_bytes: int = 512 << 20, memory: int | None = None
    ) -> None:
        if not isinstance(engine, Engine):
            raise ValueError(f"an AsyncEngine runs an Engine, as slipstream.load makes it, no {type(engine).__name__}.")
        whole_number("max_queue", max_queue, 1), whole_number("cache_bytes", cache_bytes, 0)
        self.engine = engine
        self._worker = Worker(engine, Capacity(engine.decoder.batch_size, cache_bytes, memory), max_queue)

    async def __aenter__(self) -> Self:
        """Start the thread, and wait until it is ready. Raises RuntimeError with the reason if it is not."""
        started_or_failed = asyncio.Event()
        self._worker.on_ready = self._worker.on_death = started_or_failed.set
        self._worker.start()
        await started_or_failed.wait()
        if self._worker.failure is not None:
            raise RuntimeError(f"the engine cannot run: {self._worker.failure}") from self._worker.failure
        return self

    async def __aexit__(self, *error: object) -> None:
        """End the texts that run after the present round, and the thread."""
        await asyncio.to_thread(self._worker.stop)

    async def generate(
        self, prompts: Prompt | Iterable[Prompt] | Mapping[str, Any], **options: Any
    ) -> list[Completion]:
        """Continue every prompt -> completions in order; see `Engine.generate` for all but its callbacks."""
        read = read_prompts(prompts)
        if options.get("num_beams") is not None:
            job = await asyncio.to_thread(self.engine.prepare, read, options)
            if job.options.beams is not None:
                return await self._worker.submit_search(BeamTexts(job, memory=self._worker.room.memory)).found
        tickets = await self._submitted(read, options)
        async for _ in rounds_of(tickets):
            pass
        return [ticket.generation.completion for ticket in tickets]

    async def stream(self, prompt: Prompt | Mapping[str, Any], **options: Any) -> AsyncIterator[Piece]:
        """Continue one prompt, token by token, as rounds complete; options and errors as of `generate`."""
        async for _, pieces in rounds_of(await self._submitted(read_prompts(prompt), options, single=True)):
            for piece in pieces:
                yield piece

    async def stream_batch(
        self, prompts: Prompt | Iterable[Prompt] | Mapping[str, Any], **options: Any
    ) -> AsyncIterator[tuple[int, Piece]]:
        """Continue several prompts at once -> each piece with the index of its text; see `generate`."""
        async for place, pieces in rounds_of(await self._submitted(read_prompts(prompts), options)):
            for piece in pieces:
                yield place, piece

    async def _submitted(self, prompts: list[Prompt], options: Mapping[str, Any], single: bool = False) -> list[Ticket]:
        self._worker.check()
        job = await asyncio.to_thread(self.engine.prepare, prompts, options, shared=True)
        if single:
            check_single(len(prompts), len(job.generations))
        return self._worker.submit(job.generations)
