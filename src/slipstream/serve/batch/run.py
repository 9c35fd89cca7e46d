"""Running a batch: its lines are sent to the server's own application, in this process and without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from httpx import ASGITransport, AsyncClient

from slipstream.engine.engine import Engine
from slipstream.serve.app import create_app
from slipstream.serve.batch.forms import ServerReply, refused
from slipstream.serve.batch.journal import Sink
from slipstream.serve.batch.lines import BatchLine
from slipstream.serve.faults import ServiceUnavailable
from slipstream.serve.recipe import Recipe
from slipstream.serve.state import ServerState
from slipstream.text.jsontext import json_text

ENDED = 503
"""The status of an application that takes no more requests."""


class Asker:
    """A client that sends requests to an application in the same process."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    @staticmethod
    @asynccontextmanager
    async def of(state: ServerState) -> AsyncIterator[Asker]:
        """Start an application and wait until its models are warm -> a client; the application ends with the block.

        Raises Unavailable if the models cannot run.
        """
        ready = asyncio.Event()
        state.worker.on_ready = state.worker.on_death = ready.set
        app = create_app(state)
        transport = ASGITransport(app, raise_app_exceptions=False)
        async with (
            app.router.lifespan_context(app),
            AsyncClient(transport=transport, base_url="http://batch", timeout=None) as client,
        ):
            await ready.wait()
            state.worker.check()
            yield Asker(client)

    async def ask(self, path: str, body: str) -> ServerReply:
        """Return the answer to one request, whose body is JSON. Raises Unavailable if the application has ended."""
        headers = {"Content-Type": "application/json"}
        response = await self._client.post(path, content=body.encode(), headers=headers)
        answer = ServerReply(response.status_code, response.json(), response.headers["X-Request-Id"])
        if answer.status == ENDED:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise asyncio.CancelledError  # the application answered the cancellation with this status
            raise ServiceUnavailable(answer.error)
        return answer


@dataclass(frozen=True)
class Local:
    """Runs a batch in this process; `on_load` is called with the loaded engine, `progress` while loading."""

    on_load: Callable[[Engine], object]
    progress: Callable[[str], object]

    def run(
        self,
        recipe: Recipe,
        lines: Sequence[BatchLine],
        sink: Sink,
        on_answer: Callable[[BatchLine, ServerReply], object],
    ) -> None:
        """Answer all lines that the sink lacks, twice as many at a time as the models batch.

        Raises ValueError if the models cannot be loaded, Unavailable if they fail, OSError if an answer cannot be
        stored; answers stored before are kept.
        """
        state = recipe.state(self.progress)
        self.on_load(state.engine)
        asyncio.run(_answer_all(state, lines, sink, on_answer))
        sink.finish()


async def _answer_all(
    state: ServerState, lines: Sequence[BatchLine], sink: Sink, on_answer: Callable[[BatchLine, ServerReply], object]
) -> None:
    left = iter([line for line in lines if line.index not in sink.answered])
    async with Asker.of(state) as asker:
        tasks = [asyncio.create_task(_answer(left, asker, sink, on_answer)) for _ in range(2 * state.worker.room.rows)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _answer(
    lines: Iterator[BatchLine], asker: Asker, sink: Sink, on_answer: Callable[[BatchLine, ServerReply], object]
) -> None:
    for line in lines:
        answer = refused(line.error) if line.error else await asker.ask(line.path, json_text(dict(line.body)))
        sink.write(line, answer)
        on_answer(line, answer)
