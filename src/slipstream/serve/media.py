"""Opens the images and sounds that clients send: in the request itself, or images at hosts that the operator allowed.

Files of the server's machine are never read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

import httpx

from slipstream.core.media import Modality, data_url, only
from slipstream.engine.media import decode, media_in, media_part, part_content, part_modality
from slipstream.engine.sounds import read_sound
from slipstream.serve.faults import BadRequest
from slipstream.serve.state import ServerState

SECONDS = 10.0  # timeout for fetching an image, in seconds
REDIRECTS = 3
PORTS = {"http": 80, "https": 443}
AS_IT_IS = {"User-Agent": "slipstream", "Accept-Encoding": "identity"}


def fetch(url: str, hosts: Sequence[str], most: int, seconds: float = SECONDS) -> bytes:
    """Fetch at most `most` bytes from one of the allowed hosts.

    Raises ValueError for other hosts (redirects included), longer answers, timeouts and HTTP errors.
    """
    content, until = bytearray(), monotonic() + seconds
    try:
        with httpx.Client(timeout=seconds, trust_env=False) as client:  # without proxies
            for _ in range(1 + REDIRECTS):
                check_host(url, hosts)
                with client.stream("GET", url, headers=AS_IT_IS) as response:
                    if response.next_request is not None:  # the body of a redirect is not read: it may be long
                        url = str(response.next_request.url)
                        continue
                    if not response.is_success:
                        code = response.status_code
                        raise ValueError(f"an image of messages cannot be fetched: its host answers {code}.")
                    for piece in response.iter_raw():
                        content += piece
                        if len(content) > most:
                            raise ValueError(f"an image of messages is longer than the {most} bytes that are fetched.")
                        if monotonic() > until:
                            raise ValueError("an image of messages takes too long to come.")
                    return bytes(content)
    except (httpx.HTTPError, httpx.InvalidURL):
        raise ValueError("an image of messages cannot be fetched: its host does not answer as hosts do.") from None
    raise ValueError("an image of messages cannot be fetched: its host redirects too often.")


def check_host(url: str, hosts: Sequence[str]) -> None:
    """Raises ValueError unless a web address is at one of the hosts; a host without a port allows the default port."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ValueError("an image of messages has an address that is none: send a data: URL.") from None
    if parts.scheme not in PORTS or not parts.hostname:
        raise ValueError("an image of messages is neither a data: URL nor a web address: send one of these.")
    usual = port in (None, PORTS[parts.scheme])
    names = {f"{parts.hostname}:{port or PORTS[parts.scheme]}", *([parts.hostname] if usual else [])}
    if parts.username is not None or names.isdisjoint(host.lower() for host in hosts):
        raise ValueError(
            "an image of messages is at a host that this server does not fetch from: send it as a data: URL."
        )


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
    opened = [dict(message) for message in messages]
    for message in opened if counts else ():
        if isinstance(content := message.get("content"), list):
            message["content"] = [_part(part, state) for part in content]
    return opened


def _part(part: dict[str, Any], state: ServerState) -> dict[str, Any]:
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
