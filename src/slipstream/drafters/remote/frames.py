"""Frames: the messages between a draft server and its clients, with every size checked before anything is read.

A frame is a head of 16 bytes (`HEAD`: magic, version, kind, sequence number, length of the body) and a body, a JSON
object. Invalid bytes raise `FrameError`, and so do values of it that are not as they should be when they are read.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

from slipstream.text.jsontext import json_text

MAGIC, VERSION = b"SLDR", 2
HEAD = struct.Struct("!4sHHII")  # magic, version, kind, sequence, length of the body
LARGEST = 16 << 20  # the size of the largest body, in bytes: enough for a text of some million tokens
LONGEST = 4096  # the most characters of a text


class FrameError(ValueError):
    """Raised for bytes that are not a valid frame, and for frames with impossible content."""


class FrameType(IntEnum):
    """The type of a frame; the server sends HELLO, WELCOME, DRAFT, PONG and REFUSAL, the client the others."""

    HELLO = 1
    PROOF = 2
    WELCOME = 3
    OPEN = 4
    PROPOSE = 5
    DRAFT = 6
    CLOSE = 7
    PING = 8
    PONG = 9
    REFUSAL = 10


@dataclass(frozen=True)
class Frame:
    """One message: its kind, a sequence number that the answer repeats, and named values."""

    kind: FrameType
    sequence: int = 0
    values: Mapping[str, Any] = field(default_factory=dict)

    def number(self, name: str, least: int = 0, most: int = 2**62) -> int:
        value = self.values.get(name)
        if type(value) is not int or not least <= value <= most:
            raise FrameError(f"{name} is no whole number from {least} to {most}")
        return value

    def text(self, name: str) -> str:
        value = self.values.get(name)
        if not isinstance(value, str) or len(value) > LONGEST:
            raise FrameError(f"{name} is no text of at most {LONGEST} characters")
        return value

    def ids(self, name: str, vocab: int) -> tuple[int, ...]:
        return self._each(name, lambda each: type(each) is int and 0 <= each < vocab, f"ids in 0..{vocab - 1}")

    def shares(self, name: str) -> tuple[float, ...]:
        """Return numbers from 0 to 1."""
        return self._each(name, lambda each: type(each) in (int, float) and 0 <= each <= 1, "numbers from 0 to 1")

    def parts(self, name: str) -> list[Frame]:
        """Return the objects of a list, each as a frame of its own."""
        return [
            Frame(self.kind, self.sequence, each)
            for each in self._each(name, lambda each: isinstance(each, dict), "objects")
        ]

    def _each(self, name: str, right: Callable[[Any], bool], what: str) -> tuple[Any, ...]:
        found = self.values.get(name)
        if not isinstance(found, list | tuple) or not all(map(right, found)):
            raise FrameError(f"{name} is no list of {what}")
        return tuple(found)


def encode(frame: Frame) -> bytes:
    """Encode a frame as bytes. Raises FrameError for a body above `LARGEST` bytes."""
    body = json_text(dict(frame.values), separators=(",", ":")).encode()
    if len(body) > LARGEST:
        raise FrameError(f"a frame of {len(body)} bytes is too large: {LARGEST} are allowed")
    return HEAD.pack(MAGIC, VERSION, frame.kind, frame.sequence & 0xFFFFFFFF, len(body)) + body


def decode_head(data: bytes) -> tuple[FrameType, int, int]:
    """Decode a head of 16 bytes -> kind, sequence number, length of the body. Raises FrameError for invalid values."""
    if len(data) != HEAD.size:
        raise FrameError("the head of a frame is cut off")
    magic, version, kind, sequence, length = HEAD.unpack(data)
    if magic != MAGIC:
        raise FrameError("these are no frames of a draft server")
    if version != VERSION:
        raise FrameError(f"the other side speaks version {version}, this one {VERSION}: use the same release on both")
    if kind not in list(FrameType):
        raise FrameError(f"there is no frame of kind {kind}")
    if length > LARGEST:
        raise FrameError(f"a frame of {length} bytes is too large: {LARGEST} are allowed")
    return FrameType(kind), sequence, length


def decode_body(kind: FrameType, sequence: int, body: bytes) -> Frame:
    """Decode the body of a frame, whose head gave kind and sequence number. Raises FrameError for an invalid body."""
    try:
        values = json.loads(body)
    except (ValueError, RecursionError):
        raise FrameError("a frame holds no JSON") from None
    if not isinstance(values, dict):
        raise FrameError("a frame holds other JSON than it should")
    return Frame(kind, sequence, values)


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
