"""Connections that are left half-way: they are closed in time, and headers without end are refused."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from slipstream.serve import gate, server
from slipstream.serve.gate import AccessLog, Gate
from slipstream.serve.server import Connection
from slipstream.serve.settings import ServeSettings
from slipstream.serve.sockets import listen


async def echo(request: Request) -> PlainTextResponse:
    return PlainTextResponse(str(len(await request.body())))


def asked(talk: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[bytes]], keep_alive: int = 0) -> bytes:
    async def run() -> bytes:
        routes = [Route("/", echo, methods=["GET", "POST"])]
        app = Gate(Starlette(routes=routes), ServeSettings(("m",)), AccessLog(None))
        with listen("127.0.0.1", 0) as listener:
            server = uvicorn.Server(
                uvicorn.Config(
                    app, http=Connection, ws="none", log_config=None, lifespan="off", timeout_keep_alive=keep_alive
                )
            )
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            try:
                return await asyncio.wait_for(talk(reader, writer), 60)
            finally:
                writer.close()
                server.should_exit = True
                await serving

    return asyncio.run(run())


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HEADER_SECONDS", 0.1)
    monkeypatch.setattr(gate, "BODY_SECONDS", 0.1)


POST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n"


@pytest.mark.parametrize("begun", [b"", b"GET / HT", POST[:-2], POST + b"x" * 9 + b"GET / HTTP/1.1\r\n"])
def test_a_connection_without_a_whole_request_is_closed(begun: bytes, impatient: None) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(begun)
        return await reader.read()

    answered = asked(talk)
    assert answered.endswith(b"\r\n\r\n9") if begun.startswith(POST) else not answered


def test_a_body_that_does_not_come_is_a_408(impatient: None) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(POST + b"x")
        return await reader.readline()

    assert asked(talk) == b"HTTP/1.1 408 Request Timeout\r\n"


def test_who_sends_whole_requests_in_pieces_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HEADER_SECONDS", 30)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        for part in (POST[:9], POST[9:], b"x" * 4, b"x" * 5, POST, b"y" * 9):
            writer.write(part)
            await asyncio.sleep(0.02)
        first = await reader.readuntil(b"\r\n\r\n9")
        return first + await reader.readuntil(b"\r\n\r\n9")

    assert asked(talk, keep_alive=30).count(b"HTTP/1.1 200") == 2


@pytest.mark.parametrize("begin", [b"GET / HTTP/1.1\r\n", POST + b"x" * 9 + b"GET / HTTP/1.1\r\n"])
def test_headers_without_end_are_refused(begin: bytes) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(begin)
        await writer.drain()
        with suppress(ConnectionError):
            for _ in range(40):
                writer.write(b"X-Header: " + b"y" * 8000 + b"\r\n")
                await writer.drain()
                await asyncio.sleep(0.001)
        with suppress(ConnectionError):
            return await reader.read()
        return b"reset"

    answer = asked(talk)
    assert b"HTTP/1.1 431" in answer or answer == b"reset"
