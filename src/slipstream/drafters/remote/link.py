"""The client's connection: one thread with an event loop that connects, sends, receives, and reconnects.

The decoding thread passes frames to it and waits for an answer no longer than the timeout; it never uses a socket. A
late answer has another sequence number than the expected one, and is discarded. Any failure of a server (dead, silent,
or sending invalid data) gives `Missed` with a reason, and attempts to reconnect at growing intervals; it costs drafts
and nothing else.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import socket
import ssl
import threading
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from urllib.parse import urlsplit
from weakref import finalize

from slipstream.core.values import is_finite
from slipstream.drafters.remote.frames import (
    HEAD,
    LARGEST,
    Frame,
    FrameError,
    FrameType,
    Refused,
    VocabularySketch,
    check_fit,
    decode_body,
    decode_head,
    encode,
    proven,
    vouch,
)
from slipstream.drafters.remote.messages import MOST_CANDIDATES


@dataclass(frozen=True)
class Settings:
    """The address of a draft server, and how it is used.

    `timeout`: the seconds that a round waits for an answer. `trust`: use the law q that the server reports; without
    it, the server's tokens are guesses. `top`: the number of most probable tokens sent of a law. `ahead`: let the
    server draft the next round while the target verifies. `quiet`: the seconds without any message after which the
    connection is closed. `backoff`: the seconds before the first attempt to reconnect, doubled each time up to
    `longest_backoff`. Raises ValueError for impossible values.
    """

    host: str
    port: int
    tls: bool = False
    key: bytes = b""
    ca_file: str | None = None
    timeout: float = 1.0
    trust: bool = False
    top: int = 64
    ahead: bool = True
    quiet: float = 10.0
    backoff: float = 0.1
    longest_backoff: float = 5.0

    def __post_init__(self) -> None:
        if not (is_finite(self.timeout) and 0 < self.timeout <= 600):
            raise ValueError(
                f"timeout-ms={1000 * self.timeout:g} is not possible: write milliseconds above 0, at most 600000."
            )
        if not 1 <= self.top <= MOST_CANDIDATES:
            raise ValueError(f"top={self.top} is not possible: 1 to {MOST_CANDIDATES} candidates can travel.")
        assert min(self.quiet, self.backoff, self.longest_backoff) > 0 and not math.isnan(self.quiet)

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'tls' if self.tls else 'tcp'}://{host}:{self.port}"


def split_address(kind: str, value: str) -> tuple[str, int]:
    try:
        parts = urlsplit(f"{kind}:{value}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or not port or not value.startswith("//") or parts.path or parts.username:
        raise ValueError(f"draft '{kind}:{value}' is impossible: write {kind}://HOST:PORT, as {kind}://10.0.0.2:8100.")
    return host, port


LATE, REFUSED, DISCONNECTED = "late", "refused", "disconnected"
"""The reasons why a round has no draft: no answer in time, an unusable answer, or no connection."""

SHORTEST = 0.001  # the shortest time, in seconds, that a round waits for an answer after many late ones


@dataclass(frozen=True)
class Missed:
    """The result of a request without a usable answer, with the reason."""

    reason: str


GREETING = 1 << 17  # the size of the longest frame, in bytes, before the key is proven: it holds a vocabulary's sketch


async def read_frame(reader: asyncio.StreamReader, most: int = LARGEST) -> Frame:
    """Read the next frame of a stream, with a body of at most `most` bytes."""
    kind, sequence, length = decode_head(await reader.readexactly(HEAD.size))
    if length > most:
        raise FrameError(f"a frame of {length} bytes is too large here: {most} are allowed")
    return decode_body(kind, sequence, await reader.readexactly(length))


@dataclass
class _LinkState:
    """The state that both threads share, under one lock."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    generation: int = 0
    connections: int = 0
    expected: int = -1
    answer: Future[Frame | Missed] | None = None
    asked_at: float | None = None  # the time of the oldest request since the last answer
    asked: dict[int, float] = field(default_factory=dict)  # the times of the latest requests by sequence number
    patience: float = 1.0
    strikes: int = 0
    peer: str = ""
    fault: str = ""
    settled: threading.Event = field(default_factory=threading.Event)  # the first connection succeeded or failed

    def settle(self, answer: Frame | Missed) -> None:
        if self.answer is not None:
            with suppress(InvalidStateError):
                self.answer.set_result(answer)


