"""The names by which a server may be addressed: a check against DNS rebinding.

A page on another site can point its own name at this machine, and its scripts then reach a server that asks for no key;
but their requests carry that name in the header `Host`. An address is no name that others can point elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address

ANY = "*"
"""The name that allows all."""


@dataclass(frozen=True)
class Hosts:
    """The hosts that requests may name: some names and addresses, and perhaps every address."""

    names: frozenset[str]
    addresses: bool

    @staticmethod
    def of(bound: str, allowed: Sequence[str] = ()) -> Hosts:
        """Return the hosts of a server that is bound to an address: itself, this machine, and those allowed besides.

        One that is bound to all addresses of its machine may be addressed by any. Raises ValueError for no host.
        """
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
    """Return whether a host is an address, and a loopback or an unspecified one if asked."""
    try:
        return bool(getattr(ip_address(host), what))
    except ValueError:
        return False
