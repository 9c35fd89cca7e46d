"""The ids of answers and requests."""

from __future__ import annotations

from random import Random

_IDS = Random()  # seeded by the operating system; asking that each time costs a wait for the interpreter's lock


def new_id() -> str:
    """Return a new id of 32 hexadecimal digits."""
    return f"{_IDS.getrandbits(128):032x}"
