"""The middleware before every route: keys, limits on headers and bodies, a request id, and the access log."""

import asyncio
import sys
from collections.abc import Callable
from time import monotonic, time
from typing import Any, TextIO

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slipstream.serve.answers import new_id
from slipstream.serve.call import Call, SearchCall
from slipstream.serve.faults import (
    HeadersTooLarge,
    ServeError,
    ServiceUnavailable,
    TooLarge,
    TooSlow,
    WrongHost,
    WrongKey,
    for_path,
)
from slipstream.serve.settings import ServeSettings
from slipstream.text.jsontext import json_text

OPEN = ("/health", "/ping", "/version", "/", "/page.js", "/page.css")  # need no key: they show nothing confidential
HEADER_BYTES = 64 << 10  # greatest total size of headers that is accepted, names and values together
REASON = 300  # most characters of the log's reason for a refusal
IGNORED = 4096  # most characters of the header that names fields without effect
LARGE_BODY = 1 << 20  # bytes of a body beyond which the memory that it took is worth giving back
BODY_SECONDS = 30.0  # longest wait for the next piece of a body


class AccessLog:
    """Writes a JSON line for every request: time, path, status and duration, without its text.
    A log that cannot be written, as on a full disk, is given up with one line on standard error; requests go on."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def write(self, **fields: object) -> None:
        if self._stream is None:
            return
        try:
            print(json_text(fields), file=self._stream, flush=True)
        except (OSError, ValueError) as error:
            self._stream = None
            print(f"slipstream: the access log cannot be written any more: {error}", file=sys.stderr, flush=True)


class Gate:
    """Passes requests on to the application `app`, and answers those that it refuses.
    `on_large` is called when a request with a large body has ended."""

    def __init__(
        self, app: ASGIApp, settings: ServeSettings, log: AccessLog, on_large: Callable[[], object] = bool
    ) -> None:
        self.app, self.settings, self.log, self.on_large = app, settings, log, on_large

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, headers = monotonic(), Headers(scope=scope)
        asked = headers.get("x-request-id", "")
        number = asked if 0 < len(asked) <= 128 and asked.isascii() and asked.isprintable() else new_id()
        status, state = 0, scope.setdefault("state", {})

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                more = MutableHeaders(scope=message)
                more["X-Request-Id"] = number
                if unused := state.get("ignored"):
                    names = dict.fromkeys(ascii(each[:REASON])[1:-1] for each in unused)  # some are made by clients
                    more["X-Slipstream-Ignored"] = ", ".join(names)[:IGNORED]
            await send(message)

        try:
            if sum(map(len, (part for pair in scope["headers"] for part in pair))) > HEADER_BYTES:
                raise HeadersTooLarge(f"the headers are longer than the {HEADER_BYTES} bytes that are taken.")
            if self.settings.hosts is not None and not self.settings.hosts.allow(headers.get("host", "")):
                raise WrongHost(f"{headers['host']!r} is no host of this server: start it with --allow-host, or keys.")
            state["tenant"] = self._tenant(scope["path"], headers)
            await self.app(scope, self._limited(receive, headers, state), answer)
        except ServeError as error:
            if status:
                raise
            state["refusal"] = error.message
            await _send(error, scope, receive, answer)
        except asyncio.CancelledError:  # the server ends at once; uvicorn alone would answer 500, in plain text
            if status:
                raise
            await _send(ServiceUnavailable("the server is shutting down: ask again later."), scope, receive, answer)
        except Exception as error:  # a fault of ours, which is answered further out
            status, state["refusal"] = status or 500, type(error).__name__
            raise
        finally:
            if state.get("read", 0) > LARGE_BODY:
                self.on_large()
            about = {"id": number, "method": scope["method"], "path": scope["path"], "status": status}
            times = {"time": time(), "seconds": monotonic() - began}
            details = _of_call(state["call"], self.settings.log_prompts) if "call" in state else {}
            if "refusal" in state:
                details["error"] = state["refusal"][:REASON]
            self.log.write(**times, **about, tenant=state.get("tenant", ""), **details)

    def _tenant(self, path: str, headers: Headers) -> str:
        if not self.settings.keys or path in OPEN:
            return ""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        key = key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")  # as Anthropic's clients
        tenant = self.settings.tenant(key)
        if tenant is None:
            raise WrongKey("send one of this server's keys: as 'Authorization: Bearer KEY' or 'x-api-key: KEY'.")
        return tenant

    def _limited(self, receive: Receive, headers: Headers, state: dict[str, Any]) -> Receive:
        """Return a `receive` that stops at the limit on bodies. Raises TooLarge, at once for an announced length."""
        most, more = self.settings.limits.body_bytes, True
        state["read"] = 0
        announced = headers.get("content-length", "0")
        if announced.isdecimal() and int(announced) > most:
            raise TooLarge(f"the body has {announced} bytes, but at most {most} are taken.")

        async def limited() -> Message:
            nonlocal more
            try:
                message = await asyncio.wait_for(receive(), BODY_SECONDS if more else None)
            except TimeoutError:
                raise TooSlow(f"no piece of the body came for {BODY_SECONDS:g} seconds.") from None
            more = message.get("more_body", False)
            state["read"] += len(message.get("body", b""))
            if state["read"] > most:
                raise TooLarge(f"the body is longer than the {most} bytes that are taken.")
            return message

        return limited


def _of_call(call: Call | SearchCall, texts: bool) -> dict[str, Any]:
    usage = call.usage
    counts = {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens}
    cached = {"cached_tokens": usage.prompt_tokens_details.cached_tokens}
    return {**counts, **cached, "finish_reasons": call.finish_reasons, **(call.texts() if texts else {})}


async def _send(error: ServeError, scope: Scope, receive: Receive, send: Send) -> None:
    body = for_path(error.body(), error.status, scope["path"])
    await JSONResponse(body, error.status, error.headers)(scope, receive, send)
