"""Routing of requests: those whose prompts have the same beginning go to the same replica."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from slipstream.text.jsontext import json_text

BEGINNING = 256
"""The number of characters or token ids at the beginning of a prompt by which a replica is chosen.

It is about the size of a block of the prefix cache; shorter prompts are read so fast that the choice does not matter.
"""

QUESTION = 4096
"""The greatest number of characters of a chat, up to its first user message, by which a replica is chosen."""


def routing_key(body: bytes) -> str:
    """Return a digest of the beginning of a request's prompt and of its cache salt; "" if it has no prompt.

    The turns of one conversation have the same key, and so do questions about one long text: they go to the replica
    whose prefix cache has their beginning.
    """
    try:
        record = json.loads(body)
        prompt = next((record[name] for name in ("messages", "prompt", "input") if name in record), None)
        beginning: Any
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
            questions = (place for place, message in enumerate(prompt) if message.get("role") == "user")
            beginning = json_text(prompt[: next(questions, 0) + 1])[:QUESTION]
        else:
            beginning = prompt and prompt[:BEGINNING]
        salt = record.get("cache_salt")
    except (ValueError, TypeError, AttributeError, RecursionError):
        return ""
    return hashlib.sha256(json_text([salt, beginning]).encode()).hexdigest()[:32] if beginning else ""
