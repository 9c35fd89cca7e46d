"""The `slipstream` command, which `python -m slipstream` runs too."""

from __future__ import annotations

import sys

from slipstream.core.signals import INTERRUPTED, end_commands


def main() -> None:
    """Run the command; a signal while its own imports run ends it in one line, like one that comes later."""
    end_commands()
    try:
        from slipstream.cli import main as run

        run()
    except KeyboardInterrupt:
        print("slipstream: interrupted.", file=sys.stderr)
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
