"""Reads images and sounds that users pass with a text, or as parts of the messages of a chat."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.core.media import Modality
from slipstream.engine.data_urls import base64_content
from slipstream.engine.pictures import open_image
from slipstream.engine.sounds import read_sound

PART_TYPES = {
    **dict.fromkeys(("image", "image_url", "input_image"), Modality.IMAGE),
    **dict.fromkeys(("audio", "audio_url", "input_audio"), Modality.AUDIO),
}
"""The kind of media by the "type" of a message part, in the names of OpenAI and of transformers."""

NAMES = {Modality.IMAGE: "image", Modality.AUDIO: "audio"}
"""The "type" of a part in transformers' chat templates, which is also the field that holds its content."""

EXAMPLES = {
    Modality.IMAGE: '{"type": "image_url", "image_url": {"url": "data:..."}}',
    Modality.AUDIO: '{"type": "input_audio", "input_audio": {"data": "(base64)", "format": "wav"}}',
}
"""An example of a part of each kind, for error messages."""

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


# ---- parts of messages ----


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
