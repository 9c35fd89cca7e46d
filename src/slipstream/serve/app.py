"""The application: all routes, the gate before them, and the answers to errors."""

import asyncio
import sys
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from slipstream.serve.answers import ChatChunk, CompletionAnswer, FilledIn
from slipstream.serve.body import complaint
from slipstream.serve.call import ClientGone
from slipstream.serve.faults import ServeError, error_body, for_path
from slipstream.serve.gate import AccessLog, Gate
from slipstream.serve.json_route import off_loop
from slipstream.serve.messages import MessageEvent
from slipstream.serve.response_output import ResponseEvent
from slipstream.serve.routes import audio, chat, completions, infill, messages, models, responses
from slipstream.serve.state import ServerState
from slipstream.version import __version__

CLIENT_CLOSED = 499  # logged status of a request whose client closed the connection; no client receives it
ROUTERS = (completions, chat, responses, messages, infill, audio, models)
CHUNKS = (ChatChunk, CompletionAnswer, ResponseEvent, MessageEvent, FilledIn)
REFERENCE = "#/components/schemas/{model}"
"""The models of stream events, and where the OpenAPI description keeps their schemas."""


class Application(FastAPI):
    """FastAPI's application, with an OpenAPI description that matches its real answers."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema:
            return self.openapi_schema
        description = super().openapi()
        for path in description["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)  # we answer 400
                for response in operation["responses"].values():
                    response.setdefault("headers", {})["X-Request-Id"] = {"schema": {"type": "string"}}
        schemas = description["components"]["schemas"]
        _, chunks = models_json_schema([(model, "serialization") for model in CHUNKS], ref_template=REFERENCE)
        schemas |= chunks["$defs"]
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        return description


async def _described(request: Request) -> Response:
    """Return the OpenAPI description, which takes a second to make, beside the event loop, and once."""
    request.state.heavy = True
    return await off_loop(request, lambda: JSONResponse(request.app.openapi()))


def create_app(state: ServerState, log: AccessLog | None = None) -> FastAPI:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        state.worker.start()
        try:
            yield
        finally:
            state.worker.stop()

    app = Application(
        title="Slipstream",
        version=__version__,
        description="Speculative decoding behind OpenAI's interface.",
        lifespan=lifespan,
        openapi_url=None,  # FastAPI's own would be made in the event loop
        docs_url=None,  # those pages load scripts from elsewhere
        redoc_url=None,
        exception_handlers=HANDLERS,
    )
    app.state.server = state
    for module in ROUTERS:
        app.include_router(module.router)
    app.add_route("/openapi.json", _described, include_in_schema=False)
    app.add_middleware(Gate, settings=state.settings, log=log or AccessLog(None), on_large=state.worker.wake)
    if origins := state.settings.origins:  # before the gate: a browser asks first, without a key
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=["*"]
        )
    return app


@asynccontextmanager
async def running(state: ServerState) -> AsyncIterator[FastAPI]:
    """Run an application without a socket -> the application, once its models are warm; it ends with the block.
    Raises ServiceUnavailable if the models cannot run."""
    ready = asyncio.Event()
    state.worker.on_ready = state.worker.on_death = ready.set
    app = create_app(state)
    async with app.router.lifespan_context(app):
        await ready.wait()
        state.worker.check()
        yield app


async def _refused(request: Request, error: Exception) -> Response:
    """Answer a request that failed, in its path's form, and keep the reason for the access log."""
    status, headers = 400, error.headers if isinstance(error, HTTPException) else None
    if isinstance(error, ServeError):
        status, body = error.status, error.body()
    elif isinstance(error, RequestValidationError):
        message, field = complaint(error.errors(), error.body)
        body = error_body(message, "invalid_request_error", field)
    elif isinstance(error, HTTPException):
        status, body = error.status_code, error_body(_said(request, error), "invalid_request_error")
    else:
        traceback.print_exception(error, file=sys.stderr)
        status, body = 500, error_body(f"the server failed: {type(error).__name__}.", "server_error")
    request.state.refusal = body["error"]["message"]
    return JSONResponse(for_path(body, status, request.url.path), status, headers)


def _said(request: Request, error: HTTPException) -> str:
    """Return what is wrong with a request that fits no route, and what would fit."""
    path, routes = request.url.path, (route for module in ROUTERS for route in module.router.routes)
    known = [str(getattr(route, "path", "")) for route in routes]
    near = [each for each in known if len(each) > 1 and (each.endswith(path) or path.endswith(each))]
    hints = {404: f"did you mean {near[0]}?" if near else "GET /openapi.json lists all that is."}
    hints[405] = f"send {(error.headers or {}).get('Allow')}."
    hint = hints.get(error.status_code)
    return f"{request.method} {path} is not served here: {hint}" if hint else str(error.detail)


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED)


HANDLERS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((ServeError, RequestValidationError, HTTPException, Exception), _refused),
    **dict.fromkeys((ClientGone, ClientDisconnect), _gone),
}
