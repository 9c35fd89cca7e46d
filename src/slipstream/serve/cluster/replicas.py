"""Replicas of the server on a Ray cluster, behind a front that sends prompts with equal beginnings to the same one."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, suppress
from typing import Any

from ray import serve
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError, RayError, TaskCancelledError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from slipstream.core.model_options import ModelOptions
from slipstream.engine.worker import Capacity
from slipstream.models.loading.origin import source_name
from slipstream.serve.app import running
from slipstream.serve.cluster.scale import Scale, routing_key
from slipstream.serve.faults import ServeError, ServiceUnavailable, TooLarge, TooManyRequests
from slipstream.serve.recipe import Recipe
from slipstream.serve.settings import ServeSettings
from slipstream.text.jsontext import json_text

LOST = (ActorDiedError, ActorUnavailableError, RayActorError, ReplicaUnavailableError)  # a lost replica
ATTEMPTS = 5  # number of replicas that are tried for a request before the client gets an error
UPSCALE = 10.0  # seconds for which more requests must run than the replicas have rows before a replica is added
DRAIN_SECONDS = 600.0  # seconds that a stopping replica may take to finish its requests
SCOPE = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "headers", "client")
ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"


def application(recipe: Recipe, scale: Scale) -> serve.Application:
    """Return the application that Ray Serve deploys: a front, and as many replicas as the running requests need.

    A replica is added when more requests run than the replicas have rows; a replica with twice as many requests as rows
    gets no more, and they go to another one.
    """
    rows = recipe.room.rows
    replica = serve.deployment(
        Replica,
        max_ongoing_requests=2 * rows,
        autoscaling_config=AutoscalingConfig(
            min_replicas=scale.least, max_replicas=scale.most, target_ongoing_requests=rows, upscale_delay_s=UPSCALE
        ),
        request_router_config=RequestRouterConfig(
            request_router_class=ROUTER, request_router_kwargs={"num_fallback_replicas": scale.most}
        ),
        graceful_shutdown_timeout_s=DRAIN_SECONDS,
        health_check_period_s=2,
        ray_actor_options=scale.resources,
        max_queued_requests=recipe.settings.max_queue,
    )
    front = serve.deployment(
        Front,
        max_ongoing_requests=1 << 20,
        graceful_shutdown_timeout_s=DRAIN_SECONDS,
        ray_actor_options={"num_cpus": 0},
    )
    return front.bind(replica.bind(recipe), recipe.settings.limits.body_bytes)


def deploy(arguments: Mapping[str, Any]) -> serve.Application:
    """Return the application for the `args` of a `serve deploy` config file, whose `import_path` is this function.

    The arguments are "replicas" (4, or "1..4"), "cpus" and "gpus" of each, "max_rows", "names", and the arguments of
    `slipstream.load`. Raises ValueError for impossible values.
    """
    options = dict(arguments)
    scale = Scale.read(options.pop("replicas", 1), options.pop("cpus", None), options.pop("gpus", None))
    room = Capacity(int(options.pop("max_rows", 16)))
    names = tuple(options.pop("names", ()) or [source_name(options.get("target")) or "embedded"])
    return application(Recipe(ModelOptions.of(**options), ServeSettings(names), room), scale)


class Replica:
    """A server without a socket, which answers the requests that the front passes to it."""

    async def __init__(self, recipe: Recipe) -> None:  # type: ignore[misc]  # Ray awaits it
        self.state = await asyncio.to_thread(recipe.state)
        self._open = AsyncExitStack()  # stays open until the process ends
        self.app = await self._open.enter_async_context(running(self.state))

    def check_health(self) -> None:
        """Raises Unavailable if the models cannot run any more; Ray then starts another replica."""
        self.state.worker.check()

    async def answer(self, scope: dict[str, Any], body: bytes) -> AsyncIterator[tuple[int, list[Any]] | bytes]:
        """Answer a request: yield the status and headers first, then the body in pieces."""
        messages, body_sent, gone = asyncio.Queue[Any](), False, asyncio.Event()

        async def receive() -> dict[str, Any]:
            nonlocal body_sent
            if body_sent:
                await gone.wait()
                return {"type": "http.disconnect"}
            body_sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def run() -> None:
            try:
                await self.app({**scope, "asgi": {"version": "3.0"}}, receive, messages.put)
            finally:
                await messages.put(None)

        task = asyncio.create_task(run())
        try:
            while message := await messages.get():
                if message["type"] == "http.response.start":
                    yield message["status"], list(message["headers"])
                elif message.get("body"):
                    yield message["body"]
        finally:
            gone.set()
            with suppress(Exception):  # the app has answered its own errors with status 500
                await task


class Front:
    """The entry for clients, which passes each request to the replica that has probably cached its beginning.

    If a replica is lost before any part of its answer was sent, another one gets the request; a stream that has begun
    then ends with an error event.
    """

    def __init__(self, replicas: DeploymentHandle, body_bytes: int) -> None:
        self.replicas, self.most = replicas, body_bytes

    async def __call__(self, request: Request) -> Response:
        try:
            body = bytearray()
            async for piece in request.stream():
                body += piece
                if len(body) > self.most:
                    raise TooLarge(f"the body is longer than the {self.most} bytes that are taken.")
            for _ in range(ATTEMPTS):
                with suppress(*LOST):
                    return await self._ask({name: request.scope[name] for name in SCOPE}, bytes(body))
            raise ServiceUnavailable("the replicas that were asked are gone: ask again.")
        except BackPressureError:
            return _refusal(TooManyRequests("as many requests wait as may: try again later."))
        except DeploymentUnavailableError:
            return _refusal(ServiceUnavailable("no replica can be started: see the cluster's logs."))
        except ServeError as error:
            return _refusal(error)

    async def _ask(self, scope: dict[str, Any], body: bytes) -> Response:
        """Send a request to a replica and return its answer: complete, or a stream whose first piece has arrived.
        Raises one of LOST if the replica is lost before that."""
        handle = self.replicas.options(stream=True, session_id=routing_key(body))
        pieces = handle.answer.remote(scope, body)
        try:
            status, headers = await anext(pieces)
            first = await anext(pieces, b"")
            if not any(name.lower() == b"content-type" and b"event-stream" in value for name, value in headers):
                return _response(Response(first + b"".join([piece async for piece in pieces])), status, headers)
        except BaseException:
            pieces.cancel()
            raise
        return _response(StreamingResponse(_rest(first, pieces)), status, headers)


async def _rest(first: bytes, pieces: Any) -> AsyncIterator[bytes]:
    """Yield the pieces of a stream, and an error event if its replica is lost.
    If the client disconnects, the request is cancelled."""
    try:
        yield first
        async for piece in pieces:
            yield piece
    except TaskCancelledError:
        raise
    except RayError:
        error = ServiceUnavailable("the replica that wrote this text is gone: ask again.")
        yield f"data: {json_text(error.body())}\n\n".encode()
    finally:
        pieces.cancel()


def _response(response: Response, status: int, headers: list[tuple[bytes, bytes]]) -> Response:
    response.status_code = status
    length = [each for each in response.raw_headers if each[0] == b"content-length"]
    response.raw_headers = [each for each in headers if each[0].lower() != b"content-length"] + length
    return response


def _refusal(error: ServeError) -> Response:
    return JSONResponse(error.body(), error.status, error.headers)
