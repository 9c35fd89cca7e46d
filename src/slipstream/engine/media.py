"""Images and sounds as users pass them: beside a text, or as parts of the messages of a chat."""

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
"""How OpenAI and transformers call parts of messages."""

NAMES = {Modality.IMAGE: "image", Modality.AUDIO: "audio"}
"""How templates of transformers call a part, and the field that holds its content."""

EXAMPLES = {
    Modality.IMAGE: '{"type": "image_url", "image_url": {"url": "data:..."}}',
    Modality.AUDIO: '{"type": "input_audio", "input_audio": {"data": "(base64)", "format": "wav"}}',
}
"""What a part looks like, for messages."""

FIELDS = {Modality.IMAGE: "images", Modality.AUDIO: "audio"}
"""The fields of `TextWithMedia`, and of a mapping in its place."""


@dataclass(frozen=True)
class TextWithMedia:
    """A text and the images and sounds that it is about, in their order.

    Placeholders in the text say where they stand; without any, they stand before it.
    """

    text: str
    images: Sequence[Any] = ()
    audio: Sequence[Any] = ()

    @property
    def media(self) -> dict[Modality, Sequence[Any]]:
        """What there is of each kind."""
        return {modality: given for modality, name in FIELDS.items() if (given := getattr(self, name))}


def open_medium(modality: Modality, given: Any, rate: int) -> Any:
    """What a user gave for an image or a sound -> an image in RGB, or samples (n,) `rate` per second.

    Raises ValueError for what is none.
    """
    return read_sound(given, rate) if modality is Modality.AUDIO else open_image(given)


# ---- parts of messages ----


def part_modality(part: Any) -> Modality | None:
    """The kind of media that a part of a message is; None for a text, and for what is no part."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    return PART_TYPES.get(kind) if isinstance(kind, str) else None


def part_content(part: Mapping[str, Any], where: str) -> Any:
    """What a part of a message gives as its image or sound. Raises ValueError if it gives nothing."""
    modality = PART_TYPES[part["type"]]
    name = NAMES[modality]
    fields = (f"{name}_url", f"input_{name}", name, "url", "path")
    given = next((part[field] for field in fields if part.get(field) is not None), None)
    if isinstance(given, Mapping) and isinstance(given.get("data"), str):
        return base64_content(given["data"], f"{where} has a part whose data")
    if isinstance(given, Mapping):
        given = given.get("url")
    if given is None:
        raise ValueError(f"{where} has a part without its {name}: write {EXAMPLES[modality]}.")
    return given


def media_part(modality: Modality, content: Any) -> dict[str, Any]:
    """A part of a message as templates of transformers know it, without anything else in it."""
    return {"type": NAMES[modality], NAMES[modality]: content}


def media_in(messages: Sequence[Any]) -> Iterator[Modality]:
    """The kinds of the parts of messages that are no text, in order; what is no message has none."""
    contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return (modality for part in parts if (modality := part_modality(part)))
