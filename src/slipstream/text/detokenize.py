"""Converts tokens to text as they are emitted: complete characters only, up to a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
"""A function that decodes token ids to text."""

BROKEN = "\ufffd"  # what decoders return for a character whose bytes are incomplete


class Detokenizer:
    """Turns a growing list of tokens into pieces of text whose concatenation is the whole text.

    A token may be part of a character, and a token's text may depend on the one before it (leading spaces), so a
    piece is the difference between two decodings of a short tail; a tail that ends in a broken character waits.
    """

    TAIL = 16
    """The length from which on a tail is cut to its last tokens: every piece takes one decoding of the tail."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._tail: list[int] = []
        self._done = 0  # the number of its tokens whose text has been returned
        self._text = ""  # the text of those

    def push(self, token: int) -> str:
        """Add a token -> the text that became complete with it, perhaps empty."""
        self._tail.append(token)
        return self._advance(final=False)

    def flush(self) -> str:
        """Return the rest of the text, even if its last character is incomplete."""
        return self._advance(final=True)

    def _advance(self, final: bool) -> str:
        """Decode the tail again -> the text that is new; "" while it ends inside a character, unless `final`."""
        text = self._decode(self._tail)
        if len(text) <= len(self._text) or (text.endswith(BROKEN) and not final):
            return ""
        piece = text[len(self._text) :]
        if len(self._tail) >= self.TAIL:
            self._tail = self._tail[self._done :]
            text = self._decode(self._tail)
        self._done, self._text = len(self._tail), text
        return piece


class Transcript:
    """The text of one output as its tokens are emitted, up to a stop string.

    `text` ends before the stop string. `take` holds back text that may be the beginning of a stop string.
    """

    def __init__(self, decode: Decode, stops: Sequence[str] = ()) -> None:
        self.text = ""
        self.stopped = False
        self.stops = tuple(stops)
        self._detokenizer = Detokenizer(decode)
        self._taken = 0

    def push(self, token: int) -> str | None:
        """Add an emitted token -> "stop" if a stop string is complete, else None."""
        self._append(self._detokenizer.push(token))
        return "stop" if self.stopped else None

    def finish(self) -> None:
        """Complete the text after the last token."""
        if not self.stopped:
            self._append(self._detokenizer.flush())

    def take(self, final: bool = False) -> str:
        """Return the text that is certain and was not returned before; with `final`, all of the rest."""
        end = len(self.text) - (0 if final or self.stopped else self._held())
        piece, self._taken = self.text[self._taken : end], max(self._taken, end)
        return piece

    def _append(self, piece: str) -> None:
        """Append a piece of text, and cut the text before the first stop string in it."""
        start = max(0, len(self.text) - max(map(len, self.stops), default=0))
        self.text += piece
        ends = [place for stop in self.stops if (place := self.text.find(stop, start)) >= 0]
        if ends:
            self.text, self.stopped = self.text[: min(ends)], True

    def _held(self) -> int:
        """Return the length of the longest suffix of the text that is a prefix of a stop string."""
        lengths = range(min(len(self.text), max(map(len, self.stops), default=1) - 1), 0, -1)
        tails = ((length, self.text[-length:]) for length in lengths)
        return next((length for length, tail in tails if any(stop.startswith(tail) for stop in self.stops)), 0)
