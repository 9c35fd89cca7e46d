"""Atomic writes of files, checks of what may be replaced, cache folders, and tensors with a header and a checksum."""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

Name = str | os.PathLike[str]


# ---- writing ----------------------------------------------------------------------------------------------------


class WriteError(OSError):
    """Raised if a file cannot be written; its text is one sentence with the reason, such as a full disk."""

    def __str__(self) -> str:
        return f"cannot write {self.filename}: {reason(self)}."


def reason(error: OSError) -> str:
    """Return the system's reason of an error, without its number: "no space left on device"."""
    text = error.strerror or str(error)
    return text[:1].lower() + text[1:]


@contextmanager
def _refusals(path: Name) -> Iterator[None]:
    """Raise WriteError for what the system refuses in the block, such as space on a full disk."""
    try:
        yield
    except Exception as error:
        number = re.search(r"os error (\d+)", str(error))  # safetensors has an error of its own, with that in its text
        if not isinstance(error, OSError):
            if type(error).__name__ != "SafetensorError" or number is None:
                raise
            error = OSError(int(number[1]), os.strerror(int(number[1])))
        raise WriteError(error.errno, error.strerror or str(error), os.fspath(path)) from error


@contextmanager
def atomic_write(path: Name) -> Iterator[Path]:
    """Yield the path of a part file to write to, which replaces `path` if the block ends without an error.

    After any interruption the file at `path` is the old one or the new one; the part file is left over only if the
    process is killed. A link stays, and the file that it names is replaced. Raises WriteError if the system refuses.
    """
    file = Path(os.path.realpath(path))
    part = file.with_name(f"{file.name}.{secrets.token_hex(4)}.part")
    with _refusals(path):
        try:
            if file.exists() and not file.is_file():
                raise OSError(errno.EINVAL, "it is no file that could be replaced")
            with open(part, "xb") as made:
                mode = os.fstat(made.fileno()).st_mode
            yield part
            part.chmod(mode)  # the umask's mode; safetensors replaces the part by a file that only its owner may read
            with open(part, "rb") as written:
                os.fsync(written.fileno())
            part.replace(file)
        finally:
            part.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Name) -> Iterator[Path]:
    """Yield a new folder to write to, which takes the place of the one at `path` if the block ends without an error.

    After any interruption the old folder's files are not mixed with new ones; for a moment between two renamings
    there is none. Raises WriteError if the system refuses.
    """
    folder = Path(os.path.realpath(path))
    part, old = (folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.{end}") for end in ("part", "old"))
    with _refusals(path):
        try:
            part.mkdir(parents=True)
            yield part
            if folder.exists():
                folder.rename(old)
            part.rename(folder)
        finally:
            if old.exists() and not folder.exists():
                old.rename(folder)
            for left in (part, old):
                shutil.rmtree(left, ignore_errors=True)


# ---- cache folders ----------------------------------------------------------------------------------------------


def cache_folder(name: str, variable: str) -> Path | None:
    """Return the folder for files of one kind that are kept for other processes; None if they are not kept.

    It is `name` in `user_cache()`, unless the environment `variable` names another folder, or switches it off by being
    empty or "off".
    """
    named = os.environ.get(variable)
    if named in {"", "off"}:
        return None
    return Path(named).expanduser() if named else user_cache() / name


def user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "slipstream"


def delete_oldest(folder: Path, pattern: str, most: int) -> None:
    """Delete the least recently used files of a folder whose names fit the pattern, until `most` are left."""
    with suppress(OSError):  # another process may delete the same files
        for path in sorted(folder.glob(pattern), key=lambda path: path.stat().st_mtime, reverse=True)[most:]:
            path.unlink()


# ---- what may be replaced ---------------------------------------------------------------------------------------


class Recognisable(Protocol):
    """A kind of file, which can recognise its files; `what` is its name in messages."""

    @property
    def what(self) -> str:
        """The name of the kind in messages, such as "n-gram model"."""

    def recognises(self, path: Path) -> bool:
        """Return whether an existing file is of this kind, in any version of it."""


@dataclass(frozen=True)
class TextFileKind:
    """A kind of text file, recognised by a mark in its first 4096 bytes, such as the first line of a page."""

    what: str
    mark: str

    def recognises(self, path: Path) -> bool:
        return self.mark.encode() in _beginning(path, 4096)


@dataclass(frozen=True)
class JsonObject:
    """A kind of JSON file, recognised by the `fields` of its object; a field of value None may have any value."""

    what: str
    fields: Mapping[str, str | None]

    def recognises(self, path: Path) -> bool:
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError):
            return False
        return isinstance(record, dict) and all(
            name in record and value in (None, record[name]) for name, value in self.fields.items()
        )


