"""Draft servers for tests: in the same thread, in another, lying, and behind a wire that spoils what it carries."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from slipstream.core.protocols import Drafter
from slipstream.drafters.remote.drafter import RemoteDrafter
from slipstream.drafters.remote.frames import HEAD, Frame, FrameType, VocabularySketch, decode_body, decode_head, encode
from slipstream.drafters.remote.link import DraftConnection, Missed, Settings
from slipstream.drafters.remote.messages import AskRow, DraftRow, OpenRow, draft_frame, read_ask
from slipstream.serve.drafts.rows import DraftRows
from slipstream.serve.drafts.server import DraftServer, DraftSettings

IDS = 2**31


def over_the_wire(frame: Frame) -> Frame:
    data = encode(frame)
    return decode_body(*decode_head(data[: HEAD.size])[:2], data[HEAD.size :])


class Here:
    """A link to a draft server without a wire or a thread; it goes as far ahead as it may after every answer."""

    generation = 1

    def __init__(self, drafter: Drafter) -> None:
        self.rows = DraftRows(drafter, 64)
        self.opened = list[OpenRow]()

    def ask(self, generation: int, frames: Sequence[Frame], sequence: int) -> Frame | Missed:
        self.tell(generation, frames[:-1])
        asks, ahead = read_ask(over_the_wire(frames[-1]), IDS)
        served = self.rows.commit(1, asks, ahead)
        self.rows.draft(served)
        answer = over_the_wire(draft_frame(sequence, [each.draft() for each in served]))
        while self.rows.go_ahead():
            pass
        return answer

    def tell(self, generation: int, frames: Sequence[Frame]) -> None:
        for frame in map(over_the_wire, frames):
            if frame.kind == FrameType.OPEN:
                self.opened.append(OpenRow.read(frame, IDS))
                self.rows.open(1, self.opened[-1])
            else:
                self.rows.close(1, frame.number("row"))

    def strike(self) -> None:
        pass


Policy = Callable[[list[int], AskRow], Sequence[int] | DraftRow | None]
"""The whole text of a row and what is asked for it -> what is sent; None: nothing in time."""


@dataclass
class Liar:
    """A link to a server that follows a policy of its own and remembers every text it was shown."""

    policy: Policy
    generation: int = 1
    texts: dict[int, list[int]] = field(default_factory=dict)

    def ask(self, generation: int, frames: Sequence[Frame], sequence: int) -> Frame | Missed:
        self.tell(generation, frames[:-1])
        sent = list[DraftRow]()
        for ask in read_ask(over_the_wire(frames[-1]), IDS)[0]:
            text = self.texts[ask.row] = [*self.texts[ask.row][: ask.keep], *ask.tail]
            said = self.policy(text, ask)
            if said is None:
                return Missed("late")
            sent.append(said if isinstance(said, DraftRow) else DraftRow(ask.row, tuple(said[: ask.gamma])))
        return over_the_wire(draft_frame(sequence, sent))

    def tell(self, generation: int, frames: Sequence[Frame]) -> None:
        for frame in map(over_the_wire, frames):
            if frame.kind == FrameType.OPEN:
                self.texts[frame.number("row")] = list(OpenRow.read(frame, IDS).text)

    def strike(self) -> None:
        pass


# ---- over sockets -----------------------------------------------------------------------------------------------


@contextmanager
def serving(drafter: Drafter, vocab: int, port: int = 0, tls: Any = None, **settings: Any) -> Iterator[int]:
    """A draft server in a thread -> its port."""
    listener = socket.create_server(("127.0.0.1", port))
    vocabulary = settings.pop("vocabulary", VocabularySketch(vocab))
    server = DraftServer(drafter, DraftSettings("toy", vocabulary, **settings), listener, tls)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.stop()
        thread.join(10)
        listener.close()
        assert not thread.is_alive(), "the server does not end"


@contextmanager
def connected(port: int, vocab: int, **settings: Any) -> Iterator[RemoteDrafter]:
    """A drafter that uses the server at a port."""
    connection_settings = Settings("127.0.0.1", port, **{"backoff": 0.02, "longest_backoff": 0.1, **settings})
    connection = DraftConnection(connection_settings, VocabularySketch(vocab))
    try:
        with suppress(ValueError):
            connection.first_word(5)
        yield RemoteDrafter(
            connection, vocab, connection_settings.trust, connection_settings.top, connection_settings.ahead
        )
    finally:
        connection.close()


Fault = Callable[["Wire", bytes], bytes | None]
"""Spoils one answer (head and body): what is passed on instead; None ends the connection afterwards."""


class Wire:
    """A relay in front of a draft server: client to server as it comes, server to client frame by frame, spoilt.

    `fault` is given every frame of one of the `kinds` (answers). `spoilt` counts them, `kept` is for faults that hold
    something back.
    """

    def __init__(self, port: int, fault: Fault, kinds: Sequence[FrameType] = (FrameType.DRAFT,)) -> None:
        self.upstream, self.fault, self.kinds = port, fault, kinds
        self.spoilt, self.kept = 0, list[bytes]()
        self.ended = threading.Event()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(0.02)
        self.port = self.listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *failure: object) -> None:
        self.ended.set()
        for thread in self._threads:
            thread.join(10)
        self.listener.close()

    def _accept(self) -> None:
        while not self.ended.is_set():
            try:
                client, _ = self.listener.accept()
            except TimeoutError:
                continue
            thread = threading.Thread(target=self._relay, args=(client,))
            self._threads.append(thread)
            thread.start()

    def _relay(self, client: socket.socket) -> None:
        with client, socket.create_connection(("127.0.0.1", self.upstream)) as server:
            up = threading.Thread(target=self._up, args=(client, server))
            up.start()
            with suppress(OSError, EOFError):
                self._down(client, server)
            for each in (client, server):
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
            up.join(10)

    def _up(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while data := client.recv(1 << 16):
                server.sendall(data)
            server.shutdown(socket.SHUT_WR)

    def _down(self, client: socket.socket, server: socket.socket) -> None:
        server.settimeout(0.05)
        while not self.ended.is_set():
            head = self._exactly(server, HEAD.size)
            data = head + self._exactly(server, HEAD.unpack(head)[-1])
            if FrameType(HEAD.unpack(head)[2]) not in self.kinds:
                client.sendall(data)
                continue
            self.spoilt += 1
            spoilt = self.fault(self, data)
            if spoilt is None:
                return
            client.sendall(spoilt)

    def _exactly(self, server: socket.socket, count: int) -> bytes:
        data = b""
        while len(data) < count:
            with suppress(TimeoutError):
                if not (more := server.recv(count - len(data))):
                    raise EOFError
                data += more
            if self.ended.is_set():
                raise EOFError
        return data


def changed(data: bytes, change: Callable[[Frame], Frame]) -> bytes:
    frame = decode_body(*decode_head(data[: HEAD.size])[:2], data[HEAD.size :])
    return encode(change(frame))


def each_draft(data: bytes, change: Callable[[dict[str, Any]], dict[str, Any]]) -> bytes:
    """The answer with some fields of every draft changed."""

    def spoil(frame: Frame) -> Frame:
        return replace(frame, values={"drafts": [{**each, **change(each)} for each in frame.values["drafts"]]})

    return changed(data, spoil)
