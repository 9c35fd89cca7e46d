"""The draft server: sockets in one thread with an event loop, the drafter in another, and frames between them."""

import asyncio
import itertools
import queue
import secrets
import socket
import ssl
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from slipstream.core.protocols import Drafter
from slipstream.drafters.build_context import BuildContext
from slipstream.drafters.model import ModelDrafter
from slipstream.drafters.ngram import NgramModel
from slipstream.drafters.remote.frames import (
    Frame,
    FrameError,
    FrameType,
    Refused,
    VocabularySketch,
    encode,
    proven,
    vouch,
)
from slipstream.drafters.remote.link import GREETING, read_frame
from slipstream.drafters.remote.messages import OpenRow, draft_frame, read_ask
from slipstream.drafters.specification import DrafterTerm, Syntax, drafter, parse
from slipstream.execution.passes import Mode
from slipstream.kernels.threads import release_threads
from slipstream.models.loading.load import find_tokenizer, load_scorer, load_tokenizer
from slipstream.models.loading.pairings import EMBEDDED
from slipstream.serve.drafts.rows import DraftRows, Served
from slipstream.serve.sockets import say


def build(
    draft: str, dtype: Any = "auto", device: str | None = None, compile: bool = False, tokenizer: str | None = None
) -> tuple[Drafter, VocabularySketch]:
    """Build the drafter of a specification -> the drafter, and the vocabulary of its tokens; `tokenizer` is a name.
    Raises ValueError for a draft that cannot be parsed or loaded, or that needs a target."""
    syntax = parse(draft)
    parts = list(_parts(syntax))
    if any(part.kind in ("tcp", "tls") for part in parts):
        raise ValueError("a draft server cannot pass on another one: name that one to the clients.")
    if any("draft_vocab" in dict(part.options) for part in parts):
        raise ValueError("a draft server does not know the target whose tokens draft_vocab counts: leave it out.")
    models = [EMBEDDED / "draft" if part.kind == "embedded" else part.value for part in parts if part.kind in NAMED]
    reader = load_tokenizer(tokenizer) if tokenizer else find_tokenizer(models[-1]) if models else None
    if isinstance(syntax, DrafterTerm) and syntax.kind in NAMED and {*dict(syntax.options)} <= {"dtype", "device"}:
        options = dict(syntax.options)
        place = (options.get("dtype", dtype), options.get("device", device))
        scorer = load_scorer(models[0], *place, Mode(compile))  # perhaps an encoder-decoder
        size = scorer.vocab if reader is None else min(scorer.vocab, _size(reader))  # without ids for padding
        return ModelDrafter(scorer, size), VocabularySketch.of(size, reader)
    sizes = [NgramModel.load(part.value).vocab for part in parts if part.kind == "ngram"]
    if reader is None and not sizes:
        raise ValueError(f"the tokenizer of {draft!r} is unknown: name that of the clients, --tokenizer NAME.")
    size = sizes[0] if sizes else _size(reader)
    # Of the clients' targets only the size of their vocabulary is known.
    target: Any = SimpleNamespace(vocab=size, name="the clients' target", source_form=None)
    context = BuildContext(target, reader, dtype, device, mode=Mode(compile))
    return drafter(draft, context), VocabularySketch.of(size, reader)


NAMED = ("model", "embedded")


def _size(tokenizer: Any) -> int:
    return max(tokenizer.get_vocab().values()) + 1


def _parts(syntax: Syntax) -> Iterator[DrafterTerm]:
    if isinstance(syntax, DrafterTerm):
        yield syntax
        return
    for each in (*getattr(syntax, "among", ()), *getattr(syntax, "parts", ())):
        yield from _parts(each)


@dataclass(frozen=True)
class DraftSettings:
    """The settings of a draft server.

    `name` is that of the draft; clients must have `key` (empty: no key). At most `most_rows` rows of all clients are
    served. A client that sends nothing for `quiet` seconds is disconnected, and so is one that leaves more than
    `unsent` bytes of answers unread.
    """

    name: str
    vocabulary: VocabularySketch
    key: bytes = b""
    most_rows: int = 64
    most_clients: int = 64
    quiet: float = 60.0
    unsent: int = 64 << 20


