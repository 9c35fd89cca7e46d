"""Running a batch on a cluster: Ray Data distributes the lines to actors, each of which holds the models."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from threading import Thread
from typing import Any, TypeVar

from slipstream.serve.batch.forms import ServerReply, refused
from slipstream.serve.batch.journal import Sink
from slipstream.serve.batch.lines import BatchLine
from slipstream.serve.batch.run import Asker
from slipstream.serve.recipe import Recipe
from slipstream.text.jsontext import json_text

T = TypeVar("T")

BLOCK = 4
"""The number of lines sent to an actor together. It is small, since their answers also come back together."""


@dataclass(frozen=True)
class BatchCluster:
    """A Ray cluster to run a batch on.

    `address` is None for a cluster started on this machine (or the one that RAY_ADDRESS names). `actors` is how many
    hold the models, None for one per GPU or, without GPUs, one per node.
    """

    address: str | None = None
    actors: int | None = None

    def run(
        self,
        recipe: Recipe,
        lines: Sequence[BatchLine],
        sink: Sink,
        on_answer: Callable[[BatchLine, ServerReply], object],
    ) -> None:
        """Answer all lines that the sink lacks. An actor that dies is started again, with the lines it had.

        Raises ValueError if the cluster cannot be reached or its actors cannot load the models.
        """
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported unless the user wants it
        import ray

        for line in lines:
            if line.error and line.index not in sink.answered:
                _keep(line, refused(line.error), sink, on_answer)
        left = {line.index: line for line in lines if line.index not in sink.answered}
        try:
            ray.init(self.address, ignore_reinit_error=True, log_to_driver=False, logging_level=logging.ERROR)
            for index, answer in self._answers(recipe, list(left.values())) if left else ():
                _keep(left[index], answer, sink, on_answer)
        except (ray.exceptions.RayError, ConnectionError) as error:
            raise ValueError(f"the cluster cannot answer the batch: {_cause(error)}") from error
        finally:
            ray.shutdown()
        sink.finish()

    def _answers(self, recipe: Recipe, lines: Sequence[BatchLine]) -> Any:
        import ray

        logging.getLogger("ray.data").setLevel(logging.ERROR)  # the progress bar is ours
        ray.data.DataContext.get_current().enable_progress_bars = False
        resources = ray.cluster_resources()
        gpus, cpus = int(resources.get("GPU", 0)), resources.get("CPU", 1)
        actors = self.actors or gpus or len(ray.nodes())
        tasks = -(-2 * recipe.room.rows // BLOCK)
        pool = ray.data.ActorPoolStrategy(
            size=actors,
            max_tasks_in_flight_per_actor=2 * tasks,
            max_concurrent_calls_per_actor=tasks,
            enable_true_multi_threading=True,
        )
        rows = [{"index": line.index, "path": line.path, "body": json_text(dict(line.body))} for line in lines]
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
            for index, text in zip(*columns, strict=True):
                yield index, ServerReply.from_text(text)


class BatchActor:
    """The actor: an application with the models, which answers several blocks of lines at a time.

    Ray calls it from several threads; the application lives in an event loop in another thread.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._loop = asyncio.new_event_loop()
        Thread(target=self._loop.run_forever, daemon=True).start()
        self._open = AsyncExitStack()  # open until the process ends
        self._asker = self._wait(self._open.enter_async_context(Asker.of(recipe.state())))

    def __call__(self, rows: dict[str, Any]) -> dict[str, Any]:
        return {"index": rows["index"], "answer": self._wait(self._ask(rows["path"].tolist(), rows["body"].tolist()))}

    async def _ask(self, paths: Sequence[str], bodies: Sequence[str]) -> list[str]:
        questions = [self._asker.ask(path, body) for path, body in zip(paths, bodies, strict=True)]
        return [answer.as_text() for answer in await asyncio.gather(*questions)]

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def _keep(
    line: BatchLine, answer: ServerReply, sink: Sink, on_answer: Callable[[BatchLine, ServerReply], object]
) -> None:
    sink.write(line, answer)
    on_answer(line, answer)


def _cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__
