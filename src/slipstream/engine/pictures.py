"""Images as users pass them (opened ones, files, `data:` URLs, arrays) -> opened ones, with one sentence for others."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_to_bytes

import numpy as np
from torch import Tensor

if TYPE_CHECKING:
    from PIL.Image import Image

PIXELS = 1 << 26
"""The most pixels of an image that is opened: small files can hold very many."""

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""What is opened; others have decoders that few use."""


@dataclass(frozen=True)
class Illustrated:
    """A text and the images that it is about, in their order.

    Placeholders in the text say where the images stand; without any, they stand before it.
    """

    text: str
    images: Sequence[Any]


def open_image(given: Any, where: str = "an image") -> Image:
    """An image of Pillow, a file, a `data:` URL, bytes, or an array (height, width, 3) of 8 bits -> in RGB.

    Raises ValueError for anything else, for what is damaged, and for more than `PIXELS` pixels.
    """
    _needed()
    from PIL import Image as pillow

    if isinstance(given, pillow.Image):
        return given.convert("RGB")
    if isinstance(given, np.ndarray | Tensor):
        return _from_array(np.asarray(given), where)
    if isinstance(given, bytes):
        return decode(given, where)
    if isinstance(given, str) and given.startswith("data:"):
        return decode(data_url(given, where), where)
    if isinstance(given, str) and given.startswith(("http://", "https://")):
        raise ValueError(f"{where} is a web address: load it, and pass the file or its bytes.")
    if not isinstance(given, str | Path):
        kind = type(given).__name__
        raise ValueError(f"{where} is of type {kind}: pass an image of Pillow, a file, a data: URL or an array.")
    try:
        return decode(Path(given).expanduser().read_bytes(), where)
    except OSError as error:
        raise ValueError(f"{where} cannot be read: {error.strerror or error}: {given}.") from error


def decode(content: bytes, where: str, pixels: int = PIXELS) -> Image:
    """The image in the bytes of a file. Raises ValueError if there is none, or one of more than so many pixels."""
    _needed()
    from PIL import Image as pillow
    from PIL import UnidentifiedImageError

    try:
        image = pillow.open(io.BytesIO(content), formats=FORMATS)
    except UnidentifiedImageError:
        raise ValueError(f"{where} is none that can be opened: take one of {', '.join(FORMATS)}.") from None
    except Exception as error:  # of any kind, depending on what is damaged
        raise ValueError(f"{where} is damaged: {error}.") from error
    if image.width * image.height > pixels:
        raise ValueError(
            f"{where} has {image.width} x {image.height} pixels, and at most {pixels} are taken: scale it down."
        )
    try:
        return image.convert("RGB")
    except Exception as error:
        raise ValueError(f"{where} is damaged: {error}.") from error


def data_url(url: str, where: str) -> bytes:
    """What a `data:` URL holds. Raises ValueError for one that is damaged."""
    head, comma, body = url.partition(",")
    if not comma:
        raise ValueError(f"{where} is no data: URL, which has a comma before its content.")
    content = unquote_to_bytes(body)
    if not head.endswith(";base64"):
        return content
    try:
        return base64.b64decode(content, validate=True)
    except binascii.Error as error:
        raise ValueError(f"{where} is a data: URL whose content is no base64: {error}.") from None


def _from_array(array: np.ndarray, where: str) -> Image:
    from PIL import Image as pillow

    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3:
        raise ValueError(
            f"{where} is an array of shape {array.shape} and {array.dtype}: pass one of (height, width, 3) and uint8."
        )
    return pillow.fromarray(array)


def _needed() -> None:
    """Raises ValueError, which tells how to install it, without Pillow."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise ValueError("images need Pillow: pip install 'slipstream[vision]'.") from None


# ---- parts of messages ----


def is_image_part(part: Any) -> bool:
    """Whether a part of a message is an image, as OpenAI writes it or as transformers does."""
    return isinstance(part, Mapping) and part.get("type") in ("image", "image_url", "input_image")


def image_of(part: Mapping[str, Any], where: str) -> Any:
    """What a part of a message gives as its image. Raises ValueError if it gives none."""
    given = next((part[name] for name in ("image_url", "image", "url", "path") if part.get(name) is not None), None)
    if isinstance(given, Mapping):
        given = given.get("url")
    if given is None:
        raise ValueError(
            f'{where} has a part without its image: write {{"type": "image_url", "image_url": {{"url": "data:..."}}}}.'
        )
    return given


def images_in(messages: Sequence[Any]) -> list[Mapping[str, Any]]:
    """The parts of messages that are images, in order; what is no message has none."""
    contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
    return [part for content in contents if isinstance(content, list) for part in content if is_image_part(part)]
