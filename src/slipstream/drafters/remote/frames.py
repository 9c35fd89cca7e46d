"""Frames: the messages between a draft server and its clients, with every size checked before anything is read.

A frame is a head of 16 bytes (`HEAD`: magic, version, kind, sequence number, length of the body) and a body: the length
of a JSON object, the object, and the bytes of the arrays that it announces, little-endian, without gaps. Invalid bytes
raise `FrameError`, so that unchecked input never leaves this file.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.text.jsontext import json_text

MAGIC, VERSION = b"SLDR", 1
HEAD = struct.Struct("!4sHHII")  # magic, version, kind, sequence, length of the body
SIZE = struct.Struct("!I")
LARGEST = 16 << 20  # the size of the largest body, in bytes: enough for a text of some million tokens
MOST_ARRAYS = 16
CODES: dict[str, np.dtype[Any]] = {"i": np.dtype("<i4"), "f": np.dtype("<f4"), "d": np.dtype("<f8")}


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
    """One message: its kind, a sequence number that the answer repeats, named values, and one-dimensional arrays."""

    kind: FrameType
    sequence: int = 0
    values: Mapping[str, Any] = field(default_factory=dict)
    arrays: Sequence[np.ndarray] = ()

    def number(self, name: str, least: int = 0, most: int = 2**62) -> int:
        value = self.values.get(name)
        if type(value) is not int or not least <= value <= most:
            raise FrameError(f"{name} is no whole number from {least} to {most}")
        return value

    def text(self, name: str, longest: int = 4096) -> str:
        value = self.values.get(name)
        if not isinstance(value, str) or len(value) > longest:
            raise FrameError(f"{name} is no text of at most {longest} characters")
        return value

    def numbers(self, name: str, longest: int = 4096) -> list[int]:
        value = self.values.get(name)
        if not isinstance(value, list) or len(value) > longest:
            raise FrameError(f"{name} is no list of at most {longest} numbers")
        if not all(type(each) is int and 0 <= each < 2**31 for each in value):
            raise FrameError(f"{name} holds what is no number")
        return value

    def array(self, place: int, code: str) -> np.ndarray:
        if place >= len(self.arrays) or self.arrays[place].dtype != CODES[code]:
            raise FrameError(f"array {place} is not there, or of another type")
        return self.arrays[place]


def array(code: str, values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Convert numbers to an array for a frame; `code` is "i" (int32), "f" (float32) or "d" (float64)."""
    return np.asarray(values, dtype=CODES[code])


def encode(frame: Frame) -> bytes:
    """Encode a frame as bytes. Raises FrameError for a body above `LARGEST` bytes."""
    codes = {dtype: code for code, dtype in CODES.items()}
    announced = [[codes[each.dtype], len(each)] for each in frame.arrays]
    text = json_text({"values": dict(frame.values), "arrays": announced}, separators=(",", ":")).encode()
    body = b"".join([SIZE.pack(len(text)), text, *(each.tobytes() for each in frame.arrays)])
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
    if len(body) < SIZE.size:
        raise FrameError("the body of a frame is cut off")
    (size,) = SIZE.unpack_from(body)
    if size > len(body) - SIZE.size:
        raise FrameError("the body of a frame is cut off")
    try:
        content = json.loads(body[SIZE.size : SIZE.size + size])
    except (ValueError, RecursionError):
        raise FrameError("a frame holds no JSON") from None
    values, announced = (content.get(name) if isinstance(content, dict) else None for name in ("values", "arrays"))
    if not isinstance(values, dict) or not isinstance(announced, list):
        raise FrameError("a frame holds other JSON than it should")
    data = memoryview(body)[SIZE.size + size :]
    arrays = list[np.ndarray]()
    if len(announced) > MOST_ARRAYS:
        raise FrameError(f"a frame has {len(announced)} arrays: {MOST_ARRAYS} are allowed")
    for entry in announced:
        fits = isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str) and type(entry[1]) is int
        if not fits or entry[0] not in CODES or not 0 <= entry[1] <= LARGEST:
            raise FrameError("a frame announces an array of an impossible type or size")
        dtype, count = CODES[entry[0]], entry[1]
        if dtype.itemsize * count > len(data):
            raise FrameError("an array is cut off")
        arrays.append(np.frombuffer(data[: dtype.itemsize * count], dtype))
        data = data[dtype.itemsize * count :]
    if len(data):
        raise FrameError("a frame is longer than what it announces")
    return Frame(kind, sequence, values, arrays)


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
