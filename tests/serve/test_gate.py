"""What stands before the routes: which hosts may be named, and what an answer that is broken off becomes."""

import asyncio
import io
import json

import httpx
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from slipstream.serve.gate import AccessLog, Gate
from slipstream.serve.settings import Hosts, ServeSettings


async def never(scope: Scope, receive: Receive, send: Send) -> None:
    await asyncio.Event().wait()


async def begun(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await asyncio.Event().wait()


def ask(app: ASGIApp) -> httpx.Response:
    async def answer() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.get("/health")

    return asyncio.run(answer())


def cancelled(app: ASGIApp) -> httpx.Response:
    """Ask, and cancel the task that answers, as a server does that ends at once."""
    gate = Gate(app, ServeSettings(("model",)), AccessLog(None))

    async def answering(scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.create_task(gate(scope, receive, send))
        await asyncio.sleep(0.01)
        task.cancel()
        await task

    return ask(answering)


async def ignoring(scope: Scope, receive: Receive, send: Send) -> None:
    """An application that leaves fields without effect, whose names clients have made."""
    scope["state"]["ignored"] = ["user", "user", "é\r\nSet-Cookie: a=b", "\ud83d", *map(str, range(9000))]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def test_names_of_clients_cannot_break_the_header_that_repeats_them() -> None:
    header = ask(Gate(ignoring, ServeSettings(("model",)), AccessLog(None))).headers["x-slipstream-ignored"]
    assert header.startswith(r"user, \xe9\r\nSet-Cookie: a=b, \ud83d, 0, 1,") and len(header) == 4096


async def broken(scope: Scope, receive: Receive, send: Send) -> None:
    raise KeyError("ours")


@pytest.mark.parametrize(("app", "status", "error"), [(broken, 500, "KeyError"), (ignoring, 200, None)])
def test_a_fault_of_ours_is_logged_as_what_it_is(app: ASGIApp, status: int, error: str | None) -> None:
    log = io.StringIO()
    ask(Gate(app, ServeSettings(("model",)), AccessLog(log)))
    line = json.loads(log.getvalue())
    assert (line["status"], line.get("error")) == (status, error)


def test_a_request_broken_off_before_its_answer_began_is_unavailable_and_one_after_is_cut() -> None:
    answer = cancelled(never)
    assert answer.status_code == 503
    assert "shutting down" in answer.json()["error"]["message"]
    assert answer.headers["x-request-id"]
    with pytest.raises(asyncio.CancelledError):
        cancelled(begun)


HERE = ("localhost", "localhost:8000", "LOCALHOST.", "127.0.0.1:8000", "127.9.9.9", "[::1]:8000", "[::1]", "")
ELSEWHERE = ("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "2130706433", "x")
ADDRESSES = ("192.168.1.5:8000", "[fe80::1]:80", "8.8.8.8")


@pytest.mark.parametrize(
    ("bound", "allowed", "also"),
    [
        ("127.0.0.1", (), ()),
        ("::1", (), ()),
        ("0.0.0.0", (), ADDRESSES),
        ("::", (), ADDRESSES),
        ("192.168.1.5", (), ("192.168.1.5:8000", "192.168.1.5")),
        ("box.lan", (), ("box.lan", "BOX.lan:80")),
        ("127.0.0.1", ("evil.example",), ("evil.example", "evil.example:8000")),
        ("127.0.0.1", ("*",), (*ELSEWHERE, *ADDRESSES)),
    ],
)
def test_a_request_may_name_the_server_and_what_was_allowed(
    bound: str, allowed: tuple[str, ...], also: tuple[str, ...]
) -> None:
    hosts = Hosts.of(bound, allowed)
    for header in (*HERE, *ELSEWHERE, *ADDRESSES, *also):
        assert hosts.allow(header) == (header in (*HERE, *also)), header


@pytest.mark.parametrize("name", ["http://a", "a:80", "", "a b", "*.a"])
def test_an_allowed_host_is_a_name(name: str) -> None:
    with pytest.raises(ValueError, match="--allow-host"):
        Hosts.of("127.0.0.1", [name])
