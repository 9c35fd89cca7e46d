"""Files that are whole or not there: written beside the old one, then put in its place."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