def check_writable(path: Name, kind: Recognisable, force: bool = False, inputs: Iterable[Name] = ()) -> None:
    """Check, before any work, that a file may be written there. Raises ValueError, in one sentence, if not.

    An existing file must be of this `kind`, or empty, unless `force`. One of the `inputs`, or a file of a folder among
    them that is not of this kind, is never replaced; neither is anything but a regular file, such as a device.
    """
    file = Path(path)
    if not file.parent.is_dir():
        raise _refused(path, f"there is no folder {file.parent}; make it first")
    if file.is_dir():
        raise _refused(path, "it is a folder; name a file in it")
    if not file.exists():
        if not os.access(Path(os.path.realpath(path)).parent, os.W_OK | os.X_OK):
            raise _refused(path, f"nothing may be written to the folder {file.parent}")
        return
    if not file.is_file():
        raise _refused(path, "it is a device or a pipe, not a file")
    if not os.access(path, os.R_OK):
        raise _refused(path, "it exists and cannot be read; name another file")
    ours = kind.recognises(file)
    for each in map(Path, inputs):
        inside = each.is_dir() and not ours and file.resolve().is_relative_to(each.resolve())
        if inside or (each.exists() and file.samefile(each)):
            raise _refused(path, "it is an input of this command; name another file")
    if not (ours or force or not file.stat().st_size):
        raise _refused(path, f"it exists and is no {kind.what}; name another file, or replace it with --force")


def check_folder(
    folder: Name, kinds: Mapping[str, Recognisable], force: bool = False, inputs: Iterable[Name] = ()
) -> None:
    place = Path(folder)
    above = next(path for path in (place, *place.absolute().parents) if path.exists() or path.is_symlink())
    if not above.is_dir():
        raise _refused(folder, f"{above} is no folder")
    if not os.access(above, os.W_OK | os.X_OK):
        raise _refused(folder, f"nothing may be written to the folder {above}")
    if above == place:
        for name, kind in kinds.items():
            check_writable(place / name, kind, force, inputs)


def _refused(path: Name, why: str) -> ValueError:
    return ValueError(f"cannot write {os.fspath(path)}: {why}.")


def _beginning(path: Path, count: int) -> bytes:
    with open(path, "rb") as file:
        return file.read(count)


# ---- tensors ----------------------------------------------------------------------------------------------------

CHECKSUM, LONGEST_HEADER = "checksum", 100_000_000
"""The header field with the CRC-32 of everything else, and the most bytes that safetensors reads as a header."""


@dataclass(frozen=True)
class TensorFileKind:
    """A kind of safetensors file: `format` and `version` are in its header, `what` and `remedy` in messages."""

    what: str  # "n-gram model"
    format: str
    version: str
    remedy: str  # "build it with `slipstream draft build`"

    def recognises(self, path: Path) -> bool:
        head = _beginning(path, 8)
        size = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 0 < size <= min(LONGEST_HEADER, path.stat().st_size):
            return False
        try:
            about = json.loads(_beginning(path, 8 + size)[8:])["__metadata__"]["format"]
        except (ValueError, LookupError, TypeError, RecursionError):
            return False
        return isinstance(about, str) and re.fullmatch(re.escape(self.format) + r"( \d+)?", about) is not None

    def damaged(self, path: Name, fault: object) -> ValueError:
        """Make the error for a file that does not fit its header."""
        return ValueError(f"{path} is damaged ({fault}): {self.remedy}.")

    @contextmanager
    def contents(self, path: Name) -> Iterator[tuple[dict[str, Tensor], dict[str, str]]]:
        """Yield a file's tensors and its header; what the block cannot read in them says that the file is damaged.
        Raises FileNotFoundError, and ValueError as `load_tensors` does."""
        if not Path(path).is_file():
            raise FileNotFoundError(f"there is no {self.what} at {path}: {self.remedy}.")
        tensors, about = load_tensors(path, self)
        try:
            yield tensors, about
        except KeyError as error:
            raise self.damaged(path, f"it lacks {error}") from error
        except ValueError as error:
            raise self.damaged(path, error) from error
        except (TypeError, RuntimeError) as error:
            raise self.damaged(path, "it does not hold what its header says") from error


def save_tensors(path: Name, kind: TensorFileKind, tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> None:
    from safetensors.torch import save_file

    head = {"format": kind.format, "version": kind.version, **about}
    with atomic_write(path) as part:
        save_file(dict(tensors), part, {**head, CHECKSUM: _checksum(tensors, head)})


def load_tensors(path: Name, kind: TensorFileKind) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return a file's tensors, mapped into memory, and its header. All of it is read once, for its checksum.
    Raises ValueError in one sentence if the file is damaged, of another format or of another version."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or no {kind.what} ({error}): {kind.remedy}.") from error
    if (about.get("format"), about.get("version")) != (kind.format, kind.version):
        stored, wanted = _version(about.get("format"), about.get("version")), _version(kind.format, kind.version)
        raise ValueError(f"{path} is {stored}, this release reads {wanted}: {kind.remedy}.")
    if about.pop(CHECKSUM, None) != _checksum(tensors, about):
        raise kind.damaged(path, "its checksum does not fit its bytes")
    return tensors, about


def _checksum(tensors: Mapping[str, Tensor], head: Mapping[str, str]) -> str:
    """Return the CRC-32 of the header's fields and every tensor's name, type, shape and bytes, as hexadecimal."""
    import torch

    shapes: list[Any] = [(name, str(tensors[name].dtype), list(tensors[name].shape)) for name in sorted(tensors)]
    total = zlib.crc32(repr((sorted(head.items()), shapes)).encode())
    for name in sorted(name for name, tensor in tensors.items() if tensor.numel()):
        array = tensors[name].detach().cpu().reshape(-1).view(torch.uint8).numpy()
        total = zlib.crc32(array.data, total)
    return f"{total:08x}"


def _version(format: str | None, version: str | None) -> str:
    return " version ".join(filter(None, [format or "of an unknown format", version]))
