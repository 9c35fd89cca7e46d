"""The `slipstream` command, which `python -m slipstream` runs too."""

import gc
import sys

from slipstream.core.signals import INTERRUPTED, end_commands


def main() -> None:
    """Run the command; a signal while its own imports run ends it in one line, like one that comes later."""
    gc.set_threshold(200_000)  # what is imported stays: to look through it again and again takes a fifth of the time
    end_commands()
    try:
        from slipstream.cli import main as run

        run()
    except KeyboardInterrupt:
        print("slipstream: interrupted.", file=sys.stderr)
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
