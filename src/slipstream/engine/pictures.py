"""Opens images that users pass: Pillow images, files, `data:` URLs, bytes or arrays; errors are one sentence each."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from slipstream.engine.data_urls import open_file

if TYPE_CHECKING:
    from PIL.Image import Image

PIXELS = 1 << 26
"""The greatest number of pixels of an image that is opened, because small files can hold very large images."""

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""The file formats that are opened; Pillow's decoders of other formats are left out because they are rarely used."""


def open_image(image: Any, where: str = "an image") -> Image:
    """Open an image: a Pillow image, file, `data:` URL, bytes, or uint8 array (height, width, 3) -> an RGB image.

    Raises ValueError for anything else, for damaged files, and for encoded images of more than `PIXELS` pixels.
    """
    _needed()
    from PIL import Image as pillow

    if isinstance(image, pillow.Image):
        return image.convert("RGB")
    if isinstance(image, np.ndarray | Tensor):
        return _from_array(np.asarray(image), where)
    if not isinstance(image, bytes | str | Path):
        kind = type(image).__name__
        raise ValueError(f"{where} is of type {kind}: pass an image of Pillow, a file, a data: URL or an array.")
    with open_file(image, where) as file:
        return decode(file.read(), where)


def decode(content: bytes, where: str, pixels: int = PIXELS) -> Image:
    """Decode the bytes of an image file of at most so many pixels -> an RGB image."""
    _needed()
    from PIL import Image as pillow
    from PIL import UnidentifiedImageError

    try:
        image = pillow.open(io.BytesIO(content), formats=FORMATS)
    except UnidentifiedImageError:
        raise ValueError(f"{where} is none that can be opened: take one of {', '.join(FORMATS)}.") from None
    except Exception as error:  # Pillow raises errors of any type for damaged files
        raise ValueError(f"{where} is damaged: {error}.") from error
    if image.width * image.height > pixels:
        raise ValueError(
            f"{where} has {image.width} x {image.height} pixels, and at most {pixels} are taken: scale it down."
        )
    try:
        return image.convert("RGB")
    except Exception as error:
        raise ValueError(f"{where} is damaged: {error}.") from error


def _from_array(array: np.ndarray, where: str) -> Image:
    from PIL import Image as pillow

    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3:
        raise ValueError(
            f"{where} is an array of shape {array.shape} and {array.dtype}: pass one of (height, width, 3) and uint8."
        )
    return pillow.fromarray(array)


def _needed() -> None:
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise ValueError("images need Pillow: pip install 'slipstream[vision]'.") from None
