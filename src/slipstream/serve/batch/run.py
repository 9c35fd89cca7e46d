"""Running a batch: its lines are sent to the server's own application, in this process and without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from httpx import ASGITransport, AsyncClient

from slipstream.engine.engine import Engine
from slipstream.serve.app import running
from slipstream.serve.batch.lines import BatchLine, Keep, ServerReply
from slipstream.serve.faults import ServiceUnavailable
from slipstream.serve.recipe import Recipe
from slipstream.serve.state import ServerState
from slipstream.text.jsontext import json_text

Ask = Callable[[BatchLine], Awaitable[ServerReply]]  # sends the request of a line to an application


@asynccontextmanager
async def asking(state: ServerState) -> AsyncIterator[Ask]:
    """Start an application and wait until its models are warm -> a way to ask it; it ends with the block.

    Raises ServiceUnavailable if the models cannot run, also when the application has ended.
    """
    async with (
        running(state) as app,
        AsyncClient(
            transport=ASGITransport(app, raise_app_exceptions=False), base_url="http://batch", timeout=None
        ) as client,
    ):

        async def ask(line: BatchLine) -> ServerReply:
            content = json_text(line.body_for(state.engine)).encode()
            response = await client.post(line.path, content=content, headers={"Content-Type": "application/json"})
            answer = ServerReply(response.status_code, response.json(), response.headers["X-Request-Id"])
            if answer.status == ServiceUnavailable.status:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise asyncio.CancelledError  # the application answered the cancellation with this status
                raise ServiceUnavailable(answer.error)
            return answer

        yield ask


def run(
    recipe: Recipe,
    lines: Sequence[BatchLine],
    keep: Keep,
    on_load: Callable[[Engine], object],
    progress: Callable[[str], object],
) -> None:
    """Answer lines, twice as many at a time as the models batch. `on_load` gets the engine, `progress` loading's lines.

    Raises ValueError if the models cannot be loaded, ServiceUnavailable if they fail, OSError if an answer cannot be
    stored; answers stored before are kept.
    """
    state, left = recipe.state(progress), iter(lines)
    on_load(state.engine)

    async def answer_all() -> None:
        async with asking(state) as ask:

            async def answer_some() -> None:
                for line in left:
                    keep(line, await ask(line))

            tasks = [asyncio.create_task(answer_some()) for _ in range(2 * state.worker.room.rows)]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(answer_all())
