"""Reads images and sounds that users pass with a text or in a chat; `TextLimit` refuses what cannot fit a model."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from slipstream.core.media import Modality, base64_content, open_file
from slipstream.core.values import PromptTooLong
from slipstream.engine.sounds import read_sound

if TYPE_CHECKING:
    from PIL.Image import Image


PIXELS = 1 << 26
"""The greatest number of pixels of an image that is opened, because small files can hold very large images."""

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""The file formats that are opened; Pillow's decoders of other formats are left out because they are rarely used."""


def open_image(image: Any) -> Image:
    """Open an image: a Pillow image, file, `data:` URL, bytes, or uint8 array (height, width, 3) -> an RGB image.
    Raises ValueError for anything else, for damaged files, and for encoded images of more than `PIXELS` pixels."""
    pillow = _pillow()
    if isinstance(image, pillow.Image.Image):
        try:
            return image.convert("RGB")
        except Exception as error:
            raise ValueError(f"an image is damaged: {error}.") from error
    if isinstance(image, np.ndarray | Tensor):
        array = np.asarray(image)
        if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3 or not array.size:
            about = f"an image is an array of shape {array.shape} and {array.dtype}"
            raise ValueError(f"{about}: pass one of (height, width, 3) and uint8.")
        return pillow.Image.fromarray(array)
    if not isinstance(image, bytes | str | Path):
        kind = type(image).__name__
        raise ValueError(f"an image is of type {kind}: pass an image of Pillow, a file, a data: URL or an array.")
    with open_file(image, "an image") as file:
        return decode(file.read(), "an image")


def decode(content: bytes, where: str, pixels: int = PIXELS) -> Image:
    """Decode the bytes of an image file of at most so many pixels -> an RGB image, turned as its EXIF data say."""
    pillow = _pillow()
    try:
        image = pillow.Image.open(io.BytesIO(content), formats=FORMATS)
        if image.width * image.height <= pixels:
            return pillow.ImageOps.exif_transpose(image).convert("RGB")
        found = f"{image.width} x {image.height}"
    except pillow.UnidentifiedImageError:
        raise ValueError(f"{where} is none that can be opened: take one of {', '.join(FORMATS)}.") from None
    except pillow.Image.DecompressionBombError:
        found = "far too many"
    except Exception as error:  # Pillow raises errors of any type for damaged files
        raise ValueError(f"{where} is damaged: {error}.") from error
    raise ValueError(f"{where} has {found} pixels, and at most {pixels} are taken: scale it down.")


def _pillow() -> Any:
    try:
        import PIL.ImageOps
    except ImportError:
        raise ValueError("images need Pillow: pip install 'slipstream[vision]'.") from None
    return PIL


PART_TYPES = {  # the kind of media by the "type" of a message part, in the names of OpenAI and of transformers
    **dict.fromkeys(("image", "image_url", "input_image"), Modality.IMAGE),
    **dict.fromkeys(("audio", "audio_url", "input_audio"), Modality.AUDIO),
}
NAMES = {Modality.IMAGE: "image", Modality.AUDIO: "audio"}
"""The "type" of a part in transformers' chat templates, which is also the field that holds its content."""

EXAMPLES = {  # An example of a part of each kind, for error messages
    Modality.IMAGE: '{"type": "image_url", "image_url": {"url": "data:..."}}',
    Modality.AUDIO: '{"type": "input_audio", "input_audio": {"data": "(base64)", "format": "wav"}}',
}
FIELDS = {Modality.IMAGE: "images", Modality.AUDIO: "audio"}
"""The field of `TextWithMedia` (or of a mapping in its place) that holds each kind of media."""


@dataclass(frozen=True)
class TextWithMedia:
    """A text prompt with images and sounds, in order, at its placeholders, or before a text without any."""

    text: str
    images: Sequence[Any] = ()
    audio: Sequence[Any] = ()

    @property
    def media(self) -> dict[Modality, Sequence[Any]]:
        """The images and sounds by kind; kinds without any are left out."""
        return {modality: items for modality, name in FIELDS.items() if (items := getattr(self, name))}


