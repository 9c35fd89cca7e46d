"""`ServeSettings`: the settings of a server's operator, such as its keys, its limits, what it may log, and its names.

The names by which it may be addressed are a check against DNS rebinding: a page on another site can point its own name
at this machine, and its scripts then reach a server that asks for no key; but their requests carry that name in the
header `Host`. An address is no name that others can point elsewhere.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

from slipstream.core.values import whole_number

ANY = "*"  # name that allows all


@dataclass(frozen=True)
class Hosts:
    """The hosts that requests may name: some names and addresses, and perhaps every address."""

    names: frozenset[str]
    addresses: bool

    @staticmethod
    def of(bound: str, allowed: Sequence[str] = ()) -> Hosts:
        """Return the hosts of a server that is bound to an address: itself, this machine, and those allowed besides.
        One that is bound to all addresses of its machine may be addressed by any. Raises ValueError for no host."""
        for name in allowed:
            if name != ANY and not re.fullmatch(r"[A-Za-z0-9._-]+", name) and not _is(name):
                raise ValueError(f"--allow-host {name!r} is no host: write its name, without a port, or * for any.")
        return Hosts(frozenset(map(str.lower, ("localhost", bound, *allowed))), _is(bound, "is_unspecified"))

    def allow(self, header: str) -> bool:
        """Return whether a request with this header `Host` is served; clients that send none are no browsers."""
        host = re.sub(r":[0-9]*$", "", header).strip("[]").rstrip(".").lower()
        known = {host, ANY} & self.names or _is(host, "is_loopback")
        return bool(not header or known or (self.addresses and _is(host)))


def _is(host: str, what: str = "version") -> bool:
    try:
        return bool(getattr(ip_address(host), what))
    except ValueError:
        return False


@dataclass(frozen=True)
class Limits:
    """The limits of one request. Raises ValueError for a limit that is no whole number of at least 1."""

    body_bytes: int = 16 << 20
    values: int = 1 << 18
    prompts: int = 128
    samples: int = 32
    logprobs: int = 20
    stops: int = 16
    bias: int = 1024
    grammar_bytes: int = 64 << 10
    schema_depth: int = 64
    images: int = 16
    image_bytes: int = 16 << 20
    image_pixels: int = 1 << 24
    sounds: int = 16
    sound_seconds: int = 1800

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            whole_number(name, getattr(self, name), 1)


@dataclass(frozen=True)
class ServeSettings:
    """How a server treats its clients.

    `names` are the names clients may use for the model; answers have the first. `keys` maps each bearer key to the name
    of its tenant; one must be sent (empty: no key is required). `max_queue` requests may wait besides those that run.
    `lossless` refuses requests that would change the target's law. `log_prompts` writes prompts and answers to the
    access log, which omits them otherwise. Images are fetched from `image_hosts` (names, or name:port) and from nowhere
    else. Requests may name one of the `hosts` in the header `Host` (None: any). `draft` is the draft that runs. Pages
    in browsers may use the server from `origins` (as https://example.org; "*" is all).
    """

    names: tuple[str, ...]
    keys: Mapping[str, str] = field(default_factory=dict)
    max_queue: int = 1024
    lossless: bool = False
    log_prompts: bool = False
    limits: Limits = field(default_factory=Limits)
    image_hosts: tuple[str, ...] = ()
    hosts: Hosts | None = None
    draft: str | None = None
    origins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        whole_number("max_queue", self.max_queue, 1)
        for host in self.image_hosts:
            if not re.fullmatch(r"[A-Za-z0-9.-]+(:[0-9]{1,5})?", host):
                raise ValueError(f"{host!r} is no host: write its name, as images.example.org or 127.0.0.1:8080.")
        for origin in self.origins:
            if not re.fullmatch(r"\*|null|[a-z][a-z0-9+.-]*://[A-Za-z0-9.\[\]:_-]+", origin):
                raise ValueError(f"{origin!r} is no origin: write https://example.org:8080, without a path, or *.")

    def tenant(self, key: str) -> str | None:
        """Return the tenant of a bearer key; None for an unknown key. All keys are compared, each in constant time."""
        tenants = [name for known, name in self.keys.items() if secrets.compare_digest(known.encode(), key.encode())]
        return tenants[0] if tenants else None


def read_keys(path: str | Path) -> dict[str, str]:
    """Read bearer keys from a file -> the tenant of each key.

    A line is a key, or a tenant's name and a key with a space between; blank lines and those that begin with # are
    skipped. Raises ValueError for other lines, for a key that is given twice, and for a file without keys.
    """
    tenants: dict[str, str] = {}
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        words = line.split()
        if not words or line.lstrip().startswith("#"):
            continue
        if len(words) > 2:
            raise ValueError(f"{path}, line {number}: a line is a key, or a tenant's name and a key.")
        if words[-1] in tenants:
            raise ValueError(f"{path}, line {number}: this key stands there twice.")
        tenants[words[-1]] = words[0] if len(words) == 2 else f"key {len(tenants) + 1}"
    if not tenants:
        raise ValueError(f"{path} holds no key: write one per line.")
    return tenants
