"""Fetches images from the hosts that the operator allowed, and from no others."""

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

SECONDS = 10.0
"""The timeout for fetching an image, in seconds."""

REDIRECTS = 3
PORTS = {"http": 80, "https": 443}
PIECE = 1 << 16


def fetch(url: str, hosts: Sequence[str], most: int, seconds: float = SECONDS) -> bytes:
    """Fetch at most `most` bytes from one of the allowed hosts.

    Raises ValueError for other hosts (redirects included), longer answers, timeouts and HTTP errors.
    """
    check_host(url, hosts)
    opener, until = OpenerDirector(), monotonic() + seconds
    for handler in (HTTPHandler, HTTPSHandler, HTTPErrorProcessor, HTTPDefaultErrorHandler):
        opener.add_handler(handler())  # no handlers for files, other protocols or proxies
    opener.add_handler(_Within(hosts))
    try:
        with opener.open(Request(url, headers={"User-Agent": "slipstream"}), timeout=seconds) as response:
            content = bytearray()
            while piece := response.read1(PIECE):
                content += piece
                if len(content) > most:
                    raise ValueError(f"an image of messages is longer than the {most} bytes that are fetched.")
                if monotonic() > until:
                    raise ValueError("an image of messages takes too long to come.")
            return bytes(content)
    except HTTPError as error:
        error.close()
        raise ValueError(f"an image of messages cannot be fetched: its host answers {error.code}.") from None
    except (OSError, HTTPException):
        raise ValueError("an image of messages cannot be fetched: its host does not answer as hosts do.") from None


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


class _Within(HTTPRedirectHandler):
    """Follows redirects to allowed hosts only."""

    max_redirections = REDIRECTS

    def __init__(self, hosts: Sequence[str]) -> None:
        self.hosts = hosts

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        """Return the request to the redirect's address. Raises ValueError for one at another host."""
        check_host(newurl, self.hosts)
        fp.close()  # the body of a redirect is not needed, and may be long
        return super().redirect_request(req, fp, code, msg, headers, newurl)
