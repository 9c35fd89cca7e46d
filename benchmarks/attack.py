"""Sends what would hold up or fill a server, to a real one, and prints the longest stall of /health and the memory.

python benchmarks/attack.py [NAME ...]      # all attacks, or those whose names contain one of these

A stall is the time until /health answers on a connection of its own, asked every 5 ms; beside it stands the processor
time that the thread of the event loop took between two of its turns, which a busy machine does not change. Exits with 1
if one is longer than 50 ms, a stall beyond the longest one before the attacks, or if memory grows by more than 200 MB.
"""

import asyncio
import http.client
import json
import mmap
import multiprocessing
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from serving_client import Server, serving

from slipstream.cli import main as command_line
from slipstream.engine.worker import Worker

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
        "20,000 log-probabilities": (COMPLETION, {"prompt": ["a " * 250] * 4, "n": 4, "logprobs": 20, "echo": True}),
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
        "200,000 nested lists": (COMPLETION, {"prompt": [[[]] * 1000] * 16}),
        "a long key": (CHAT, {"messages": [USER], text: 1}),
        "1,000 long keys": (CHAT, {"messages": [USER], **{f"{i}{'k' * 15_000}": 1 for i in range(1000)}}),
        "a long schema": (
            COMPLETION,
            {"prompt": "a", "structured_outputs": {"json": {"enum": [[i] for i in range(9000)]}}},
        ),
        "long metadata": (CHAT, {"messages": [USER], "metadata": {f"k{i}": "v" * 900 for i in range(16_000)}}),
        "30,000 parts": (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 10_000}]}),
        "7 million commas in a text": (COMPLETION, {"prompt": "a," * 7_000_000}),
    }
    texts = {name: (path, json.dumps(body)) for name, (path, body) in made.items()}
    raw = {
        "100,000 open lists": "[" * 100_000,
        "2 million open objects": '{"a":' * 2_000_000,
        "5 million empty objects": '{"messages":[' + "{}," * 5_000_000 + "{}]}",
        "5 million texts": '{"prompt":[' + '"",' * 5_000_000 + '""]}',
        "a long number": '{"seed":' + "9" * LONG + "}",
        "200,000 long numbers": '{"prompt":[' + ",".join(["9" * 70] * 200_000) + "]}",
        "100,000 tiny fractions": '{"prompt":[' + ",".join(["1e-400"] * 100_000) + "]}",
        "a deep object": '{"metadata":' + '{"a":' * 4000 + "1" + "}" * 4001,
    }
    return texts | {name: (CHAT if "messages" in text else COMPLETION, text) for name, text in raw.items()}


def serve(file: str, arguments: list[str]) -> None:
    """Run `slipstream serve`; its event loop writes the longest processor time of its thread between two turns."""
    begin = Worker.start

    def start(worker: Worker) -> None:
        begin(worker)
        worker.turns = asyncio.get_running_loop().create_task(turns(file))  # type: ignore[attr-defined]

    Worker.start = start  # type: ignore[method-assign, assignment]
    sys.argv[1:] = arguments
    command_line()


