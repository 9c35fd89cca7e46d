"""Connections that wait neither for ever nor for headers without end."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from slipstream.serve.gate import HEADER_BYTES

HEADER_SECONDS = 10.0
"""The time in which the headers of a request have to arrive, once the connection stands or a part of them has come."""

TOO_LONG = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class Connection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's connection, which is closed if the headers of a request are too long or do not come in time.

    uvicorn itself has a time limit only for connections that send nothing after an answer.
    """

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