MOST_LETTERS = 4096  # greatest number of queued letters of all clients; a client that sends one more is refused


@dataclass(frozen=True)
class Letter:
    """A frame from a client; None in its place means that the client has disconnected."""

    client: int
    frame: Frame | None

    @property
    def asks(self) -> bool:
        return self.frame is not None and self.frame.kind == FrameType.PROPOSE


class Desk:
    """The thread that owns the drafter: it serves all queued letters together, and drafts ahead in between."""

    def __init__(self, drafter: Drafter, settings: DraftSettings) -> None:
        self.rows, self.settings = DraftRows(drafter, settings.most_rows), settings
        self.letters: queue.SimpleQueue[Letter | None] = queue.SimpleQueue()
        self.clients: dict[int, Client] = {}
        self._thread = threading.Thread(target=self._run, name="slipstream drafts", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.letters.put(None)
        self._thread.join(10)

    def _run(self) -> None:
        try:
            while True:
                while self.letters.empty() and self._ahead():
                    pass
                letters = [self.letters.get()]
                with suppress(queue.Empty):
                    while True:
                        letters.append(self.letters.get_nowait())
                if None in letters:
                    return
                self.serve([letter for letter in letters if letter])
        finally:
            release_threads()

    def _ahead(self) -> bool:
        try:
            return self.rows.go_ahead()
        except Exception as error:  # models may raise any error; clients then open their rows again
            self._fail(error)
            return False

    def serve(self, letters: Sequence[Letter]) -> None:
        """Process letters in order, draft for all requests in one batch, and answer.
        Of several requests of one client, only the last is answered."""
        last = {letter.client: place for place, letter in enumerate(letters) if letter.asks}
        asking = list[tuple[Letter, list[Served]]]()
        for place, letter in enumerate(letters):
            try:
                served = self._read(letter)
                if letter.asks and last[letter.client] == place:
                    asking.append((letter, served))
            except FrameError as error:
                self._refuse(letter, str(error))
            except Exception as error:
                self._fail(error)
                self._refuse(letter, "the draft failed")
        try:
            self.rows.draft([each for _, served in asking for each in served])
        except Exception as error:
            self._fail(error)
            for letter, _ in asking:
                self._refuse(letter, "the draft failed")
            return
        for letter, served in asking:
            assert letter.frame is not None
            self._send(letter.client, draft_frame(letter.frame.sequence, [each.draft() for each in served]))

    def _read(self, letter: Letter) -> list[Served]:
        frame, client = letter.frame, letter.client
        if frame is None:
            self.rows.reset(client)
        elif frame.kind == FrameType.OPEN:
            self.rows.open(client, OpenRow.read(frame, 2**31))  # texts may have ids beyond the draft's vocabulary
        elif frame.kind == FrameType.CLOSE:
            self.rows.close(client, frame.number("row", 0, 2**31))
        elif frame.kind == FrameType.PROPOSE:
            asks, ahead = read_ask(frame, 2**31)
            return self.rows.commit(client, asks, ahead)
        else:
            raise FrameError(f"a client does not send {frame.kind.name}")
        return []

    def _refuse(self, letter: Letter, reason: str) -> None:
        if letter.frame is not None:
            self._send(letter.client, Frame(FrameType.REFUSAL, letter.frame.sequence, {"reason": reason[:1000]}))

    def _fail(self, error: Exception) -> None:
        say(f"drafting failed, all rows are forgotten: {type(error).__name__}: {error}")
        self.rows.reset()

    def _send(self, client: int, frame: Frame) -> None:
        if (receiver := self.clients.get(client)) is not None:
            receiver.send(frame)


@dataclass(frozen=True)
class Client:
    """The connection of a client, over which answers are sent in its event loop."""

    writer: asyncio.StreamWriter
    loop: asyncio.AbstractEventLoop
    unsent: int

    def send(self, frame: Frame) -> None:
        """Send a frame; may be called from any thread."""
        data, transport = encode(frame), self.writer.transport

        def write() -> None:
            if transport.get_write_buffer_size() > self.unsent:  # a client that sends requests and reads no answers
                transport.abort()
            elif not transport.is_closing():
                self.writer.write(data)

        with suppress(RuntimeError):  # the loop has ended
            self.loop.call_soon_threadsafe(write)


class DraftServer:
    """Listens at a socket and serves a drafter until `stop`; `run` blocks its thread."""

    def __init__(
        self, drafter: Drafter, settings: DraftSettings, listener: socket.socket, tls: ssl.SSLContext | None = None
    ) -> None:
        self.settings, self.listener, self.tls = settings, listener, tls
        self.desk = Desk(drafter, settings)
        self._numbers, self._loop = itertools.count(1), asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._talks = dict[asyncio.Task[None], asyncio.StreamWriter]()

    def run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()
            self.desk.close()

    def stop(self) -> None:
        """End the server; may be called from any thread or a signal handler."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._stopping.set)

    async def _serve(self) -> None:
        def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = self._loop.create_task(self._talk(reader, writer))
            self._talks[task] = writer
            task.add_done_callback(self._talks.pop)

        server = await asyncio.start_server(meet, sock=self.listener, ssl=self.tls)
        await self._stopping.wait()
        # asyncio leaves sockets open that it has accepted, but not yet begun to serve, when the server is closed.
        with suppress(NotImplementedError):  # Windows' event loop accepts in another way
            self._loop.remove_reader(self.listener)
        await asyncio.sleep(0)
        server.close()
        # A task that accepts may still begin a talk, so this goes on until the loop has nothing left to drop.
        while rest := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in rest:
                if (writer := self._talks.get(task)) is not None:
                    writer.transport.abort()  # a cancelled talk would leave its transport open
                else:
                    task.cancel()
            await asyncio.wait(rest, timeout=0.1)

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = next(self._numbers)
        try:
            if len(self._talks) > self.settings.most_clients:
                raise Refused(f"this draft server has {self.settings.most_clients} clients already")
            if (plain := writer.get_extra_info("socket")) is not None:
                plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            async with asyncio.timeout(min(10.0, self.settings.quiet)):
                await self._greet(reader, writer)
            self.desk.clients[client] = Client(writer, asyncio.get_running_loop(), self.settings.unsent)
            while True:
                async with asyncio.timeout(self.settings.quiet):
                    frame = await read_frame(reader)
                if frame.kind == FrameType.PING:
                    writer.write(encode(Frame(FrameType.PONG, frame.sequence)))
                else:
                    if self.desk.letters.qsize() >= MOST_LETTERS:
                        raise Refused("this draft server has more to do than it can remember")
                    self.desk.letters.put(Letter(client, frame))
        except (Refused, FrameError) as error:
            with suppress(OSError, RuntimeError):
                writer.write(encode(Frame(FrameType.REFUSAL, 0, {"reason": str(error)[:1000]})))
                async with asyncio.timeout(1):
                    await writer.drain()
        except (OSError, EOFError, TimeoutError):
            pass  # the client has disconnected or was silent for too long, or the server ends
        finally:
            self.desk.clients.pop(client, None)
            self.desk.letters.put(Letter(client, None))
            with suppress(OSError, RuntimeError):
                writer.close()
                async with asyncio.timeout(1):
                    await writer.wait_closed()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ours, key = self.settings.vocabulary, self.settings.key
        hello = secrets.token_hex(16)
        writer.write(encode(Frame(FrameType.HELLO, 0, {"nonce": hello})))
        answer = await read_frame(reader, GREETING)
        if answer.kind != FrameType.PROOF:
            raise FrameError("a client begins with a proof that it has the key")
        nonces = [hello, answer.text("nonce")]
        proven(answer, key, "client", nonces)
        welcome = vouch(FrameType.WELCOME, key, "server", nonces, ours)
        writer.write(encode(replace(welcome, values={**welcome.values, "name": self.settings.name[:200]})))


def tls_context(cert: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ValueError(f"{cert} and {key} are no certificate and its key in PEM form: {why}.") from None
    return context
