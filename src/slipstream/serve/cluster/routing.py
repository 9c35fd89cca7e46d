"""Which requests belong to the same replica: those whose prompts begin alike."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from slipstream.text.jsontext import json_text

BEGINNING = 256
"""Characters or token ids at the beginning of a prompt by which a replica is chosen: about what a prefix cache keeps in
one piece. Shorter prompts are read so fast that their place does not matter."""

QUESTION = 4096
"""Characters of a chat, up to its first question, by which a replica is chosen."""


def routing_key(body: bytes) -> str:
    """What requests with the same beginning have in common: a digest of it and of their salt, "" where there is none.

    Turns of one conversation have it in common, and so have questions about one long text: they find on their replica
    what it has read of them.
    """
    try:
        record = json.loads(body)
        beginning = _beginning(next((record[name] for name in ("messages", "prompt", "input") if name in record), None))
        salt = record.get("cache_salt")
    except (ValueError, TypeError, AttributeError, RecursionError):
        return ""
    return hashlib.sha256(json_text([salt, beginning]).encode()).hexdigest()[:32] if beginning else ""


def _beginning(prompt: Any) -> Any:
    if isinstance(prompt, str) or not prompt or not isinstance(prompt[0], dict):
        return prompt and prompt[:BEGINNING]
    questions = (place for place, message in enumerate(prompt) if message.get("role") == "user")
    return json_text(prompt[: next(questions, 0) + 1])[:QUESTION]
