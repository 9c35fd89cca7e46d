"""Running a batch: its lines are sent to the server's own application, in this process and without a socket."""

import asyncio
import json
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from threading import Thread
from typing import Any, TypeVar

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
    Raises ServiceUnavailable if the models cannot run, also when the application has ended."""
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


T = TypeVar("T")
BLOCK = 4  # number of lines sent to an actor together. It is small, since their answers also come back together


def run_on_cluster(
    recipe: Recipe, lines: Sequence[BatchLine], keep: Keep, address: str | None, actors: int | None
) -> None:
    """Answer lines on a Ray cluster; an actor that dies is started again, with the lines it had.

    `address` is None for a cluster started on this machine (or the one that RAY_ADDRESS names). `actors` is how many
    hold the models, None for one per GPU or, without GPUs, one per node. Raises ValueError if the cluster cannot be
    reached or its actors cannot load the models.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported unless the user wants it
    import ray

    by_index = {line.index: line for line in lines}
    try:
        ray.init(address, ignore_reinit_error=True, log_to_driver=False, logging_level=logging.ERROR)
        for index, answer in _answers(recipe, lines, actors):
            keep(by_index[index], answer)
    except (ray.exceptions.RayError, ConnectionError) as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        said = str(cause).strip().splitlines() or [type(cause).__name__]
        raise ValueError(f"the cluster cannot answer the batch: {said[-1]}") from error
    finally:
        ray.shutdown()


def _answers(recipe: Recipe, lines: Sequence[BatchLine], actors: int | None) -> Iterator[tuple[int, ServerReply]]:
    import ray

    logging.getLogger("ray.data").setLevel(logging.ERROR)  # the progress bar is ours
    ray.data.DataContext.get_current().enable_progress_bars = False
    resources = ray.cluster_resources()
    gpus, cpus = int(resources.get("GPU", 0)), resources.get("CPU", 1)
    actors = actors or gpus or len(ray.nodes())
    tasks = -(-2 * recipe.room.rows // BLOCK)
    pool = ray.data.ActorPoolStrategy(
        size=actors,
        max_tasks_in_flight_per_actor=2 * tasks,
        max_concurrent_calls_per_actor=tasks,
        enable_true_multi_threading=True,
    )
    requests = ({"path": line.path, "body": dict(line.body), "fallback": dict(line.fallback)} for line in lines)
    rows = [{"index": line.index, "request": json_text(each)} for line, each in zip(lines, requests, strict=True)]
    blocks = ray.data.from_items(rows, override_num_blocks=-(-len(rows) // BLOCK))
    answered = blocks.map_batches(
        BatchActor,
        batch_size=None,
        batch_format="numpy",
        compute=pool,
        fn_constructor_args=(recipe,),
        num_gpus=1 if gpus else None,
        num_cpus=None if gpus else max(1, cpus // actors),
    )
    for batch in answered.iter_batches(batch_size=None, batch_format="numpy"):
        columns = (batch[name].tolist() for name in ("index", "answer"))
        yield from ((index, ServerReply(**json.loads(text))) for index, text in zip(*columns, strict=True))


class BatchActor:
    """The actor: an application with the models, which answers several blocks of lines at a time.
    Ray calls it from several threads; the application lives in an event loop in another thread."""

    def __init__(self, recipe: Recipe) -> None:
        self._loop = asyncio.new_event_loop()
        Thread(target=self._loop.run_forever, daemon=True).start()
        self._open = AsyncExitStack()  # open until the process ends
        self._ask = self._wait(self._open.enter_async_context(asking(recipe.state())))

    def __call__(self, rows: dict[str, Any]) -> dict[str, Any]:
        async def answers() -> list[ServerReply]:
            lines = [BatchLine(0, **json.loads(text)) for text in rows["request"].tolist()]
            return await asyncio.gather(*map(self._ask, lines))

        return {"index": rows["index"], "answer": [json_text(asdict(each)) for each in self._wait(answers())]}

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