async def turns(file: str) -> None:
    """Take a turn of the event loop every 5 ms, and write the most microseconds that its thread worked between two."""
    with open(file, "r+b") as opened, mmap.mmap(opened.fileno(), 8) as shared:
        before = time.thread_time_ns()
        while True:
            await asyncio.sleep(0.005)
            now = time.thread_time_ns()
            shared[:] = max(int.from_bytes(shared[:]), (now - before) // 1000).to_bytes(8)
            before = now


class Watch:
    """Asks for /health all the time, in a process of its own, and keeps the longest wait and the most memory.

    `file` is what `turns` writes.
    """

    def __init__(self, server: Server, file: Path) -> None:
        self.file, self.wait, self.memory = file, multiprocessing.Value("d"), multiprocessing.Value("d")
        multiprocessing.Process(target=watch, args=(server, self.wait, self.memory), daemon=True).start()

    def reset(self) -> None:
        """Begin again."""
        self.wait.value = self.memory.value = 0.0
        with self.file.open("r+b") as shared:
            shared.write(bytes(8))

    @property
    def worked(self) -> float:
        """The most milliseconds that the thread of the event loop worked in one go since `reset`."""
        return int.from_bytes(self.file.read_bytes()) / 1e3

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


def forms() -> dict[str, bytes]:
    """Return the forms to send to /v1/audio/transcriptions: a name -> the parts."""
    field = b'--x\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n'
    return {
        "a form of 900 fields": b"".join(field % (b"f%d" % i, b"v" * 1000) for i in range(900)),
        "a form of 200,000 fields": b"".join(field % (b"f%d" % i, b"") for i in range(200_000)),
        "a form full of false ends": field % (b"file", b"\r\n--y" * (LONG // 6)),
        "a form with a long header": b"--x\r\nContent-Disposition: form-data; name=" + b"n" * LONG,
    }


def post(server: Server, path: str, text: str | bytes, kind: Mapping[str, str] = JSON) -> str:
    """Send a body -> the status and the beginning of what was answered."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
    try:
        connection.request("POST", path, text if isinstance(text, bytes) else text.encode(), kind)
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
    form = {"Content-Type": "multipart/form-data; boundary=x"}
    parts = {
        name: (lambda text=text: post(server, "/v1/audio/transcriptions", text + b"--x--\r\n", form))
        for name, text in forms().items()
    }
    half = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return {
        **one,
        **parts,
        "20 of them at once": lambda: together(server, list(sent.values())[:20]),
        "20 clients that leave": lambda: leave(server, 20, *sent["a long prompt"]),
        "headers without end": lambda: endless(server),
        "1,000 silent connections": lambda: idle(server, 1000, b"", 12),
        "1,000 half-sent headers": lambda: idle(server, 1000, half, 12),
        "200 half-sent bodies": lambda: idle(server, 200, half + b"Content-Length: 99\r\n\r\n{", 32),
    }


def main() -> int:
    """Attack a server and print what happened -> the exit code."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(bytes(8))
        file.flush()
        return attack_all(Path(file.name))


def attack_all(file: Path) -> int:
    """Attack a server whose event loop writes into a file, and print what happened -> the exit code."""
    command = [sys.executable, __file__, "--turns", str(file), "serve", "--cache-bytes", "16M"]
    with serving(command, {}) as server, server.awake():
        seen = Watch(server, file)
        post(server, COMPLETION, json.dumps({"prompt": "a", "max_tokens": 8}))
        time.sleep(1)
        seen.reset()
        time.sleep(3)
        quiet, before, worst, most = seen.stall, resident(server), 0.0, 0.0
        print(f"{'':34} {'took':>8} {'stall':>10} {'loop':>10} {'memory':>10}")
        print(f"{'nothing':34} {'':8} {quiet:7.0f} ms {seen.worked:7.0f} ms {before:7.0f} MB", flush=True)
        for name, attack in attacks(server).items():
            if len(sys.argv) > 1 and not any(each in name for each in sys.argv[1:]):
                continue
            seen.reset()
            began = time.perf_counter()
            says = attack()
            took, worst, most = time.perf_counter() - began, max(worst, seen.stall), max(most, seen.worked)
            figures = f"{took:6.2f} s {seen.stall:7.0f} ms {seen.worked:7.0f} ms {seen.memory.value:7.0f} MB"
            print(f"{name:34} {figures}  {says}", flush=True)
        growth = resident(server) - before
    print(
        f"longest stall {worst:.0f} ms ({quiet:.0f} ms before), of which the event loop's thread worked {most:.0f} ms"
    )
    print(f"memory {growth:+.0f} MB in the end")
    return int(worst - quiet > STALL_MS or most > STALL_MS or growth > GROWTH_MB)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--turns"]:
        serve(sys.argv[2], sys.argv[3:])
    else:
        sys.exit(main())
