"""A memory of responses to similar requests: SQLite on disk, with the search in this process.

Several processes may use one file. An entry is written in one transaction; `add` returns when it is on disk, so that a
process that is killed in mid-write leaves the entry whole or not at all. Every query has a namespace: the text of one
tenant is never a draft of another, and limits hold per namespace, so that tenants do not evict each other's entries.
"""

import hashlib
import os
import sqlite3
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import finalize

import numpy as np

from slipstream.core.values import check_least
from slipstream.drafters.datastore.embedding import Array, Embedder, VectorIndex

VERSION = 1
BUSY_SECONDS = 30.0  # the seconds that a writer waits for others
SPARE = 0.05  # the share of a full namespace that is evicted at once, so that evictions are rare
OPEN_NAMESPACES = 64  # the greatest number of namespaces whose vectors this process keeps in memory
SCHEMA = """
CREATE TABLE IF NOT EXISTS about (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS entries (
    id INTEGER PRIMARY KEY AUTOINCREMENT, namespace TEXT NOT NULL, digest BLOB NOT NULL,
    vector BLOB NOT NULL, response BLOB NOT NULL, used INTEGER NOT NULL, UNIQUE (namespace, digest));
CREATE INDEX IF NOT EXISTS by_use ON entries (namespace, used);
CREATE TABLE IF NOT EXISTS totals (
    namespace TEXT PRIMARY KEY, entries INTEGER NOT NULL DEFAULT 0, bytes INTEGER NOT NULL DEFAULT 0,
    clock INTEGER NOT NULL DEFAULT 0, removals INTEGER NOT NULL DEFAULT 0);
"""


@dataclass(frozen=True)
class NamespaceLimits:
    """The limits of a namespace, beyond which the least recently used entries are removed."""

    entries: int = 100_000
    bytes: int = 1 << 28

    def __post_init__(self) -> None:
        check_least(self, entries=1, bytes=1)


@dataclass(frozen=True)
class Totals:
    namespace: str
    entries: int
    bytes: int


@dataclass
class _Loaded:
    """The vectors of a namespace in this process, and the state of the file when they were read."""

    index: VectorIndex
    last: int = 0  # the id of the newest entry that was read
    removals: int = 0
    version: int = -1  # the file's version when it was read


