"""Running the server: a socket, signals, and the exit code."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import sys
from threading import Timer
from types import FrameType
from typing import Any

import uvicorn

from slipstream.serve.app import create_app
from slipstream.serve.connections import Connection
from slipstream.serve.gate import AccessLog
from slipstream.serve.sockets import say
from slipstream.serve.state import ServerState

GRACE = 0.8
"""The seconds in which a server ends after the second signal, whatever still runs."""

TURN = 1e-3
"""The seconds after which a thread that computes gives the interpreter to another one, as to the event loop."""

DIED, NOT_READY = 1, 130
"""The exit codes of a server whose worker failed, and of one that a signal ended before its models were ready."""


class Server(uvicorn.Server):
    """A server that drains on the first signal: it finishes what has begun; on the second signal it ends at once."""

    def __init__(self, state: ServerState, listener: socket.socket, log: AccessLog) -> None:
        how: dict[str, Any] = {"log_config": None, "access_log": False, "server_header": False, "lifespan": "on"}
        super().__init__(uvicorn.Config(create_app(state, log), http=Connection, **how))
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
        """Serve until a signal comes or the worker dies -> the exit code."""
        sys.setswitchinterval(TURN)
        gc.collect()
        gc.freeze()  # a collection stops all threads, the longer the more there is to look at: the models need no look
        self.run(sockets=[self.listener])
        return DIED if self.state.worker.failure is not None else 0

    def _say_ready(self) -> None:
        if self.should_exit:  # the listener may be closed
            return
        properties = self.state.properties()
        draft = f" with the draft {properties.draft}" if properties.draft else " without a draft"
        say(f"{properties.target}{draft} is ready at {url(self.listener)}")

    def _end(self) -> None:
        failure = self.state.worker.failure
        say(f"the thread that runs the models has failed: {type(failure).__name__}: {failure}")
        self.should_exit = True


def url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
