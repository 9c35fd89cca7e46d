"""Processes that run one model together, as torchrun starts them: rank 0 leads, and the others follow its messages.

The model's own tensors go through torch.distributed (NCCL between GPUs, gloo between processors). Rank 0 sends its
decisions through a connection of its own to each of the others, so that a rank that ends is noticed at once, no matter
what the others are doing: in a pass, between two, or waiting for work.
"""

from __future__ import annotations

import atexit
import os
import select
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from pickle import HIGHEST_PROTOCOL, dumps, loads
from secrets import token_bytes
from time import monotonic, sleep
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from slipstream.core.signals import undisturbed

PATIENCE = 10.0  # the seconds that a failed rank waits for the others to report that they failed too
GRACE = 15.0  # the seconds that a pass may still take after a rank has ended; after that, the process is ended
CLOSING = 2.0  # the seconds in which the connections of a process that has ended are closed, after the first sign of it

SLOWEST = timedelta(minutes=30)
"""The longest time that one rank may lag behind another, since they may read weights at different speeds."""

HANG_UP = getattr(select, "POLLRDHUP", 0) | getattr(select, "POLLHUP", 0)
"""The events of `poll` for a connection whose other end is gone."""

LOST = 2  # the exit code of a process whose pass can never end


class RankLost(ConnectionError):
    """Raised when a rank has ended or failed, so that the ranks cannot go on together."""


def place() -> tuple[int, int]:
    """Return this process's rank and the number of ranks, as torchrun set them; (0, 1) if it did not start us."""
    try:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return 0, 1


@cache
def join() -> Ranks:
    """Connect with the other ranks, once in a process -> the ranks."""
    rank, size = place()
    if size < 2:
        raise ValueError(
            "tensor parallelism needs two or more processes, one for each GPU, and this is a single one: start them by "
            "torchrun --nproc-per-node 2 -m slipstream generate ... --tensor-parallel, or torchrun --nproc-per-node 2 "
            "SCRIPT.py."
        )
    if ours := not dist.is_initialized():  # begin as transformers would, with gloo besides NCCL if there are GPUs
        if gpus := torch.cuda.is_available():
            torch.cuda.set_device(torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))))
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo", timeout=SLOWEST)
    ranks = Ranks(rank, size, _lead(size) if rank == 0 else _follow(rank), ours)
    atexit.register(ranks.close)
    return ranks


def _lead(size: int) -> dict[int, Connection]:
    """Wait for a connection from each of the other ranks; torch.distributed sends them the key that they need."""
    host, key = os.environ.get("MASTER_ADDR", "127.0.0.1"), token_bytes(32)
    try:
        listener = Listener((host, 0), backlog=size, authkey=key)
    except OSError:  # the others reach us by this address, but it is not one of this machine's own
        listener = Listener(("", 0), backlog=size, authkey=key)
    connections: dict[int, Connection] = {}
    with listener:
        dist.broadcast_object_list([(host, listener.address[1], key)], src=0)
        while len(connections) < size - 1:
            with suppress(AuthenticationError, EOFError, OSError):  # a connection that is not from a rank
                connection = _at_once(listener.accept())
                connections[int.from_bytes(connection.recv_bytes())] = connection
    return dict(sorted(connections.items()))


def _follow(rank: int) -> dict[int, Connection]:
    """Connect with rank 0, at the address and with the key that it sends through torch.distributed."""
    offer: list[Any] = [None]
    dist.broadcast_object_list(offer, src=0)
    host, port, key = offer[0]
    connection = _at_once(Client((host, port), authkey=key))
    connection.send_bytes(rank.to_bytes(4))
    return {0: connection}


