"""Running the server: a socket, signals, and the exit code."""

import asyncio
import gc
import os
import socket
import sys
from threading import Timer
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from slipstream.serve.app import create_app
from slipstream.serve.gate import HEADER_BYTES, AccessLog
from slipstream.serve.sockets import say, url_of
from slipstream.serve.state import ServerState

HEADER_SECONDS = 10.0  # until the headers of a request have come, from its first byte or the connection on
TOO_LONG = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class Connection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's connection, which is closed if the headers of a request are too long or do not come in time.
    uvicorn itself has a time limit only for connections that send nothing after an answer."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._unread = 0
        self._timer: asyncio.TimerHandle | None = None
        self._expect()

    def data_received(self, data: bytes) -> None:
        """Read a part of a request; whatever comes before a request's headers are complete is counted."""
        before: Any = self.cycle
        answered, whole = (True, True) if before is None else (before.response_complete, not before.more_body)
        super().data_received(data)
        if self.cycle is not before:
            self._unread = 0
            self._forget()
            return
        if answered:
            self._expect()
        if whole:
            self._unread += len(data)
        if self._unread > 2 * HEADER_BYTES:  # with the marks between them; the gate refuses what is a little too long
            self.transport.write(TOO_LONG)
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def _expect(self) -> None:
        self._timer = self._timer or self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def _forget(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


GRACE = 0.8  # seconds in which a server ends after the second signal, whatever still runs
TURN = 1e-3  # seconds after which a thread that computes gives the interpreter to another one, as to the event loop
DIED, NOT_READY = 1, 130  # exit codes: the worker failed; ended by a signal before the models were ready


class Server(uvicorn.Server):
    """A server that drains on the first signal: it finishes what has begun; on the second signal it ends at once."""

    def __init__(self, state: ServerState, listener: socket.socket, log: AccessLog) -> None:
        how: dict[str, Any] = {"access_log": False, "server_header": False, "lifespan": "on", "ws": "none"}
        super().__init__(uvicorn.Config(create_app(state, log), http=Connection, log_config=None, **how))
        self.state, self.listener = state, listener
        state.worker.on_ready, state.worker.on_death = self._say_ready, self._end

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle Ctrl-C and SIGTERM: the first one drains, the second one ends, and so does one before it is ready."""
        if not (self.state.worker.ready or self.state.worker.failure):
            say("interrupted before the models were ready.")
            os._exit(NOT_READY)  # the thread that compiles and warms up cannot be stopped, only left behind
        if self.should_exit:
            self.force_exit = True
            self.state.worker.halt()
            last = Timer(GRACE, os._exit, [0])  # threads cannot be stopped, only left behind
            last.daemon = True
            last.start()
            return
        self.state.worker.drain()
        self.should_exit = True
        say("ending: what was begun is finished; once more to end at once.")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close everything. Where the end was forced, clients are told of their texts' end before."""
        await super().shutdown(sockets)
        if self.force_exit:
            if tasks := self.server_state.tasks:
                await asyncio.wait(tasks, timeout=GRACE / 2)
            await self.lifespan.shutdown()

    def run_to_end(self) -> int:
        sys.setswitchinterval(TURN)
        gc.collect()
        # A collection stops all threads, the longer the more there is to look at: the models need no look, and garbage
        # is taken away in small portions again, while commands begin with large ones.
        gc.freeze()
        gc.set_threshold(700)
        self.run(sockets=[self.listener])
        return DIED if self.state.worker.failure is not None else 0

    def _say_ready(self) -> None:
        if self.should_exit:  # the listener may be closed
            return
        properties = self.state.properties()
        draft = f" with the draft {properties.draft}" if properties.draft else " without a draft"
        say(f"{properties.target}{draft} is ready at {url_of(self.listener)}")

    def _end(self) -> None:
        failure = self.state.worker.failure
        say(f"the thread that runs the models has failed: {type(failure).__name__}: {failure}")
        self.should_exit = True