def open_medium(modality: Modality, medium: Any, rate: int) -> Any:
    """Open an image or a sound in any form that users pass -> an RGB image, or samples (n,), `rate` per second."""
    return read_sound(medium, rate) if modality is Modality.AUDIO else open_image(medium)


def part_modality(part: Any) -> Modality | None:
    """Return the kind of media of a message part; None for text, and for a value that is not a part."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    return PART_TYPES.get(kind) if isinstance(kind, str) else None


def part_content(part: Mapping[str, Any], where: str) -> Any:
    modality = PART_TYPES[part["type"]]
    name = NAMES[modality]
    fields = (f"{name}_url", f"input_{name}", name, "url", "path")
    content = next((part[field] for field in fields if part.get(field) is not None), None)
    if isinstance(content, Mapping) and isinstance(content.get("data"), str):
        return base64_content(content["data"], f"{where} has a part whose data")
    if isinstance(content, Mapping):
        content = content.get("url")
    if content is None:
        raise ValueError(f"{where} has a part without its {name}: write {EXAMPLES[modality]}.")
    return content


def media_part(modality: Modality, content: Any) -> dict[str, Any]:
    return {"type": NAMES[modality], NAMES[modality]: content}


def media_in(messages: Sequence[Any]) -> Iterator[Modality]:
    contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return (modality for part in parts if (modality := part_modality(part)))


def in_parts(message: Mapping[str, Any], rate: int) -> dict[str, Any]:
    """Return a message in the form of processors' chat templates: content in parts, images and sounds opened."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": [{"type": "text", "text": content}]}
    parts = [
        media_part(modality, open_medium(modality, part_content(part, "the prompt"), rate))
        if (modality := part_modality(part))
        else part
        for part in content or ()
    ]
    return {**message, "content": parts} if parts else dict(message)


def contents(messages: Sequence[Any]) -> dict[Modality, list[Any]]:
    """Return the images and sounds in messages with contents in parts, in order."""
    parts = [part for message in messages for part in message["content"]]
    return {kind: [part[name] for part in parts if part.get("type") == name] for kind, name in NAMES.items()}


def in_text(message: Mapping[str, Any], mark: Callable[[Modality], str]) -> dict[str, Any]:
    """Return a message with its content in parts as a text, with a mark for each image and sound."""
    parts = [(part_modality(part), part) for part in message["content"]]
    return {**message, "content": "".join(mark(kind) if kind else part["text"] for kind, part in parts)}


@dataclass(frozen=True)
class TextLimit:
    """The limit of a text's characters for a model that holds `tokens` tokens, each of `longest` characters at most.
    Tokenizing takes time and memory for every character; so a text that cannot fit is refused before."""

    tokens: int
    longest: int

    @staticmethod
    def of(tokenizer: Any, tokens: int | None) -> TextLimit | None:
        if not tokens or not hasattr(tokenizer, "get_vocab"):
            return None
        return TextLimit(tokens, max(map(len, tokenizer.get_vocab()), default=1))

    def check(self, value: Any, where: str) -> None:
        """Raise ValueError if the texts in a value, but images and sounds, together have too many characters."""
        count, left, most = 0, [value], self.tokens * self.longest
        while left:
            each = left.pop()
            if isinstance(each, str):
                count += len(each)
            elif isinstance(each, Mapping) and not part_modality(each):
                left += (part for name, part in each.items() if name not in FIELDS.values())
            elif isinstance(each, list | tuple):
                left += each
        if count > most:
            raise PromptTooLong(
                f"{where} has {count} characters, but the model holds {self.tokens} tokens of at most {self.longest} "
                f"characters each: shorten it to at most {most} characters."
            )
