"""`Scale`, the number of replicas of a server, and the key by which requests choose one."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from slipstream.text.jsontext import json_text

# A replica is chosen by so many characters or token ids at the beginning of a prompt: about a block of the prefix
# cache, since shorter prompts are read so fast that it does not matter; of a chat, up to the first message of the
# user.
BEGINNING, QUESTION = 256, 4096


@dataclass(frozen=True)
class Scale:
    """The least and greatest number of replicas, and the CPUs and GPUs of each (None: Ray's default).
    Raises ValueError unless 1 <= least <= most."""

    least: int = 1
    most: int = 1
    cpus: float | None = None
    gpus: float | None = None

    @staticmethod
    def read(replicas: str | int, cpus: float | None = None, gpus: float | None = None) -> Scale:
        """Parse "4" (4 replicas) or "1..4" (1 to 4). Raises ValueError for anything else."""
        least, dots, most = str(replicas).partition("..")
        try:
            return Scale(int(least), int(most if dots else least), cpus, gpus)
        except ValueError:
            raise ValueError(f"replicas={replicas!r} is not possible: write 4, or 1..4 as needed.") from None

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ValueError(
                f"{self.least}..{self.most} replicas are not possible: 1 is the least, and then as many or more."
            )

    @property
    def resources(self) -> dict[str, float]:
        return {name: value for name, value in (("num_cpus", self.cpus), ("num_gpus", self.gpus)) if value is not None}


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
