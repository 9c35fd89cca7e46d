"""Files that are whole or not there, and tensors in files with a header that says what they are."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor


@contextmanager
def whole(path: str | os.PathLike[str]) -> Iterator[Path]:
    """The path of a part file to write to, which takes the place of `path` if the block ends without an error.

    Whatever interrupts it, the file at `path` is the old one or the new one; the part file is left behind only by what
    kills the process.
    """
    path = Path(path)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        yield part
        with open(part, "rb") as written:
            os.fsync(written.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@dataclass(frozen=True)
class Kind:
    """A kind of safetensors file: `format` and `version` stand in its header, `what` and `remedy` are for messages."""

    what: str  # "n-gram model"
    format: str
    version: str | None  # None: the format alone tells
    remedy: str  # "build it again"

    def damaged(self, path: str | os.PathLike[str], fault: object) -> ValueError:
        """The error to raise for a file that is not what its header says."""
        return ValueError(f"{path} is damaged ({fault}): {self.remedy}.")


def save_tensors(
    path: str | os.PathLike[str], kind: Kind, tensors: Mapping[str, Tensor], about: Mapping[str, str]
) -> None:
    """Write contiguous tensors and a header, whole or not at all."""
    head = {"format": kind.format, **({} if kind.version is None else {"version": kind.version})}
    with whole(path) as part:
        save_file(dict(tensors), part, {**head, **about})


def load_tensors(path: str | os.PathLike[str], kind: Kind) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors, mapped into memory, and the header of a file.

    Raises ValueError in one sentence if the file is damaged, of another format or of another version.
    """
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or no {kind.what} ({error}): {kind.remedy}.") from error
    if (about.get("format"), about.get("version")) != (kind.format, kind.version):
        found, wanted = _told(about.get("format"), about.get("version")), _told(kind.format, kind.version)
        raise ValueError(f"{path} is {found}, this release reads {wanted}: {kind.remedy}.")
    return tensors, about


def _told(format: str | None, version: str | None) -> str:
    return " version ".join(filter(None, [format or "of an unknown format", version]))