REMEMBERED = 64  # the number of latest requests whose answers are recognised, however late they are
STRIKES = 3  # the number of unusable answers on a connection after which it is closed


class DraftConnection:
    """A connection over TCP or TLS: a background thread connects, and reconnects, from creation until `close`."""

    def __init__(self, settings: Settings, vocabulary: VocabularySketch) -> None:
        self._state, self.settings = _LinkState(patience=settings.timeout), settings
        self._loop = asyncio.new_event_loop()
        task = _Task(settings, vocabulary, self._state)
        self._task = task
        self._thread = threading.Thread(target=_run, args=(self._loop, task), name="slipstream draft", daemon=True)
        self._thread.start()
        self._end = finalize(self, _stop, self._loop, task, self._thread)

    @property
    def generation(self) -> int:
        """The number of the present connection; 0: there is none. A new one shares no state with earlier ones."""
        return self._state.generation

    @property
    def peer(self) -> str:
        """The name of the server's draft, as the server gives it; empty before the first connection."""
        return self._state.peer

    def first_word(self, seconds: float) -> str:
        """Wait at most `seconds` for the first connection or failure -> what is wrong, or ""."""
        self._state.settled.wait(seconds)
        if self._task.refusal:
            raise Refused(self._task.refusal)
        return "" if self.generation else self._state.fault or "no answer"

    def ask(self, generation: int, frames: Sequence[Frame], sequence: int) -> Frame | Missed:
        """Send frames and wait for the answer to the last one, which has this sequence number.

        After a late answer the waiting time is halved, until an answer (even one that came too late to be used) has
        taken less than the timeout: so a server that is always too slow costs little time.
        """
        state, waiting = self._state, Future[Frame | Missed]()
        with state.lock:
            if not generation or generation != state.generation:
                return Missed(DISCONNECTED)
            state.expected, state.answer, patience = sequence, waiting, state.patience
            state.asked[sequence] = monotonic()
            state.asked_at = state.asked_at or state.asked[sequence]
            if len(state.asked) > REMEMBERED:
                del state.asked[min(state.asked)]
        if not self._send(generation, frames):
            return Missed(DISCONNECTED)
        try:
            answer = waiting.result(patience)
        except TimeoutError:
            answer = Missed(LATE)
        with state.lock:
            state.answer = None
            if answer == Missed(LATE):
                state.patience = max(SHORTEST, state.patience / 2)
        return answer

    def tell(self, generation: int, frames: Sequence[Frame]) -> None:
        if frames and generation == self.generation:
            self._send(generation, frames)

    def strike(self) -> None:
        """Report an unusable answer; after `STRIKES` of them the connection is closed."""
        self._state.strikes += 1
        if self._state.strikes >= STRIKES:
            self._state.strikes = 0
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._task.drop)

    def close(self) -> None:
        """Close the connection and end its thread; every later request gives `DISCONNECTED`."""
        self._end()

    def _send(self, generation: int, frames: Sequence[Frame]) -> bool:
        try:
            data = b"".join(map(encode, frames))
            self._loop.call_soon_threadsafe(self._task.write, generation, data)
        except (FrameError, RuntimeError):  # a text that is too long; a loop that has ended
            return False
        return True


def _run(loop: asyncio.AbstractEventLoop, task: _Task) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_until_complete(task.run())
    finally:
        loop.close()


