"""Opens the files that users pass: by their paths, as bytes, or embedded in text, as `data:` URLs or base64."""

from __future__ import annotations

import base64
import binascii
import io
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote_to_bytes


def open_file(file: bytes | str | Path, where: str) -> BinaryIO:
    """Open a file, its bytes, or a `data:` URL. Raises ValueError, in which `where` names it, for anything else."""
    if isinstance(file, bytes):
        return io.BytesIO(file)
    if isinstance(file, str) and file.startswith("data:"):
        return io.BytesIO(data_url(file, where))
    if isinstance(file, str) and file.startswith(("http://", "https://")):
        raise ValueError(f"{where} is a web address: load it, and pass the file or its bytes.")
    try:
        return Path(file).expanduser().open("rb")
    except OSError as error:
        raise ValueError(f"{where} cannot be read: {error.strerror or error}: {file}.") from error


def data_url(url: str, where: str) -> bytes:
    """Return the content of a `data:` URL. Raises ValueError, in which `where` names it, for one that is damaged."""
    head, comma, body = url.partition(",")
    if not comma:
        raise ValueError(f"{where} is no data: URL, which has a comma before its content.")
    content = unquote_to_bytes(body)
    return base64_content(content, f"{where} is a data: URL whose content") if head.endswith(";base64") else content


def base64_content(text: str | bytes, where: str) -> bytes:
    """Decode base64. Raises ValueError, in which `where` names the text, for anything else."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"{where} is no base64: {error}.") from None
