"""Images that clients send: in `data:` URLs, or at hosts that the operator allowed. Never files of this machine."""

from __future__ import annotations

from collections.abc import Sequence
from http.client import HTTPException
from time import monotonic
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import (
    HTTPDefaultErrorHandler,
    HTTPErrorProcessor,
    HTTPHandler,
    HTTPRedirectHandler,
    HTTPSHandler,
    OpenerDirector,
    Request,
)

from slipstream.engine.pictures import data_url, decode, image_of, images_in, is_image_part
from slipstream.serve.faults import BadRequest
from slipstream.serve.state import ServerState

SECONDS = 10.0
"""How long an image may take to come."""

REDIRECTS = 3
PORTS = {"http": 80, "https": 443}
PIECE = 1 << 16


def with_open_images(messages: Sequence[dict[str, Any]], state: ServerState) -> list[dict[str, Any]]:
    """The messages with their images opened, so that no address or path goes any further.

    Raises BadRequest for images that may not or cannot be read, and for a model that reads text only.
    """
    count, limits = len(images_in(messages)), state.settings.limits
    if not count:
        return list(messages)
    if state.engine.vision is None:
        raise BadRequest(f"messages holds an image, but {state.model} reads text only: leave it out.", "messages")
    if count > limits.images:
        raise BadRequest(f"messages holds {count} images, but at most {limits.images} are taken.", "messages")
    return [_opened(message, state) for message in messages]


def _opened(message: dict[str, Any], state: ServerState) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = [
        {"type": "image", "image": _image(image_of(part, "messages"), state)} if is_image_part(part) else part
        for part in content
    ]
    return {**message, "content": parts}


def _image(url: str, state: ServerState) -> Any:
    settings = state.settings
    try:
        if url.startswith("data:"):
            content = data_url(url, "an image of messages")
        else:
            content = fetch(url, settings.image_hosts, settings.limits.image_bytes)
        return decode(content, "an image of messages", settings.limits.image_pixels)
    except ValueError as error:
        raise BadRequest(str(error), "messages") from None


# ---- images of other hosts ----


def fetch(url: str, hosts: Sequence[str], most: int, seconds: float = SECONDS) -> bytes:
    """At most so many bytes from one of some hosts. Raises ValueError for others, also where one redirects to them."""
    check_host(url, hosts)
    opener, until = OpenerDirector(), monotonic() + seconds
    for handler in (HTTPHandler, HTTPSHandler, HTTPErrorProcessor, HTTPDefaultErrorHandler):
        opener.add_handler(handler())  # and none for files, other protocols or proxies
    opener.add_handler(_Within(hosts))
    try:
        with opener.open(Request(url, headers={"User-Agent": "slipstream"}), timeout=seconds) as response:
            return _read(response, most, until)
    except HTTPError as error:
        error.close()
        raise ValueError(f"an image of messages cannot be fetched: its host answers {error.code}.") from None
    except (OSError, HTTPException):
        raise ValueError("an image of messages cannot be fetched: its host does not answer as hosts do.") from None


def check_host(url: str, hosts: Sequence[str]) -> None:
    """Raises ValueError unless a web address is at one of the hosts, at the usual port if none is named."""
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


class _Within(HTTPRedirectHandler):
    """Follows redirects to allowed hosts."""

    max_redirections = REDIRECTS

    def __init__(self, hosts: Sequence[str]) -> None:
        self.hosts = hosts

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        """The next request. Raises ValueError for one to another host."""
        check_host(newurl, self.hosts)
        fp.close()  # what else the answer holds is of no use, and may be long
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _read(response: Any, most: int, until: float) -> bytes:
    content = bytearray()
    while piece := response.read1(PIECE):
        content += piece
        if len(content) > most:
            raise ValueError(f"an image of messages is longer than the {most} bytes that are fetched.")
        if monotonic() > until:
            raise ValueError("an image of messages takes too long to come.")
    return bytes(content)