def _stop(loop: asyncio.AbstractEventLoop, task: _Task, thread: threading.Thread) -> None:
    """End the task and wait for its thread; runs when a connection is closed or garbage collected."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(task.end)
    if thread is not threading.current_thread():
        thread.join(2)


class _Task:
    """The task in the event loop that connects, receives frames, and reconnects."""

    def __init__(self, settings: Settings, vocabulary: VocabularySketch, state: _LinkState) -> None:
        self.settings, self.vocabulary, self.state = settings, vocabulary, state
        self.refusal = ""
        self._writer: asyncio.StreamWriter | None = None
        self._ended = asyncio.Event()

    async def run(self) -> None:
        backoff = self.settings.backoff
        while not self._ended.is_set():
            try:
                await self._serve()
            except Refused as error:
                self.refusal, backoff = str(error), self.settings.longest_backoff
            except (OSError, EOFError, FrameError, TimeoutError, ssl.SSLError) as error:
                self.state.fault = _why(error)
            with self.state.lock:
                if self.state.generation:  # there was a connection
                    backoff = self.settings.backoff
                self.state.generation = 0
                self.state.settle(Missed(REFUSED if self.refusal else DISCONNECTED))
            self.state.settled.set()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), backoff)
            backoff = min(2 * backoff, self.settings.longest_backoff)

    def end(self) -> None:
        self._ended.set()
        self.drop()

    def drop(self) -> None:
        if self._writer is not None:
            self._writer.transport.abort()

    def write(self, generation: int, data: bytes) -> None:
        if self._writer is not None and generation == self.state.generation:
            self._writer.write(data)

    async def _serve(self) -> None:
        settings = self.settings
        context = ssl.create_default_context(cafile=settings.ca_file) if settings.tls else None
        connecting = asyncio.open_connection(settings.host, settings.port, ssl=context)
        reader, writer = await asyncio.wait_for(connecting, settings.quiet)
        self._writer = writer
        try:
            if (plain := writer.get_extra_info("socket")) is not None:
                plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                peer = await asyncio.wait_for(self._greet(reader, writer), settings.quiet)
            except FrameError as error:  # it is no draft server, or one of another version
                raise Refused(str(error)) from None
            self.refusal = ""
            with self.state.lock:
                self.state.connections += 1
                self.state.generation, self.state.peer = self.state.connections, peer
                self.state.patience, self.state.asked_at, self.state.strikes = settings.timeout, None, 0
                self.state.asked.clear()
            self.state.settled.set()
            await self._listen(reader, writer)
        finally:
            self._writer = None
            writer.transport.abort()
            with suppress(OSError, ssl.SSLError, TimeoutError):
                await asyncio.wait_for(writer.wait_closed(), 1)

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        hello = await read_frame(reader, GREETING)
        nonces = [hello.text("nonce"), secrets.token_hex(16)]
        writer.write(encode(vouch(FrameType.PROOF, self.settings.key, "client", nonces, self.vocabulary)))
        welcome = await read_frame(reader, GREETING)
        if welcome.kind == FrameType.REFUSAL:
            raise Refused(welcome.text("reason"))
        if hello.kind != FrameType.HELLO or welcome.kind != FrameType.WELCOME:
            raise FrameError("the server began with something else than a greeting")
        check_fit(self.vocabulary, proven(welcome, self.settings.key, "server", nonces))
        return welcome.text("name")

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Receive answers, and send pings while idle; raises FrameError if nothing arrives for too long."""
        state, quiet = self.state, self.settings.quiet
        last, reading = monotonic(), asyncio.ensure_future(read_frame(reader))
        try:
            while not self._ended.is_set():
                done, _ = await asyncio.wait([reading], timeout=quiet / 4)
                if not done:
                    waited = 0 if state.asked_at is None else monotonic() - state.asked_at
                    if monotonic() - last > quiet or waited > 3 * quiet:
                        raise FrameError("the server has not said anything for too long")
                    writer.write(encode(Frame(FrameType.PING)))
                    continue
                frame, last = reading.result(), monotonic()
                self._take(frame)
                reading = asyncio.ensure_future(read_frame(reader))
        finally:
            reading.cancel()
            with suppress(asyncio.CancelledError, OSError, EOFError, FrameError):
                await reading

    def _take(self, frame: Frame) -> None:
        """Process a frame of the server: pass an answer to the waiting thread, if it is the expected one."""
        if frame.kind == FrameType.PONG:
            return
        if frame.kind not in (FrameType.DRAFT, FrameType.REFUSAL):
            raise FrameError(f"a server does not send {frame.kind.name}")
        with self.state.lock:
            if (sent_at := self.state.asked.pop(frame.sequence, None)) is None:
                return  # there was no such request
            self.state.asked_at = None
            if monotonic() - sent_at <= self.settings.timeout:
                self.state.patience = self.settings.timeout
            if frame.sequence == self.state.expected:
                self.state.settle(frame)


def _why(error: Exception) -> str:
    if isinstance(error, asyncio.IncompleteReadError):
        return "the connection ended in the middle of a frame" if error.partial else "the server closed the connection"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
