"""Sends what would hold up or fill a server, to a real one, and prints the longest stall of /health and the memory.

python benchmarks/attack.py [NAME ...]      # all attacks, or those whose names contain one of these

A stall is the time until /health answers on a connection of its own, asked every 5 ms. Exits with 1 if one is longer
than 50 ms, beyond the longest one before the attacks, or if memory grows by more than 200 MB: on an idle machine.
"""

from __future__ import annotations

import http.client
import json
import multiprocessing
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from serving_client import Server, serving

STALL_MS, GROWTH_MB = 50.0, 200.0
LONG = 15 << 20
COMPLETION, CHAT, RESPONSE = "/v1/completions", "/v1/chat/completions", "/v1/responses"
JSON = {"Content-Type": "application/json"}
USER = {"role": "user", "content": "x"}


def bodies() -> dict[str, tuple[str, str]]:
    """Return the bodies to send: a name -> the path and the JSON text."""
    text, ids = "a" * LONG, [7] * 250_000
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    tool = {"type": "function", "function": {"name": "f", "description": text}}
    pattern = {"type": "string", "pattern": "^(a?){500}a{500}$"}
    made: dict[str, tuple[str, Any]] = {
        "100,000 numbers as a prompt": (COMPLETION, {"prompt": ["a", *[1.5] * 100_000]}),
        "250,000 numbers as a prompt": (COMPLETION, {"prompt": ["a", *[1.5] * 250_000]}),
        "a million numbers as a prompt": (COMPLETION, {"prompt": ["a", *[1.5] * 1_000_000]}),
        "250,000 token ids": (COMPLETION, {"prompt": ids}),
        "130,000 prompts": (COMPLETION, {"prompt": [[7]] * 130_000}),
        "200,000 unknown fields": (COMPLETION, {"prompt": "a", **{f"k{i}": 1 for i in range(200_000)}}),
        "2,000 unknown fields": (CHAT, {"messages": [USER], **{f"k{i}": 1 for i in range(2000)}}),
        "200,000 biases": (COMPLETION, {"prompt": "a", "logit_bias": {str(i): "x" for i in range(200_000)}}),
        "16,000 messages": (CHAT, {"messages": [USER] * 16_000}),
        "5,000 calls in messages": (CHAT, {"messages": [{"role": "assistant", "tool_calls": [call]}] * 5000}),
        "128 prompts, n = 32": (COMPLETION, {"prompt": ["a"] * 128, "n": 32}),
        "32 prompts, n = 32": (COMPLETION, {"prompt": ["a " * 400] * 32, "n": 32, "max_tokens": 1}),
        "a long prompt": (COMPLETION, {"prompt": text}),
        "128 long prompts": (COMPLETION, {"prompt": ["a" * 40_000] * 128}),
        "a long message": (CHAT, {"messages": [{"role": "user", "content": text}]}),
        "long parts": (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": text}]}]}),
        "a long tool": (CHAT, {"messages": [USER], "tools": [tool]}),
        "a long input": (RESPONSE, {"input": text}),
        "a long text for /tokenize": ("/tokenize", {"prompt": text}),
        "a long chat for /tokenize": ("/tokenize", {"messages": [{"role": "user", "content": text}]}),
        "250,000 tokens for /detokenize": ("/detokenize", {"tokens": ids}),
        **{f"a long {name}": (COMPLETION, {"prompt": "a", name: text}) for name in ("stop", "suffix", "model", "user")},
        "a long cache_salt": (COMPLETION, {"prompt": "a", "max_tokens": 1, "cache_salt": text}),
        "a long bad word": (COMPLETION, {"prompt": "a", "bad_words": [text]}),
        "1,000 bad words": (COMPLETION, {"prompt": "a", "bad_words": ["a" * 10_000] * 1000}),
        "a long prediction": (COMPLETION, {"prompt": "a", "prediction": {"type": "content", "content": text}}),
        "a long choice": (COMPLETION, {"prompt": "a", "structured_outputs": {"choice": [text]}}),
        "a regex of many states": (COMPLETION, {"prompt": "a", "structured_outputs": {"regex": "(a?){500}a{500}"}}),
        "a regex of 60 KB": (COMPLETION, {"prompt": "a", "structured_outputs": {"regex": "(a?b|c){9}" * 6000}}),
        "a schema of many states": (COMPLETION, {"prompt": "a", "structured_outputs": {"json": pattern}}),
        "a million lines": (COMPLETION, {"prompt": "\n" * 1_000_000}),
        "7 million lines": (COMPLETION, {"prompt": "\n" * 7_000_000}),
        "7 million commas in a text": (COMPLETION, {"prompt": "a," * 7_000_000}),
    }
    texts = {name: (path, json.dumps(body)) for name, (path, body) in made.items()}
    raw = {
        "100,000 open lists": "[" * 100_000,
        "2 million open objects": '{"a":' * 2_000_000,
        "5 million empty objects": '{"messages":[' + "{}," * 5_000_000 + "{}]}",
        "5 million texts": '{"prompt":[' + '"",' * 5_000_000 + '""]}',
        "a long number": '{"seed":' + "9" * LONG + "}",
    }
    return texts | {name: (CHAT if "messages" in text else COMPLETION, text) for name, text in raw.items()}


class Watch:
    """Asks for /health all the time, in a process of its own, and keeps the longest wait and the most memory."""

    def __init__(self, server: Server) -> None:
        self.wait, self.memory = multiprocessing.Value("d"), multiprocessing.Value("d")
        multiprocessing.Process(target=watch, args=(server, self.wait, self.memory), daemon=True).start()

    def reset(self) -> None:
        """Begin again."""
        self.wait.value = self.memory.value = 0.0

    @property
    def stall(self) -> float:
        """The longest wait since `reset`, in milliseconds."""
        return 1e3 * self.wait.value


def watch(server: Server, wait: Any, memory: Any) -> None:
    """Ask for /health until the server is gone."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    with suppress(OSError, http.client.HTTPException):
        while True:
            began = time.perf_counter()
            connection.request("GET", "/health")
            connection.getresponse().read()
            wait.value = max(wait.value, time.perf_counter() - began)
            memory.value = max(memory.value, resident(server))
            time.sleep(0.005)


def resident(server: Server) -> float:
    """Return the megabytes that the server holds."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def post(server: Server, path: str, text: str) -> str:
    """Send a body -> the status and the beginning of what was answered."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
    try:
        connection.request("POST", path, text.encode(), JSON)
        answer = connection.getresponse()
        content = answer.read().decode()
    except OSError as error:
        return type(error).__name__
    finally:
        connection.close()
    error = json.loads(content or "{}").get("error")
    return f"{answer.status} {error['message'][:60] if error else ''}"


@contextmanager
def opened(server: Server, count: int, begin: bytes) -> Iterator[list[socket.socket]]:
    """Open connections and send the beginning of a request on each."""
    sockets = list[socket.socket]()
    try:
        for _ in range(count):
            sockets.append(socket.create_connection(("127.0.0.1", server.port)))
            sockets[-1].sendall(begin)
        yield sockets
    finally:
        for each in sockets:
            each.close()


def idle(server: Server, count: int, begin: bytes, seconds: float) -> str:
    """Leave half-sent requests alone for a while -> how many of them the server has closed."""
    with opened(server, count, begin) as sockets:
        time.sleep(seconds)
        closed = 0
        for each in sockets:
            each.setblocking(False)
            with suppress(BlockingIOError, ConnectionError):
                closed += each.recv(1 << 16) is not None
        return f"{closed} of {count} answered or closed"


def endless(server: Server) -> str:
    """Send headers without end, up to 64 MB -> how many of them the server took."""
    sent, line = 0, b"X-Header: " + b"y" * 8000 + b"\r\n"
    begin = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
    with opened(server, 1, begin) as [one], suppress(ConnectionError):
        while sent < 64 << 20:
            one.sendall(line)
            sent += len(line)
    return f"{sent >> 10} KB taken"


def leave(server: Server, count: int, path: str, text: str) -> str:
    """Send a body from many clients that leave at once."""
    content = text.encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    for _ in range(count):
        begin = f"{head}Content-Length: {len(content)}\r\n\r\n".encode()
        with opened(server, 1, begin) as [one], suppress(ConnectionError):
            one.sendall(content)
    return f"{count} left"


def together(server: Server, asked: Sequence[tuple[str, str]]) -> str:
    """Send many bodies at once -> their statuses."""
    with ThreadPoolExecutor(len(asked)) as pool:
        return " ".join(each.split()[0] for each in pool.map(lambda one: post(server, *one), asked))


def attacks(server: Server) -> dict[str, Callable[[], str]]:
    """Return all attacks by name."""
    sent = bodies()
    one = {name: (lambda path=path, text=text: post(server, path, text)) for name, (path, text) in sent.items()}
    half = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return {
        **one,
        "20 of them at once": lambda: together(server, list(sent.values())[:20]),
        "20 clients that leave": lambda: leave(server, 20, *sent["a long prompt"]),
        "headers without end": lambda: endless(server),
        "1,000 silent connections": lambda: idle(server, 1000, b"", 12),
        "1,000 half-sent headers": lambda: idle(server, 1000, half, 12),
        "200 half-sent bodies": lambda: idle(server, 200, half + b"Content-Length: 99\r\n\r\n{", 32),
    }


def main() -> int:
    """Attack a server and print what happened -> the exit code."""
    command = [sys.executable, "-m", "slipstream", "serve", "--cache-bytes", "16M"]
    with serving(command, {}) as server, server.awake():
        seen = Watch(server)
        post(server, COMPLETION, json.dumps({"prompt": "a", "max_tokens": 8}))
        time.sleep(1)
        seen.reset()
        time.sleep(3)
        quiet, before, worst = seen.stall, resident(server), 0.0
        print(f"{'nothing':34} {'':8} {quiet:7.0f} ms {before:7.0f} MB", flush=True)
        for name, attack in attacks(server).items():
            if len(sys.argv) > 1 and not any(each in name for each in sys.argv[1:]):
                continue
            seen.reset()
            began = time.perf_counter()
            says = attack()
            took, worst = time.perf_counter() - began, max(worst, seen.stall)
            print(f"{name:34} {took:6.2f} s {seen.stall:7.0f} ms {seen.memory.value:7.0f} MB  {says}", flush=True)
        growth = resident(server) - before
    print(f"longest stall {worst:.0f} ms ({quiet:.0f} ms before), memory {growth:+.0f} MB in the end")
    return int(worst - quiet > STALL_MS or growth > GROWTH_MB)


if __name__ == "__main__":
    sys.exit(main())
