"""The client's connection: one thread with an event loop that connects, sends, receives, and connects again.

The thread that decodes hands frames over and waits for an answer no longer than it is told; it never touches a socket.
What comes too late has another sequence number than the one that is waited for, and is thrown away. Whatever is wrong
with a server, dead, silent, babbling, ends in `Missed` with a reason and in an attempt to connect again, later and
later: it costs drafts and nothing else.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Protocol
from weakref import finalize

from slipstream.drafters.remote.address import Settings
from slipstream.drafters.remote.frames import HEAD, LARGEST, Frame, FrameError, Kind, decode_body, decode_head, encode
from slipstream.drafters.remote.hello import Refused, Vocabulary, check_fit, nonce, proven, vouch

LATE, REFUSED, DISCONNECTED = "late", "refused", "disconnected"
"""Why a round has no draft: no answer in time, an answer that cannot be used, nobody to ask."""

SHORTEST = 0.001
"""Seconds that a round waits at least, after however many late answers."""


@dataclass(frozen=True)
class Missed:
    """No draft in this round, and why."""

    reason: str


class Link(Protocol):
    """How frames reach a server."""

    @property
    def generation(self) -> int:
        """The number of the present connection, whose server knows nothing of earlier ones; 0: there is none."""
        ...

    def ask(self, generation: int, frames: Sequence[Frame], sequence: int) -> Frame | Missed:
        """Send frames and wait for the answer to the last one, which has this sequence number."""
        ...

    def tell(self, generation: int, frames: Sequence[Frame]) -> None:
        """Send frames that have no answer."""
        ...

    def strike(self) -> None:
        """Say that an answer could not be used: after a few in a row the connection is given up."""
        ...


GREETING = 1 << 17
"""Bytes of the longest frame of somebody who has not shown the key yet: a vocabulary's sketch."""


async def read_frame(reader: asyncio.StreamReader, most: int = LARGEST) -> Frame:
    """The next frame of a stream, of at most so many bytes. Raises FrameError for what is none, IncompleteReadError at
    the end."""
    kind, sequence, length = decode_head(await reader.readexactly(HEAD.size))
    if length > most:
        raise FrameError(f"a frame of {length} bytes is too large here: {most} are allowed")
    return decode_body(kind, sequence, await reader.readexactly(length))


