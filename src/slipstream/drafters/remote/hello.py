"""The handshake of a connection: each side proves that it has the key, and both check that their token ids agree.

The server sends a nonce (a random number used once); the client answers with a nonce of its own and an HMAC of both;
the server answers with an HMAC too. The key itself is never sent, and a recorded answer is useless for a later
connection. Without a key, both sides use the empty key.
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

from slipstream.drafters.remote.frames import Frame, FrameError, FrameType

KEY_VARIABLE = "SLIPSTREAM_DRAFT_KEY"
SLICE = 4096  # the number of token ids that one entry of a vocabulary's sketch covers


class Refused(ValueError):
    """Raised if client and server cannot work together; the message says why."""


@dataclass(frozen=True)
class VocabularySketch:
    """The size of a vocabulary, and a sketch (hashes) of its tokens, which is empty without a tokenizer."""

    size: int
    sketch: tuple[str, ...] = ()

    @staticmethod
    def of(size: int, tokenizer: Any) -> VocabularySketch:
        """Create the vocabulary of a model with `size` logits, with a hash for every `SLICE` ids of the tokenizer."""
        if tokenizer is None:
            return VocabularySketch(size)
        words: dict[int, list[tuple[int, str]]] = {}
        for token, number in tokenizer.get_vocab().items():
            words.setdefault(number // SLICE, []).append((number, token))
        slices = [repr(sorted(words.get(place, []))).encode() for place in range(max(words, default=-1) + 1)]
        return VocabularySketch(size, tuple(hashlib.sha256(each).hexdigest()[:8] for each in slices))

    def fits(self, other: VocabularySketch) -> bool:
        """Return whether ids stand for the same tokens, but for a few; without a sketch, the sizes decide."""
        if not self.sketch or not other.sketch:
            return abs(self.size - other.size) <= max(self.size, other.size) // 100
        common = list(zip(self.sketch, other.sketch, strict=False))
        differing = sum(left != right for left, right in common)
        return differing * 8 <= len(common) and abs(len(self.sketch) - len(other.sketch)) <= 1

    def values(self) -> dict[str, Any]:
        return {"vocab": self.size, "sketch": list(self.sketch)}

    @staticmethod
    def read(frame: Frame) -> VocabularySketch:
        sketch = frame.values.get("sketch")
        if not isinstance(sketch, list) or len(sketch) > 4096 or not all(isinstance(each, str) for each in sketch):
            raise FrameError("a vocabulary has no sketch")
        return VocabularySketch(frame.number("vocab", 1, 2**31), tuple(sketch))


def read_key(file: str | Path | None) -> bytes:
    """Return the key in a file, or without a file the one in SLIPSTREAM_DRAFT_KEY, or an empty key."""
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
    return secrets.token_hex(16)


def proof(key: bytes, side: str, nonces: Sequence[str], rest: VocabularySketch) -> str:
    """Return the HMAC that proves knowledge of the key; `side` is in it, so an answer cannot be reflected."""
    text = "\n".join(["slipstream draft", side, *nonces, str(rest.size), *rest.sketch])
    return hmac.new(key, text.encode(), "sha256").hexdigest()


def proven(frame: Frame, key: bytes, side: str, nonces: Sequence[str]) -> VocabularySketch:
    vocabulary = VocabularySketch.read(frame)
    if not hmac.compare_digest(proof(key, side, nonces, vocabulary).encode(), frame.text("proof").encode()):
        raise Refused("the keys of draft server and client differ: give both the same --key-file, ?key-file= or "
                      f"{KEY_VARIABLE}")  # fmt: skip
    return vocabulary


def vouch(kind: FrameType, key: bytes, side: str, nonces: Sequence[str], vocabulary: VocabularySketch) -> Frame:
    return Frame(kind, 0, {**vocabulary.values(), "nonce": nonces[-1], "proof": proof(key, side, nonces, vocabulary)})


def check_fit(target: VocabularySketch, draft: VocabularySketch) -> None:
    if not target.fits(draft):
        raise Refused(
            f"the target has {target.size} token ids and the draft server {draft.size}, and they do not mean the same "
            "tokens: serve a draft of the target's own family, or name its tokenizer with serve-draft --tokenizer"
        )
