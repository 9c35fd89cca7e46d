"""Which hosts requests may name, as protection against DNS rebinding."""

import pytest

from slipstream.serve.settings import Hosts

HERE = ("localhost", "localhost:8000", "LOCALHOST.", "127.0.0.1:8000", "127.9.9.9", "[::1]:8000", "[::1]", "")
ELSEWHERE = ("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "2130706433", "x")
ADDRESSES = ("192.168.1.5:8000", "[fe80::1]:80", "8.8.8.8")


@pytest.mark.parametrize(
    ("bound", "allowed", "also"),
    [
        ("127.0.0.1", (), ()),
        ("::1", (), ()),
        ("0.0.0.0", (), ADDRESSES),
        ("::", (), ADDRESSES),
        ("192.168.1.5", (), ("192.168.1.5:8000", "192.168.1.5")),
        ("box.lan", (), ("box.lan", "BOX.lan:80")),
        ("127.0.0.1", ("evil.example",), ("evil.example", "evil.example:8000")),
        ("127.0.0.1", ("*",), (*ELSEWHERE, *ADDRESSES)),
    ],
)
def test_a_request_may_name_the_server_and_what_was_allowed(
    bound: str, allowed: tuple[str, ...], also: tuple[str, ...]
) -> None:
    hosts = Hosts.of(bound, allowed)
    for header in (*HERE, *ELSEWHERE, *ADDRESSES, *also):
        assert hosts.allow(header) == (header in (*HERE, *also)), header


@pytest.mark.parametrize("name", ["http://a", "a:80", "", "a b", "*.a"])
def test_an_allowed_host_is_a_name(name: str) -> None:
    with pytest.raises(ValueError, match="--allow-host"):
        Hosts.of("127.0.0.1", [name])
