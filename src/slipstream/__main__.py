"""The `slipstream` command, which `python -m slipstream` runs too."""

from __future__ import annotations

import signal
import sys

INTERRUPTED = 130
"""The exit code after Ctrl-C or SIGTERM."""


def main() -> None:
    """Run the command; a signal while its own imports run ends it in one line, like one that comes later."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        from slipstream.cli import main as run

        run()
    except KeyboardInterrupt:
        print("slipstream: interrupted.", file=sys.stderr)
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