class ResponseMemory:
    """Stores responses by request and namespace, and finds those to the nearest requests.

    `nearest` includes entries of other processes. The file must not be on a network file system, whose locks SQLite
    cannot rely on.
    """

    def __init__(
        self, path: str | os.PathLike[str], embed: Embedder, tokenizer: str = "", limits: NamespaceLimits | None = None
    ) -> None:
        """Open the file or create it, readable by its owner only.
        Raises ValueError if it is not a memory, is damaged, or was made with another tokenizer or embedding."""
        self.path, self.embed, self.limits = Path(path), embed, limits or NamespaceLimits()
        self._loaded: OrderedDict[str, _Loaded] = OrderedDict()
        self._touched: dict[str, set[int]] = {}
        self._changes = 0
        self._about = {"version": str(VERSION), "embedding": embed.name, "tokenizer": tokenizer}
        self._process, self._connection = os.getpid(), self._open()

    def add(self, namespace: str, request: Sequence[int], response: Sequence[int]) -> None:
        """Store a response (token ids); when this returns, it is on disk.
        A response that alone exceeds the limits is not stored. Raises OSError if the file cannot be written."""
        if not request or not response:
            raise ValueError("a request and its response need at least one token each.")
        vector, tokens = self.embed(request).astype("<f2").tobytes(), np.array(response, "<u4").tobytes()
        if len(vector) + len(tokens) > self.limits.bytes:
            return
        digest = hashlib.sha256(vector + tokens).digest()
        with self._writing() as run:
            run("INSERT OR IGNORE INTO totals (namespace) VALUES (?)", namespace)
            self._touch(run, namespace)
            clock = run("UPDATE totals SET clock = clock + 1 WHERE namespace = ? RETURNING clock", namespace)[0][0]
            entry = (namespace, digest, vector, tokens, clock)
            sql = "INSERT OR IGNORE INTO entries (namespace, digest, vector, response, used) VALUES (?, ?, ?, ?, ?)"
            if run(f"{sql} RETURNING id", *entry):
                grow = "UPDATE totals SET entries = entries + 1, bytes = bytes + ? WHERE namespace = ?"
                run(grow, len(vector) + len(tokens), namespace)
                self._evict(run, namespace)
            else:
                run("UPDATE entries SET used = ? WHERE namespace = ? AND digest = ?", clock, namespace, digest)

    def nearest(self, namespace: str, request: Sequence[int], count: int) -> list[tuple[float, Array]]:
        """Return the responses (tokens,) to the `count` nearest earlier requests, nearest first, with their cosines."""
        loaded = self._read(namespace)
        responses = []
        for near, entry in loaded.index.search(self.embed(request), count):
            rows = self._run("SELECT response FROM entries WHERE id = ? AND namespace = ?", entry, namespace)
            if rows:  # another process may have removed it meanwhile
                responses.append((near, np.frombuffer(rows[0][0], "<u4")))
                self._touched.setdefault(namespace, set()).add(entry)
        return responses

    def close(self) -> None:
        """Record which entries were used, and close the file."""
        if self._touched and self._process == os.getpid():
            with self._writing() as run:
                for namespace in list(self._touched):
                    self._touch(run, namespace)
        self._connection.close()

    def _open(self) -> sqlite3.Connection:
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600))
        try:
            with ExitStack() as failing:  # closes what cannot be used
                connection = sqlite3.connect(
                    self.path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
                )
                failing.callback(connection.close)
                _settle(connection)
                if not connection.execute("SELECT count(*) FROM sqlite_master WHERE name = 'about'").fetchone()[0]:
                    connection.execute("BEGIN IMMEDIATE")
                    for statement in filter(str.strip, SCHEMA.split(";")):
                        connection.execute(statement)
                    connection.executemany("INSERT OR IGNORE INTO about VALUES (?, ?)", self._about.items())
                    connection.execute("COMMIT")
                about = dict(connection.execute("SELECT name, value FROM about"))
                for name, wanted in self._about.items():
                    stored = about.get(name, "")
                    if stored != wanted and (stored and wanted):
                        raise ValueError(
                            f"{self.path} was made with another {name} ({stored}, here {wanted}): remove it or use "
                            "another."
                        )
                failing.pop_all()
        except sqlite3.OperationalError as error:
            raise OSError(f"cannot open the memory {self.path}: {error}.") from error
        except sqlite3.DatabaseError as error:
            raise ValueError(f"{self.path} is damaged or no memory ({error}): remove it to begin a new one.") from error
        finalize(self, _close, connection, os.getpid())
        return connection

    def _run(self, sql: str, *values: Any) -> list[Any]:
        if self._process != os.getpid():  # a connection must not be carried over a fork
            self._process, self._connection = os.getpid(), self._open()
            self._loaded.clear()
        try:
            return self._connection.execute(sql, values).fetchall()
        except sqlite3.Error as error:
            raise OSError(f"cannot use the memory {self.path}: {error}.") from error

    @contextmanager
    def _writing(self) -> Iterator[Any]:
        self._run("BEGIN IMMEDIATE")
        try:
            yield self._run
            self._run("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise
        self._changes += 1

    def _touch(self, run: Any, namespace: str) -> None:
        latest = "SELECT clock FROM totals WHERE namespace = ?"
        for entry in self._touched.pop(namespace, ()):
            run(f"UPDATE entries SET used = ({latest}) WHERE id = ? AND namespace = ?", namespace, entry, namespace)

    def _evict(self, run: Any, namespace: str) -> None:
        """Remove the least recently used entries of a namespace beyond its limits, until a share SPARE is free."""
        ((entries, size),) = run("SELECT entries, bytes FROM totals WHERE namespace = ?", namespace)
        if entries <= self.limits.entries and size <= self.limits.bytes:
            return
        most, room = self.limits.entries * (1 - SPARE), self.limits.bytes * (1 - SPARE)
        sql = "SELECT id, length(vector) + length(response) FROM entries WHERE namespace = ? ORDER BY used"
        evicted: list[int] = []
        for entry, bytes_of in run(sql, namespace)[:-1]:  # the newest stays
            if entries <= most and size <= room:
                break
            evicted.append(entry)
            entries, size = entries - 1, size - bytes_of
        self._connection.executemany("DELETE FROM entries WHERE id = ?", [(entry,) for entry in evicted])
        update = "UPDATE totals SET entries = ?, bytes = ?, removals = removals + 1 WHERE namespace = ?"
        run(update, entries, size, namespace)

    def _read(self, namespace: str) -> _Loaded:
        version = self._run("PRAGMA data_version")[0][0] + (self._changes << 32)
        loaded = self._loaded.pop(namespace, None) or _Loaded(VectorIndex(self.embed.dimension))
        self._loaded[namespace] = loaded
        if len(self._loaded) > OPEN_NAMESPACES:
            self._loaded.popitem(last=False)
        if loaded.version == version:
            return loaded
        rows = self._run(
            "SELECT id, vector FROM entries WHERE namespace = ? AND id > ? ORDER BY id", namespace, loaded.last
        )
        if rows:
            vectors = np.frombuffer(b"".join(vector for _, vector in rows), "<f2").reshape(len(rows), -1)
            loaded.index.add(np.array([entry for entry, _ in rows]), vectors.astype(np.float32))
            loaded.last = rows[-1][0]
        removals = self._run("SELECT removals FROM totals WHERE namespace = ?", namespace)
        if removals and removals[0][0] != loaded.removals:
            left = self._run("SELECT id FROM entries WHERE namespace = ?", namespace)
            loaded.index.keep(np.array([entry for (entry,) in left], np.int64))
            loaded.removals = removals[0][0]
        loaded.version = version
        return loaded


def read_totals(path: str | os.PathLike[str]) -> list[Totals]:
    """Return the sizes of a file's namespaces, without an embedder. Raises ValueError if it is not a memory."""
    try:
        with closing(sqlite3.connect(path, timeout=BUSY_SECONDS)) as connection:
            rows = connection.execute("SELECT namespace, entries, bytes FROM totals ORDER BY namespace").fetchall()
    except sqlite3.DatabaseError as error:
        raise ValueError(f"{path} is damaged or no memory ({error}).") from error
    return [Totals(*row) for row in rows]


def forget(path: str | os.PathLike[str], namespace: str) -> None:
    """Remove a namespace from a file; its bytes on disk are overwritten.
    Raises FileNotFoundError, and ValueError if it has no such namespace."""
    if not Path(path).exists():
        raise FileNotFoundError(f"there is no memory at {path}.")
    if namespace not in (names := [total.namespace for total in read_totals(path)]):
        raise ValueError(f"{path} has no namespace {namespace!r}: it has {', '.join(names) or 'none'}.")
    connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None)
    try:
        _settle(connection)
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("DELETE FROM entries WHERE namespace = ?", (namespace,))
        empty = "UPDATE totals SET entries = 0, bytes = 0, removals = removals + 1 WHERE namespace = ?"
        connection.execute(empty, (namespace,))
        connection.execute("COMMIT")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    except sqlite3.Error as error:
        raise OSError(f"cannot use the memory {path}: {error}.") from error
    finally:
        connection.close()


def _close(connection: sqlite3.Connection, process: int) -> None:
    """Close a connection in the process that opened it: a forked process must not touch its locks."""
    if process == os.getpid():
        connection.close()


def _settle(connection: sqlite3.Connection) -> None:
    """Set the connection up: readers and a writer run at the same time, and a commit survives a loss of power."""
    end = time.monotonic() + BUSY_SECONDS
    while True:  # SQLite does not wait by itself while another process turns the log on
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            break
        except sqlite3.OperationalError:
            if time.monotonic() > end:
                raise
            time.sleep(0.01)
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA secure_delete = ON")
