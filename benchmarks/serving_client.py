"""Starts servers as processes, and streams completions from them with the time of every piece; for `serving.py`."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from time import monotonic, perf_counter, sleep
from typing import Any
from urllib.request import urlopen

START = 900
"""The most seconds that a server may take to be ready."""


@dataclass(frozen=True)
class Server:
    """A server that runs as a process, and the fields of its requests in addition to prompt and length."""

    process: subprocess.Popen[bytes]
    port: int
    fields: Mapping[str, Any]

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Let the server run within the context; afterwards it is stopped (SIGSTOP)."""
        self.process.send_signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGSTOP)

    def get(self, path: str) -> Any:
        """Return the JSON that a GET request for a path answers."""
        with urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as answer:
            return json.load(answer)


@contextmanager
def serving(command: Sequence[str], fields: Mapping[str, Any]) -> Iterator[Server]:
    """Run a server within the context, warmed up and then stopped (SIGSTOP) until it is used.

    Raises RuntimeError if it does not start.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen([*command, "--host", "127.0.0.1", "--port", str(port)], stdout=subprocess.DEVNULL)
    server = Server(process, port, fields)
    try:
        wait_until_ready(server)
        with server.awake():
            asyncio.run(ask(server, "def warm(x):", 8))
        yield server
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()


def wait_until_ready(server: Server) -> None:
    """Wait until the server answers. Raises RuntimeError if it exits or takes longer than START."""
    end = monotonic() + START
    while monotonic() < end and server.process.poll() is None:
        try:
            server.get("/health")
            return
        except OSError:
            sleep(0.2)
    raise RuntimeError(f"the server does not start: {' '.join(map(str, server.process.args))}")  # type: ignore[union-attr]


@dataclass(frozen=True)
class Answer:
    """A streamed completion: the arrival of each piece in seconds after the request, the number of tokens, the text."""

    times: tuple[float, ...]
    tokens: int
    text: str

    @property
    def gaps(self) -> list[float]:
        """The seconds between consecutive pieces."""
        return [after - before for before, after in pairwise(self.times)]


def http_request(body: Mapping[str, Any]) -> bytes:
    """Return the bytes of an HTTP request for a completion."""
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\nConnection: close\r\n"
    )
    return head.encode() + b"Content-Type: application/json\r\n\r\n" + content


def read_all(server: Server, prompt: str, tokens: int) -> None:
    """Stream one completion to its end with hardly any work in this process. Raises RuntimeError if it fails.

    Wakes only when much data or the end has come, since a client on another machine would take no time from the
    server's processors.
    """
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1 << 16)
        connection.sendall(http_request({"prompt": prompt, "max_tokens": tokens, **server.fields}))
        pieces = list(iter(lambda: connection.recv(1 << 16), b""))
    if b"data: [DONE]" not in b"".join(pieces[-2:]):
        raise RuntimeError(f"the server failed: {b''.join(pieces)[-500:].decode(errors='replace')}")


async def events(port: int, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Yield the events of a streamed completion. Raises RuntimeError unless the HTTP status is 200."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    try:
        writer.write(http_request(body))
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError(f"{status.decode().strip()}: {(await reader.read()).decode()[-500:]}")
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])
    finally:
        writer.close()


async def ask(server: Server, prompt: str | Sequence[int], tokens: int, **more: Any) -> Answer:
    """Stream one completion, whose request has the fields `more` in addition to the server's."""
    body = {"prompt": prompt, "max_tokens": tokens, **server.fields, **more}
    began, times, texts, written = perf_counter(), list[float](), list[str](), 0
    async for event in events(server.port, body):
        if "error" in event:
            raise RuntimeError(f"the server failed: {event['error']}")
        written = (event.get("usage") or {}).get("completion_tokens", written)
        for choice in event["choices"]:
            if choice["text"]:
                times.append(perf_counter() - began)
                texts.append(choice["text"])
    return Answer(tuple(times), written, "".join(texts))


async def streams(
    server: Server, prompts: Sequence[str], count: int, lengths: Sequence[int], more: Any
) -> list[Answer]:
    """Stream completions of all prompts, `count` at a time, with these numbers of tokens."""
    room = asyncio.Semaphore(count)

    async def one(prompt: str, tokens: int) -> Answer:
        async with room:
            return await ask(server, prompt, tokens, **more)

    return list(await asyncio.gather(*map(one, prompts, lengths)))