def _at_once(connection: Connection) -> Connection:
    """Set up a connection to send short messages without delay, and to notice machines that vanish."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        same.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, name):  # some systems lack these options
                same.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection


@dataclass(frozen=True)
class Ended:
    """The last message of rank 0; with a reason, the ranks cannot go on."""

    reason: str | None


class Ranks:
    """The ranks of a job, from one of them: rank 0 is connected with all others, these with rank 0."""

    def __init__(self, rank: int, size: int, connections: dict[int, Connection], ours: bool = False) -> None:
        """Start the thread that watches for lost ranks. `ours`: torch.distributed was begun, and ends, with them."""
        self.rank, self.size, self._ours = rank, size, ours
        self.on_loss: Callable[[], object] = lambda: None  # called by a thread as soon as a rank is lost
        self._connections = connections
        self._failures: dict[int, str] = {}  # the faults that ranks have reported
        self.lost: str | None = None  # why the ranks cannot go on, in a sentence
        self._closed = self._inside = False
        self._passes = self.count = 0  # `count` is of messages
        self._reading = threading.RLock()  # the watching thread reads faults, too
        threading.Thread(target=self._watch, name="slipstream-ranks", daemon=True).start()

    @property
    def leads(self) -> bool:
        return self.rank == 0

    # ---- messages ----

    def tell(self, message: object) -> int:
        """Send a message to all other ranks -> its number. Raises RankLost if one of them is gone or has failed."""
        self.check()
        return self._send(message)

    def _send(self, message: object) -> int:
        content = _written(message)
        for connection in self._connections.values():
            try:
                connection.send_bytes(content)
            except OSError as error:
                self.end(error)
        self.count += 1
        return self.count

    def listen(self) -> Any:
        """Wait for the next message of rank 0 -> it, or None if there will be no more."""
        try:
            message = loads(self._connections[0].recv_bytes())
        except (EOFError, OSError) as error:
            self.end(error)
        self.count += 1
        if isinstance(message, Ended):
            self.lost = message.reason
            if self.lost is not None:
                raise RankLost(self.lost)
            return None
        return message

    def answer(self, fault: str = "") -> None:
        """Report to rank 0 that its last message was carried out, or the fault that prevented it."""
        with suppress(OSError):  # rank 0 is gone, which `listen` will report
            self._connections[0].send_bytes(f"{self.count} {fault}".encode())

    def answers(self, number: int, seconds: float | None = None, cause: Exception | None = None) -> dict[int, str]:
        """Wait for every other rank's answer to message `number`, or to a later one -> their faults, empty for success.

        `seconds` is the longest wait (None: no limit). Raises RankLost, from its `cause`, if one of them is gone before
        it answers, or does not answer in time.
        """
        end, faults = None if seconds is None else monotonic() + seconds, dict(self._failures)
        self._failures = {}
        for rank, connection in self._connections.items():
            while rank not in faults:
                try:
                    with self._reading:
                        if end is not None and not connection.poll(max(0.0, end - monotonic())):
                            self.end(cause or TimeoutError(f"rank {rank} does not answer"))
                        answered, fault = _answer(connection)
                except (EOFError, OSError) as error:
                    self.end(cause or error)
                if answered >= number:
                    faults[rank] = fault
        return faults

    def agree(self, number: int, message: object, error: Exception) -> None:
        """After an error with message `number` here, check that every rank had one, so that all are in step again.
        `message` is sent to them to report it. Raises RankLost if one had none, since ranks then wait within a pass."""
        if self.lost is not None:
            self.end(error)
        self._send(message)
        if not all(self.answers(number, PATIENCE, error).values()):
            self.end(error)

    def leader_agrees(self) -> bool:
        """Wait up to PATIENCE for a message of rank 0, after a fault that all ranks may have -> whether one comes."""
        with suppress(OSError):
            return self._connections[0].poll(PATIENCE)
        return False

    # ---- losses ----

    def check(self) -> None:
        """Raise RankLost if a rank is gone, or has reported a fault."""
        if self.lost is not None:
            raise RankLost(self.lost)
        if self.leads and self._reads_failures():
            self.end(None)

    def end(self, cause: BaseException | None) -> NoReturn:
        """Raise RankLost with the known reason why the ranks cannot go on."""
        latest = monotonic() + CLOSING  # waits, since an ended process closes its connections one by one
        while not (gone := self._gone(0)) and monotonic() < latest:
            sleep(0.02)
        if self.lost is None:
            self.lost = self._why(gone, cause)
        raise RankLost(self.lost) from cause

    def _why(self, gone: Sequence[int], cause: BaseException | None) -> str:
        if self._reads_failures():
            return "; ".join(f"rank {rank} has failed: {text}" for rank, text in sorted(self._failures.items()))
        lines = [] if cause is None or isinstance(cause, EOFError) else str(cause).strip().splitlines()
        reason = f" ({lines[0].removesuffix('.')})" if lines else ""
        names = " and ".join(f"rank {rank}" for rank in gone)
        what = f"{names} of {self.size} has ended" if gone else f"the {self.size} ranks have lost each other"
        return f"{what} before all was done{reason}, so this job cannot go on: start it again."

    def _reads_failures(self) -> bool:
        for rank, connection in self._connections.items() if self.leads else ():
            with suppress(EOFError, OSError), self._reading:
                while connection.poll():
                    if fault := _answer(connection)[1]:
                        self._failures[rank] = fault
        return bool(self._failures)

    def _gone(self, milliseconds: int | None) -> list[int]:
        """Wait for a rank to close its connection, at most so long (None: no limit) -> the ranks that have done so."""
        if self._closed:
            return []
        by_file = {connection.fileno(): rank for rank, connection in self._connections.items()}
        poll = select.poll()
        for file in by_file:
            poll.register(file, HANG_UP)
        return sorted(by_file[file] for file, _ in poll.poll(milliseconds) if file in by_file)

    def _watch(self) -> None:
        """Wait for a rank to end, in a thread; then call `on_loss` on rank 0, and end a pass that cannot finish."""
        gone: list[int] = []
        with suppress(OSError, ValueError):  # the connections were closed here
            while not gone and not self._closed:
                gone = self._gone(1000)
        if self._closed or not gone:
            return
        if self.leads:
            self.lost = self.lost or self._why(gone, None)
            self.on_loss()
        # This process ends when a pass has run for GRACE seconds since a rank was lost, since it can never finish.
        why, running, since = self.lost or self._why(gone, None), 0, monotonic()
        while not self._closed:
            now = self._passes if self._inside else 0
            if now != running:
                running, since = now, monotonic()
            elif running and monotonic() - since > GRACE:
                print(f"slipstream: {why}", file=sys.stderr, flush=True)
                os._exit(LOST)
            sleep(0.1)

    # ---- work ----

    @contextmanager
    def working(self) -> Iterator[None]:
        """Mark the block as a pass shared with other ranks; Ctrl-C and SIGTERM wait, so that all stop together."""
        self._passes += 1
        self._inside = True
        try:
            with undisturbed():
                yield
        finally:
            self._inside = False

    def close(self) -> None:
        """Close the connections; before that, rank 0 sends the others the end of the job, with the reason of a loss."""
        if self._closed:
            return
        if self.leads:
            content = _written(Ended(self.lost))
            for connection in self._connections.values():
                with suppress(OSError):
                    connection.send_bytes(content)
        self._closed = True
        for connection in self._connections.values():
            connection.close()
        if self._ours and self.lost is None:
            with suppress(RuntimeError):  # a loss is reported elsewhere
                dist.destroy_process_group()


def _written(message: object) -> bytes:
    """Return a message as bytes. The connection's own pickles would share tensors' memory, on this machine only."""
    return dumps(message, protocol=HIGHEST_PROTOCOL)


def _answer(connection: Connection) -> tuple[int, str]:
    number, _, fault = connection.recv_bytes().decode().partition(" ")
    return int(number), fault
