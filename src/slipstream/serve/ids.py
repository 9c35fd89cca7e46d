"""The ids of answers, requests and calls of tools."""

from __future__ import annotations

from random import Random

_IDS = Random()  # seeded by the operating system; asking that each time costs a wait for the interpreter's lock


def new_id() -> str:
    return f"{_IDS.getrandbits(128):032x}"


def new_call_id() -> str:
    """Return a new id for a call of a tool: of nine characters, since the chat templates of Mistral take no others."""
    return f"{_IDS.getrandbits(36):09x}"
