"""The beginning of a connection: each side shows that it has the key, and both that their tokens mean the same.

The server sends a number that was never used (nonce); the client answers with one of its own and with an HMAC of both;
the server does the same. The key itself never travels, and a recorded answer is worth nothing to a later connection.
Without a key, both sides use the empty one.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.drafters.remote.frames import Frame, FrameError, Kind

KEY_VARIABLE = "SLIPSTREAM_DRAFT_KEY"
SLICE = 4096
"""Ids that one entry of a vocabulary's sketch stands for."""


class Refused(ValueError):
    """The two sides cannot work together; the sentence says why."""


@dataclass(frozen=True)
class Vocabulary:
    """What token ids mean: how many there are, and a sketch of their tokens, empty where no tokenizer is known."""

    size: int
    sketch: tuple[str, ...] = ()

    @staticmethod
    def of(size: int, tokenizer: Any) -> Vocabulary:
        """The vocabulary of a model with `size` logits; a hash for every `SLICE` ids of the tokenizer."""
        if tokenizer is None:
            return Vocabulary(size)
        words: dict[int, list[tuple[int, str]]] = {}
        for token, number in tokenizer.get_vocab().items():
            words.setdefault(number // SLICE, []).append((number, token))
        slices = [repr(sorted(words.get(place, []))).encode() for place in range(max(words, default=-1) + 1)]
        return Vocabulary(size, tuple(hashlib.sha256(each).hexdigest()[:8] for each in slices))

    def fits(self, other: Vocabulary) -> bool:
        """Whether the same ids mean the same tokens, but for some that were added, or, where a tokenizer is missing,
        whether the sizes differ by padding only."""
        if not self.sketch or not other.sketch:
            return abs(self.size - other.size) <= max(self.size, other.size) // 100
        common = list(zip(self.sketch, other.sketch, strict=False))
        differing = sum(ours != theirs for ours, theirs in common)
        return differing * 8 <= len(common) and abs(len(self.sketch) - len(other.sketch)) <= 1

    def values(self) -> dict[str, Any]:
        """For a frame."""
        return {"vocab": self.size, "sketch": list(self.sketch)}

    @staticmethod
    def read(frame: Frame) -> Vocabulary:
        """Of a frame. Raises FrameError if it has none."""
        sketch = frame.values.get("sketch")
        if not isinstance(sketch, list) or len(sketch) > 4096 or not all(isinstance(each, str) for each in sketch):
            raise FrameError("a vocabulary has no sketch")
        return Vocabulary(frame.number("vocab", 1, 2**31), tuple(sketch))


def read_key(file: str | Path | None) -> bytes:
    """The key in a file, else in SLIPSTREAM_DRAFT_KEY, else none. Raises ValueError for a file without one."""
    if file is None:
        return os.environ.get(KEY_VARIABLE, "").strip().encode()
    try:
        key = Path(file).read_bytes().strip()
    except OSError as error:
        raise ValueError(f"cannot read the key file {file}: {error.strerror}.") from None
    if not key:
        raise ValueError(f"the key file {file} is empty: write a key into it, as `openssl rand -hex 32` makes one.")
    return key


def nonce() -> str:
    """A number that was never used."""
    return secrets.token_hex(16)


def proof(key: bytes, side: str, nonces: Sequence[str], rest: Vocabulary) -> str:
    """What only one who has the key can say; `side` keeps an answer from being sent back."""
    text = "\n".join(["slipstream draft", side, *nonces, str(rest.size), *rest.sketch])
    return hmac.new(key, text.encode(), "sha256").hexdigest()


def proven(frame: Frame, key: bytes, side: str, nonces: Sequence[str]) -> Vocabulary:
    """The vocabulary that the other side names and vouches for. Raises Refused if its key is another one."""
    told = Vocabulary.read(frame)
    if not hmac.compare_digest(proof(key, side, nonces, told).encode(), frame.text("proof").encode()):
        raise Refused("the keys of draft server and client differ: give both the same --key-file, ?key-file= or "
                      f"{KEY_VARIABLE}")  # fmt: skip
    return told


def vouch(kind: Kind, key: bytes, side: str, nonces: Sequence[str], told: Vocabulary) -> Frame:
    """The frame with which one side names its vocabulary and shows that it has the key."""
    return Frame(kind, 0, {**told.values(), "nonce": nonces[-1], "proof": proof(key, side, nonces, told)})


def check_fit(ours: Vocabulary, theirs: Vocabulary) -> None:
    """Raises Refused if tokens of the two sides mean different things."""
    if not ours.fits(theirs):
        raise Refused(
            f"the target has {ours.size} token ids and the draft server {theirs.size}, and they do not mean the same "
            "tokens: serve a draft of the target's own family, or name its tokenizer with serve-draft --tokenizer"
        )
