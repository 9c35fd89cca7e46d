"""What the tokens of a tokenizer write: their text inside a text, their bytes, and what is not printed.

Everything is found with the tokenizer itself: a way to read token names (GPT-2's alphabet of bytes, sentencepiece's
mark for a space) is used only if it agrees with what the tokenizer decodes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from itertools import groupby
from typing import Any

from slipstream.text.detokenize import BROKEN

PROBES = 256  # number of tokens on which a way of reading names is checked
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # names of sentencepiece's tokens for single bytes
Reading = Callable[[str], bytes | None]  # A function from a token's name to the bytes that it writes


class Spelling:
    """Decodes the tokens of one tokenizer, together and one by one.
    `hidden` maps the special tokens, which are not printed, to their texts."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._added = dict(getattr(tokenizer, "added_tokens_decoder", {}))
        named = getattr(tokenizer, "all_special_ids", ())
        special = {*named, *(number for number, token in self._added.items() if token.special)}
        names = {number: token.content for number, token in self._added.items()}
        self.hidden = {each: names.get(each) or tokenizer.convert_ids_to_tokens(each) for each in special}
        self._known: dict[int, bytes] = {}

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special ones; every incomplete character is one U+FFFD.

        Decoders of byte tokens write U+FFFD for each byte of a run that is not valid as a whole, also for those of
        complete characters. So the bytes that are not valid are replaced by those of U+FFFD before they are decoded.
        """
        printed: Sequence[int] = [token for token in tokens if token not in self.hidden]
        if self._byte_tokens and not self._byte_tokens.keys().isdisjoint(printed):
            printed = list(self._repaired(printed))
        return self._decoded(printed)

    def write(self, token: int) -> bytes:
        """Return the bytes of a token as they stand inside a text; for a special token, those of its name."""
        if token not in self._known:
            # Read from its name, if a way to read names is known; else decoded after a word.
            name = self._tokenizer.convert_ids_to_tokens(token) if self._reading and token not in self._added else None
            read = self._reading(name) if self._reading and name is not None else None
            piece = (self._decoded_after.text(token).encode() if read is None else read) or b""
            self._known[token] = self.hidden[token].encode() if token in self.hidden else piece
        return self._known[token]

    def text(self, token: int) -> str:
        """Return the text of a token inside a text; U+FFFD stands for a part of a character."""
        return self.write(token).decode(errors="replace")

    def _decoded(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    @cached_property
    def _decoded_after(self) -> DecodedAfter:
        names = self._tokenizer.get_vocab().items()
        return DecodedAfter(self._tokenizer, {number: name for name, number in names if number not in self._added})

    @cached_property
    def _reading(self) -> Reading | None:
        return reading_of(self._decoded_after)

    @cached_property
    def _byte_tokens(self) -> dict[int, int]:
        """The tokens for single bytes -> their bytes; empty if the tokenizer has none, or lacks those of U+FFFD."""
        names = {number: f"<0x{number:02X}>" for number in range(256)}
        found = self._tokenizer.get_vocab() if hasattr(self._tokenizer, "get_vocab") else {}
        tokens = {found[name]: byte for byte, name in names.items() if name in found}
        broken = [token for byte in BROKEN.encode() for token, its in tokens.items() if its == byte]
        return tokens if len(broken) == 3 and self._decoded(broken) == BROKEN else {}

    def _repaired(self, tokens: Sequence[int]) -> Iterator[int]:
        """Yield tokens, with those of U+FFFD in place of bytes that are no complete character."""
        by_byte = {byte: token for token, byte in self._byte_tokens.items()}
        for is_byte, run in groupby(tokens, self._byte_tokens.__contains__):
            if is_byte:
                text = bytes(map(self._byte_tokens.__getitem__, run)).decode(errors="replace")
                yield from map(by_byte.__getitem__, text.encode())
            else:
                yield from run


class DecodedAfter:
    """The text that a tokenizer decodes a token to, after an ordinary word; `names` are tokens to choose that from."""

    def __init__(self, tokenizer: Any, names: Mapping[int, str]) -> None:
        self._decode = lambda ids: tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        self.names = names
        words = (number for number in names if (text := self._decode([number])).isascii() and text.strip().isalpha())
        self._word = next(words, next(iter(names), 0))
        self._before = self._decode([self._word])

    def text(self, number: int) -> str:
        return self._decode([self._word, number])[len(self._before) :]

    def piece(self, number: int) -> bytes | None:
        """Return the bytes that a token adds; None if they are not whole characters, or change the text before."""
        text = self._decode([self._word, number])
        if not text.startswith(self._before) or BROKEN in text or len(text) == len(self._before):
            return None
        return text[len(self._before) :].encode()

    def confirm(self, reading: Reading) -> bool:
        """Return whether a way of reading names agrees with decoding, on tokens from the whole vocabulary."""
        for number in sorted(self.names)[:: max(1, len(self.names) // PROBES)]:
            spelled, decoded = reading(self.names[number]), self.piece(number)
            if spelled is None or (decoded is not None and decoded != spelled):
                return False
            if decoded is None and _is_text(spelled):
                return False
        return bool(self.names)


def reading_of(decoded: DecodedAfter) -> Reading | None:
    return next(filter(decoded.confirm, (_byte_level, _marked, _single)), None)


def _is_text(piece: bytes) -> bool:
    try:
        return bool(piece.decode())
    except UnicodeDecodeError:
        return False


@cache
def _alphabet() -> dict[str, int]:
    """Return GPT-2's characters for bytes: printable bytes are themselves, the others are numbered from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _byte_level(name: str) -> bytes | None:
    try:
        return bytes(map(_alphabet().__getitem__, name))
    except KeyError:
        return None


def _single(name: str) -> bytes | None:
    """Read the name of a byte, the character of that number, as in ByT5; None for any other."""
    return bytes([ord(name)]) if len(name) == 1 and ord(name) < 256 else None


def _marked(name: str) -> bytes | None:
    """Read a sentencepiece name: a mark for a space, and single bytes by their number."""
    byte = BYTE.fullmatch(name)
    return bytes([int(byte[1], 16)]) if byte else name.replace("▁", " ").encode()
