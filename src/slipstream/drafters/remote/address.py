"""`Settings`: the address of a draft server, such as `tcp://host:port`, and the options for using it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from urllib.parse import urlsplit

from slipstream.core.values import is_finite
from slipstream.drafters.remote.messages import MOST_CANDIDATES


@dataclass(frozen=True)
class Settings:
    """The address of a draft server, and how it is used.

    `timeout`: the seconds that a round waits for an answer. `trust`: use the law q that the server reports; without
    it, the server's tokens are guesses. `top`: the number of most probable tokens sent of a law. `ahead`: let the
    server draft the next round while the target verifies. `quiet`: the seconds without any message after which the
    connection is closed. `backoff`: the seconds before the first attempt to reconnect, doubled each time up to
    `longest_backoff`. Raises ValueError for impossible values.
    """

    host: str
    port: int
    tls: bool = False
    key: bytes = b""
    ca_file: str | None = None
    timeout: float = 1.0
    trust: bool = False
    top: int = 64
    ahead: bool = True
    quiet: float = 10.0
    backoff: float = 0.1
    longest_backoff: float = 5.0

    def __post_init__(self) -> None:
        if not (is_finite(self.timeout) and 0 < self.timeout <= 600):
            raise ValueError(
                f"timeout-ms={1000 * self.timeout:g} is not possible: write milliseconds above 0, at most 600000."
            )
        if not 1 <= self.top <= MOST_CANDIDATES:
            raise ValueError(f"top={self.top} is not possible: 1 to {MOST_CANDIDATES} candidates can travel.")
        assert min(self.quiet, self.backoff, self.longest_backoff) > 0 and not math.isnan(self.quiet)

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'tls' if self.tls else 'tcp'}://{host}:{self.port}"


def split_address(kind: str, value: str) -> tuple[str, int]:
    try:
        parts = urlsplit(f"{kind}:{value}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or not port or not value.startswith("//") or parts.path or parts.username:
        raise ValueError(
            f"draft '{kind}:{value}' is not possible: write {kind}://HOST:PORT, as {kind}://10.0.0.2:8100."
        )
    return host, port
