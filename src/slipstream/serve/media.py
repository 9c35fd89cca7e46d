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
    return {**message, "content": [_part(part, state) for part in content]} if isinstance(content, list) else message


def _part(part: dict[str, Any], state: ServerState) -> dict[str, Any]:
    """Return a part of a message, opened if it is an image, from a `data:` URL or an allowed host, or a sound."""
    modality, limits = part_modality(part), state.settings.limits
    if modality is None:
        return part
    with state.refusing("messages"):
        found = part_content(part, "messages")
        if modality is Modality.AUDIO:
            assert state.engine.media is not None and isinstance(found, bytes), "the schema takes data alone"
            return media_part(modality, read_sound(found, state.engine.media.rate, limits.sound_seconds))
        if found.startswith("data:"):
            content = data_url(found, "an image of messages")
        else:
            content = fetch(found, state.settings.image_hosts, limits.image_bytes)
        return media_part(modality, decode(content, "an image of messages", limits.image_pixels))
