"""Opens the images and sounds that clients send: in the request itself, or images at hosts that the operator allowed.

Files of the server's machine are never read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from slipstream.core.media import Modality, only
from slipstream.engine.data_urls import data_url
from slipstream.engine.media import media_in, media_part, part_content, part_modality
from slipstream.engine.pictures import decode
from slipstream.engine.sounds import read_sound
from slipstream.serve.faults import BadRequest
from slipstream.serve.fetching import fetch
from slipstream.serve.state import ServerState


def with_open_media(messages: Sequence[dict[str, Any]], state: ServerState) -> list[dict[str, Any]]:
    """Return the messages with their images and sounds opened, so that no URL or path is passed on.

    Raises BadRequest for media that are not allowed, too many, damaged, or not supported by the model.
    """
    counts, limits = Counter(media_in(messages)), state.settings.limits
    read = state.engine.media.modalities if state.engine.media else frozenset[Modality]()
    for modality, most in ((Modality.IMAGE, limits.images), (Modality.AUDIO, limits.sounds)):
        count = counts[modality]
        if count and modality not in read:
            raise BadRequest(
                f"messages holds {modality}, but {state.model} reads {only(read)}: leave them out.", "messages"
            )
        if count > most:
            raise BadRequest(f"messages holds {count} {modality}, but at most {most} are taken.", "messages")
    return [_opened(message, state) for message in messages] if counts else list(messages)


def _opened(message: dict[str, Any], state: ServerState) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": [_part(part, state) for part in content]}


def _part(part: dict[str, Any], state: ServerState) -> dict[str, Any]:
    modality = part_modality(part)
    if modality is None:
        return part
    try:
        content = part_content(part, "messages")
        return media_part(modality, _sound(content, state) if modality is Modality.AUDIO else _image(content, state))
    except ValueError as error:
        raise BadRequest(str(error), "messages") from None


def _sound(data: bytes, state: ServerState) -> Any:
    assert state.engine.media is not None and isinstance(data, bytes), "the schema takes data alone"
    return read_sound(data, state.engine.media.rate, state.settings.limits.sound_seconds)


def _image(url: str, state: ServerState) -> Any:
    settings = state.settings
    if url.startswith("data:"):
        content = data_url(url, "an image of messages")
    else:
        content = fetch(url, settings.image_hosts, settings.limits.image_bytes)
    return decode(content, "an image of messages", settings.limits.image_pixels)
