"""JSON bodies of requests: bounded before anything is made of them, and read and validated off the event loop."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import nullcontext
from dataclasses import dataclass
from email.message import Message
from typing import Annotated, Any, TypeVar, cast, get_args, get_origin

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, TypeAdapter, ValidationError, WrapValidator
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from slipstream.serve.body import Addressed, ignored
from slipstream.serve.faults import BadRequest

Result = TypeVar("Result")
Model = TypeVar("Model", bound=BaseModel)
LIGHT = 32 << 10  # bytes of the longest body that is not heavy: anything is done with it at once
WINDOW = 256 << 10  # bytes of a body that are looked at in one go, so that other threads get their turn in between
ANYTHING = TypeAdapter[Any](Any)  # reads JSON in a third of the time of the standard library
VALUES_PER_FIELD, ESCAPES_PER_VALUE, MARKS_PER_VALUE = 8, 4, 16  # what takes longer to read may come less often

Once = Annotated[  # type of a body in a route: FastAPI does not validate again what `JsonRoute` has validated
    Model, WrapValidator(lambda value, validate: value if isinstance(value, BaseModel) else validate(value))
]


class JsonRoute(APIRoute):
    """A route whose JSON body is read and validated in a thread: no body holds up the event loop."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()
        model = self.body_field.field_info.annotation if self.body_field else None
        if get_origin(model) is Annotated:  # FastAPI has taken it apart itself since
            model = get_args(model)[0]

        async def handle(request: Request) -> Response:
            if isinstance(model, type) and issubclass(model, BaseModel):
                if not _is_json(request):
                    given = request.headers.get("content-type")
                    raise BadRequest(f"the body comes with the content-type {given!r}: send it as application/json.")
                if (coding := request.headers.get("content-encoding", "identity")) != "identity":
                    raise BadRequest(f"the body comes with the content-encoding {coding!r}: send it uncompressed.")
                request = await _read(request, model)
            return await handler(request)

        return handle


class ReadRequest(Request):
    """A request whose JSON body has been read: `content` is the model made of it, None for an empty body."""

    content: BaseModel | None = None

    async def body(self) -> bytes:
        """Return whether there is a body, as FastAPI asks; the bytes themselves are not kept."""
        return b"" if self.content is None else b"{}"

    async def json(self) -> Any:
        return self.content


async def _read(request: Request, model: type[BaseModel]) -> ReadRequest:
    """Read and validate a body; a few heavy ones at a time, since their bytes take memory."""
    server, length = request.app.state.server, request.headers.get("content-length", "")
    request.state.heavy = heavy = not length.isdecimal() or int(length) > LIGHT
    read, limits = ReadRequest(request.scope, request.receive), server.settings.limits

    def validated(pieces: list[bytes]) -> tuple[BaseModel, list[str]]:
        """Return the model of a body, and its fields without effect, which the answer will name."""
        content = read_json(b"".join(pieces), limits.values)
        try:
            made = model.model_validate(content)
        except ValidationError as error:
            raise RequestValidationError(error.errors(include_url=False), body=content) from None
        return made, [*ignored(made)]

    async with server.readers if heavy else nullcontext():
        if content := [piece async for piece in request.stream() if piece]:
            request.state.size = sum(map(len, content))
            read.content, request.state.ignored = await off_loop(request, validated, content)
    if isinstance(read.content, Addressed):
        server.check_model(read.content.model)
    return read


async def off_loop(request: Request, work: Callable[..., Result], *arguments: Any) -> Result:
    """Do work for a request in a thread; for heavy bodies, one piece of work at a time.
    So they take memory, and turns of the interpreter, one by one, and other requests wait for one turn at most."""

    def tried() -> tuple[Result | None, Exception | None]:
        """Return the result of work, or its error: one that a future raised would be part of a cycle with it."""
        try:
            return work(*arguments), None
        except Exception as error:
            return None, error

    alone = request.app.state.server.heavy if getattr(request.state, "heavy", False) else nullcontext()
    async with alone:
        result, error = await run_in_threadpool(tried)
    try:
        if error is not None:
            raise error
        return cast("Result", result)
    finally:
        del error  # a cycle with its own traceback, which holds the body until a garbage collection


def _is_json(request: Request) -> bool:
    header = Message()
    header["content-type"] = request.headers.get("content-type", "text/plain")
    subtype = header.get_content_subtype()
    return header.get_content_maintype() == "application" and (subtype == "json" or subtype.endswith("+json"))


def read_json(body: bytes, most: int) -> Any:
    """Read a body of at most `most` values, which are counted before anything is made of them.
    Raises BadRequest for what is too much, and RequestValidationError for what is no JSON."""
    size = JsonSize.of(body, most)
    for what, count, limit in (
        ("values", size.values, most),
        ("lists, objects and fields", size.structure, most // VALUES_PER_FIELD),
        ("escapes in its texts", size.escapes, most * ESCAPES_PER_VALUE),
        ("characters outside of texts", size.marks, most * MARKS_PER_VALUE),
    ):
        if count > limit:
            raise BadRequest(f"the body holds more than the {limit} {what} that are taken: send less in one request.")
    try:
        return ANYTHING.validate_json(body)
    except ValidationError as error:
        raise RequestValidationError(error.errors(include_url=False, include_input=False)) from None


@dataclass
class JsonSize:
    """What a JSON text holds: values, lists and objects and their fields (`structure`), and escapes in texts.
    `marks` are the characters outside of texts, without white space: those of numbers, mostly."""

    values: int = 0
    structure: int = 0
    escapes: int = 0
    marks: int = 0

    @staticmethod
    def of(body: bytes, most: int) -> JsonSize:
        size, start, inside = JsonSize(), 0, 0
        while start < len(body) and size.values <= most:
            end = start + WINDOW
            while body[end - 1 : end] == b"\\":  # an escape is not cut in two
                end += 1
            piece, start = body[start:end], end
            size.escapes += piece.count(b"\\")
            parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
            marks = b"".join(parts[inside::2])  # what is outside of texts
            inside ^= (len(parts) - 1) % 2
            structure = sum(map(marks.count, (b"{", b"[", b":")))
            size.structure += structure
            size.marks += len(marks.translate(None, b" \t\r\n"))
            size.values += structure + marks.count(b",")
        return size
