"""The storage of answers while a batch runs: none is lost or made twice, however the run is interrupted."""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Self, TextIO

from slipstream.files import WriteError, atomic_write
from slipstream.serve.batch.lines import BatchLine, ServerReply
from slipstream.text.jsontext import json_text

MARK, VERSION = "slipstream_batch", 1  # field that marks the first line of a journal, and its value
ANSWERED = frozenset({"index", "response"})  # a field of our answers, and one of OpenAI's
ENDING = ".partial"  # ending that the journal's name has after the name of the file of answers


class AnswersFile:
    """The kind of file that a `Journal` makes: JSON lines or a table, with the fields of answers."""

    what = "file of answers"

    def recognises(self, path: Path) -> bool:
        try:
            if path.suffix == ".parquet":
                from pyarrow.parquet import read_schema

                return not ANSWERED.isdisjoint(read_schema(path).names)
            with path.open("rb") as file:
                return not ANSWERED.isdisjoint(json.loads(file.readline()))
        except (ValueError, TypeError, RecursionError):  # those of pyarrow are ValueErrors too
            return False


class Printed:
    """Prints answers as JSON lines, as they come, where a `Journal` keeps them; a later run starts anew."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.answered: set[int] = set()
        self.failed = 0

    def write(self, line: BatchLine, answer: ServerReply) -> None:
        print(_text(line.form.record(line.index, line.id, answer)), file=self.stream, flush=True)

    def finish(self) -> None:
        """Do nothing: the stream stays open."""


class Journal:
    """Keeps answers in a journal next to the file `out`, and writes that file when all are there.

    The journal, OUT.partial, is a line with the digests of the batch (`facts`) and then a line per answer, each on the
    disk before `write` returns; an unfinished last line, left by a killed process, is cut off. `finish` writes OUT in
    the order of the prompts, whole or not at all, and removes the journal. An OUT that ends in .parquet is a table with
    these `columns` (names, and Arrow's names of their types). Only one process can have the journal open.

    Raises ValueError if OUT exists and was not begun by such a run, or if the journal belongs to other prompts or
    settings; with `anew` both are replaced, but never a file that is no journal. Raises OSError as the system does.
    """

    def __init__(self, out: Path, facts: Mapping[str, Any], columns: Mapping[str, str], anew: bool = False) -> None:
        self.out, self.path, self.columns = out, out.with_name(out.name + ENDING), columns
        self.failed = 0
        self._offsets: dict[int, int] = {}  # offsets of answers in the journal, by the index of their lines
        self._header = json_text({MARK: VERSION, **facts}, sort_keys=True).encode()
        if out.exists() and not anew and not self.path.exists():
            raise ValueError(f"{out} exists: name another file, or replace it with --force.")
        self._file = open(self.path, "a+b", buffering=0)  # noqa: SIM115
        try:
            self._open(anew)
        except BaseException:
            self._file.close()
            raise

    def _open(self, anew: bool) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"{self.path} is being written by another run: wait, or name another file.") from None
        self._check_header(anew)
        if anew:
            self._file.truncate(0)
        size = 0
        with open(self.path, "rb") as file:
            for place, line in enumerate(file):
                if not line.endswith(b"\n"):
                    break
                if place:
                    try:
                        entry = json.loads(line)
                        self._offsets[int(entry["line"])] = size
                        self.failed += bool(entry["failed"])
                    except (ValueError, KeyError, TypeError):
                        raise ValueError(f"{self.path}:{place + 1} is damaged: begin anew with --force.") from None
                size += len(line)
        self._file.truncate(size)
        if not size:
            self._append(self._header)
            _sync_folder(self.path.parent)

    @property
    def answered(self) -> set[int]:
        return set(self._offsets)

    def write(self, line: BatchLine, answer: ServerReply) -> None:
        record = line.form.record(line.index, line.id, answer)
        self.failed += bool(answer.error)
        entry = _text({"line": line.index, "failed": bool(answer.error), "record": record})
        self._offsets[line.index] = self._append(entry.encode(errors="backslashreplace"))

    def finish(self) -> None:
        with atomic_write(self.out) as part:
            if self.out.suffix == ".parquet":
                write_table(part, self._records(), self.columns)
            else:
                with open(part, "w", encoding="utf-8", errors="backslashreplace") as file:
                    file.writelines(f"{_text(record)}\n" for record in self._records())
        self.path.unlink()
        _sync_folder(self.path.parent)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self._file.close()

    def _append(self, text: bytes) -> int:
        begin = self._file.seek(0, os.SEEK_END)
        try:
            rest = memoryview(text + b"\n")
            while rest:
                rest = rest[self._file.write(rest) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            raise WriteError(error.errno, error.strerror or str(error), os.fspath(self.path)) from error
        return begin

    def _check_header(self, anew: bool) -> None:
        self._file.seek(0)
        size = os.fstat(self._file.fileno()).st_size
        with open(self.path, "rb") as file:
            header = file.readline()
        if not header.endswith(b"\n") and self._header.startswith(header[:size]):
            return  # empty, or killed while writing the first line
        try:
            facts = json.loads(header)
        except ValueError:
            facts = None
        if not isinstance(facts, dict) or facts.get(MARK) != VERSION:
            raise ValueError(f"{self.path} is no journal of a batch: move it away, or name another file for answers.")
        if not anew and header.rstrip(b"\n") != self._header:
            expected = json.loads(self._header)
            others = [name for name in ("settings", "prompts") if facts.get(name) != expected[name]] or ["version"]
            how = "give the same to go on, or begin anew with --force."
            raise ValueError(f"{self.path} was begun with other {' and '.join(others)}: {how}")

    def _records(self) -> Iterator[dict[str, Any]]:
        with open(self.path, "rb") as file:
            for _, offset in sorted(self._offsets.items()):
                file.seek(offset)
                yield json.loads(file.readline())["record"]


def write_table(path: Path, records: Iterator[dict[str, Any]], columns: Mapping[str, str]) -> None:
    """Write records as a Parquet table with these columns, a thousand rows at a time.
    Missing fields are null; in columns of text, numbers and objects are written as JSON."""
    import pyarrow
    from pyarrow.parquet import ParquetWriter

    def cell(value: Any, kind: str) -> Any:
        if value is None or kind != "string":
            return value
        text = value if isinstance(value, str) else _text(value)
        return text.encode(errors="backslashreplace").decode()  # lone surrogates, which UTF-8 cannot encode

    schema = pyarrow.schema([(name, getattr(pyarrow, kind)()) for name, kind in columns.items()])
    with ParquetWriter(path, schema) as writer:
        while some := list(islice(records, 1000)):
            rows = [{name: cell(record.get(name), kind) for name, kind in columns.items()} for record in some]
            writer.write_table(pyarrow.Table.from_pylist(rows, schema))


def _text(value: Any) -> str:
    return json_text(value, ensure_ascii=False)


def _sync_folder(folder: Path) -> None:
    """Write the entries of a folder to the disk, so that new file names survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