@dataclass
class _State:
    """What both threads look at, under one lock."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    generation: int = 0
    connections: int = 0
    expected: int = -1
    answer: Future[Frame | Missed] | None = None
    asked_at: float | None = None  # of the oldest question that nothing was heard after
    asked: dict[int, float] = field(default_factory=dict)  # the last questions by their numbers, and when
    patience: float = 1.0
    strikes: int = 0
    peer: str = ""
    fault: str = ""
    told: threading.Event = field(default_factory=threading.Event)  # something is known of the server

    def settle(self, answer: Frame | Missed) -> None:
        """Give the one who waits what came."""
        if self.answer is not None:
            with suppress(InvalidStateError):
                self.answer.set_result(answer)


REMEMBERED = 64
"""Questions whose answers are still recognised, however late they are."""

STRIKES = 3
"""Answers in a row that cannot be used, after which the connection is given up."""


class Connection:
    """A `Link` over TCP or TLS. It begins to connect when it is made, and goes on in the background until `close`."""

    def __init__(self, settings: Settings, vocabulary: Vocabulary) -> None:
        self._state, self.settings = _State(patience=settings.timeout), settings
        self._loop = asyncio.new_event_loop()
        task = _Task(settings, vocabulary, self._state)
        self._task = task
        self._thread = threading.Thread(target=_run, args=(self._loop, task), name="slipstream draft", daemon=True)
        self._thread.start()
        self._end = finalize(self, _stop, self._loop, task, self._thread)

    @property
    def generation(self) -> int:
        """See `Link`."""
        return self._state.generation

    @property
    def peer(self) -> str:
        """What the server says that it drafts with; empty before the first connection."""
        return self._state.peer

    def first_word(self, seconds: float) -> str:
        """Wait until the server has answered or failed for the first time -> what is wrong, or nothing.

        Raises Refused if it answered that the two cannot work together.
        """
        self._state.told.wait(seconds)
        if self._task.refusal:
            raise Refused(self._task.refusal)
        return "" if self.generation else self._state.fault or "no answer"

    def ask(self, generation: int, frames: Sequence[Frame], sequence: int) -> Frame | Missed:
        """See `Link`. After a late answer it waits for half as long, until an answer took less than the timeout, even
        if nobody waited for it any more: a server that is always too slow costs little."""
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
        """See `Link`."""
        if frames and generation == self.generation:
            self._send(generation, frames)

    def strike(self) -> None:
        """See `Link`."""
        self._state.strikes += 1
        if self._state.strikes >= STRIKES:
            self._state.strikes = 0
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._task.drop)

    def close(self) -> None:
        """End the connection and its thread; every later round is `disconnected`."""
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
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(task.end)
    if thread is not threading.current_thread():
        thread.join(2)


class _Task:
    """The life of a connection, in its event loop."""

    def __init__(self, settings: Settings, vocabulary: Vocabulary, state: _State) -> None:
        self.settings, self.vocabulary, self.state = settings, vocabulary, state
        self.refusal = ""
        self._writer: asyncio.StreamWriter | None = None
        self._ended = asyncio.Event()

    async def run(self) -> None:
        """Connect, listen, and connect again, until `end`."""
        backoff = self.settings.backoff
        while not self._ended.is_set():
            try:
                await self._serve()
            except Refused as error:
                self.refusal, backoff = str(error), self.settings.longest_backoff
            except (OSError, EOFError, FrameError, TimeoutError, ssl.SSLError) as error:
                self.state.fault = _why(error)
            if self._lost():
                backoff = self.settings.backoff
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), backoff)
            backoff = min(2 * backoff, self.settings.longest_backoff)

    def end(self) -> None:
        """Leave."""
        self._ended.set()
        self.drop()

    def drop(self) -> None:
        """Give the present connection up."""
        if self._writer is not None:
            self._writer.transport.abort()

    def write(self, generation: int, data: bytes) -> None:
        """Send what belongs to this connection, not to an earlier one."""
        if self._writer is not None and generation == self.state.generation:
            self._writer.write(data)

    async def _serve(self) -> None:
        """One connection, from its first word to its last."""
        settings = self.settings
        context = ssl.create_default_context(cafile=settings.ca_file) if settings.tls else None
        connecting = asyncio.open_connection(settings.host, settings.port, ssl=context)
        reader, writer = await asyncio.wait_for(connecting, settings.quiet)
        self._writer = writer
        try:
            if (plain := writer.get_extra_info("socket")) is not None:
                plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer = await asyncio.wait_for(self._greet(reader, writer), settings.quiet)
            self.refusal = ""
            with self.state.lock:
                self.state.connections += 1
                self.state.generation, self.state.peer = self.state.connections, peer
                self.state.patience, self.state.asked_at, self.state.strikes = settings.timeout, None, 0
                self.state.asked.clear()
            self.state.told.set()
            await self._listen(reader, writer)
        finally:
            self._writer = None
            writer.transport.abort()
            with suppress(OSError, ssl.SSLError, TimeoutError):
                await asyncio.wait_for(writer.wait_closed(), 1)

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        """The first words of both sides -> what the server drafts with. Raises Refused if they do not go together, or
        if this is no draft server of our version."""
        try:
            return await self._greeted(reader, writer)
        except FrameError as error:
            raise Refused(str(error)) from None

    async def _greeted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        hello = await read_frame(reader, GREETING)
        nonces = [hello.text("nonce", 64), nonce()]
        writer.write(encode(vouch(Kind.PROOF, self.settings.key, "client", nonces, self.vocabulary)))
        welcome = await read_frame(reader, GREETING)
        if welcome.kind == Kind.REFUSAL:
            raise Refused(welcome.text("reason"))
        if hello.kind != Kind.HELLO or welcome.kind != Kind.WELCOME:
            raise FrameError("the server began with something else than a greeting")
        check_fit(self.vocabulary, proven(welcome, self.settings.key, "server", nonces))
        return welcome.text("name")

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take answers until nothing is heard for too long; a word now and then keeps the connection."""
        state, quiet = self.state, self.settings.quiet
        last, reading = monotonic(), asyncio.ensure_future(read_frame(reader))
        try:
            while not self._ended.is_set():
                done, _ = await asyncio.wait([reading], timeout=quiet / 4)
                if not done:
                    waited = 0 if state.asked_at is None else monotonic() - state.asked_at
                    if monotonic() - last > quiet or waited > 3 * quiet:
                        raise FrameError("the server has not said anything for too long")
                    writer.write(encode(Frame(Kind.PING)))
                    continue
                frame, last = reading.result(), monotonic()
                self._take(frame)
                reading = asyncio.ensure_future(read_frame(reader))
        finally:
            reading.cancel()
            with suppress(asyncio.CancelledError, OSError, EOFError, FrameError):
                await reading

    def _take(self, frame: Frame) -> None:
        """Hand an answer to the one who waits for it, if it is still waited for."""
        if frame.kind not in (Kind.DRAFT, Kind.REFUSAL, Kind.PONG):
            raise FrameError(f"a server does not send {frame.kind.name}")
        with self.state.lock:
            if frame.kind == Kind.PONG:
                return
            if (asked := self.state.asked.pop(frame.sequence, None)) is None:
                return  # nobody asked that
            self.state.asked_at = None
            if monotonic() - asked <= self.settings.timeout:
                self.state.patience = self.settings.timeout
            if frame.sequence == self.state.expected:
                self.state.settle(frame)

    def _lost(self) -> bool:
        """Tell the one who waits that nobody is there -> whether there was a connection."""
        with self.state.lock:
            was, self.state.generation = bool(self.state.generation), 0
            self.state.settle(Missed(REFUSED if self.refusal else DISCONNECTED))
        self.state.told.set()
        return was


def _why(error: Exception) -> str:
    if isinstance(error, asyncio.IncompleteReadError):
        return "the connection ended in the middle of a frame" if error.partial else "the server closed the connection"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
