"""What servers share: listening sockets, and lines on standard error."""

import socket
import sys
from contextlib import suppress


def listen(host: str, port: int) -> socket.socket:
    """Bind a listening socket; port 0 takes any free one. Raises OSError in one sentence if that fails."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise OSError(f"cannot listen at {host}:{port}: {why}; choose another --port or --host.") from None


def url_of(listener: socket.socket, scheme: str = "http") -> str:
    host, port = listener.getsockname()[:2]
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def say(text: str) -> None:
    with suppress(OSError):  # stderr is gone
        print(f"slipstream: {text}", file=sys.stderr, flush=True)
