"""Converts tokens to text as they are emitted: complete characters only, up to a stop string."""

from collections.abc import Callable, Mapping, Sequence

Decode = Callable[[Sequence[int]], str]  # A function that decodes token ids to text
BROKEN = "\ufffd"  # what decoders return for a character whose bytes are incomplete
HELD = 3  # most signs of broken characters at the end of a text that one character may still replace: its bytes but one


def _settled(text: str) -> str:
    """Return a text without what the next tokens may still change: a broken character at its end."""
    return text[: max(len(text.rstrip(BROKEN)), len(text) - HELD)]


class Detokenizer:
    """Turns a growing list of tokens into pieces of text whose concatenation is the text that follows `before`.

    A token may be part of a character, and a token's text may depend on the one before it (leading spaces), so a
    piece is what a decoding of the last tokens adds to an earlier one; a broken character at the end waits. `before`
    are the tokens of the prompt: a text is decode(prompt + output) without decode(prompt).
    """

    TAIL = 16  # number of last tokens that are decoded again with a new one; twice as many before they are cut

    def __init__(self, decode: Decode, before: Sequence[int] = ()) -> None:
        self._decode = decode
        self._tail = list(before[-self.TAIL :])
        self._text = decode(self._tail) if self._tail else ""  # the part of the tail's text that was returned

    def push(self, *tokens: int) -> str:
        """Add tokens -> the text that became complete with them, perhaps empty."""
        self._tail += tokens
        text = self._decode(self._tail)
        piece = self._new(text, _settled(text))
        if len(self._tail) >= 2 * self.TAIL:
            self._tail = self._tail[-self.TAIL :]
            self._text = _settled(self._decode(self._tail))
        elif piece:
            self._text = _settled(text)
        return piece

    def flush(self) -> str:
        """Return the rest of the text, even if its last character is incomplete."""
        text = self._decode(self._tail)
        piece, self._text = self._new(text, text), text
        return piece

    def _new(self, text: str, settled: str) -> str:
        """Return the settled part of the tail's text that was not returned before.
        A prompt may end inside a character, which the text then begins with."""
        known = self._text
        while not text.startswith(known):
            known = known[:-1]
        return settled[len(known) :]


class EmittedText:
    """The text of one output as its tokens are emitted, up to a stop string.

    `before` are the tokens of the prompt. The tokens in `hidden` are not printed; but a stop string that has the text
    of one of them ends the text there. A stop string counts if it is complete after the first `least` tokens. `text`
    ends before the stop string. `take` holds back text that may be the beginning of a stop string.
    """

    def __init__(
        self,
        decode: Decode,
        stops: Sequence[str] = (),
        before: Sequence[int] = (),
        hidden: Mapping[int, str] | None = None,
        least: int = 0,
    ) -> None:
        self.text = ""
        self.stop: str | None = None  # the stop string that ended it
        self.count = 0
        self.stops = tuple(stops)
        self._hidden = hidden or {}
        self._detokenizer = Detokenizer(decode, [token for token in before if token not in self._hidden])
        self._least = least
        self._seen = ""  # the text with those hidden tokens that stop strings name
        self._unprinted: list[tuple[int, int]] = []  # begin and length of these in it
        self._certain = list[int]()  # after each token, the length of the text that no stop string can cut any more
        self._taken = 0

    def push(self, token: int) -> str | None:
        """Add an emitted token -> "stop" if a stop string is complete, else None."""
        self.count += 1
        if token in self._hidden:
            self._see(self._hidden[token], printed=False)
        else:
            self._see(self._detokenizer.push(token))
        cut = self.stop or not self.stops
        self._certain.append(len(self.text) if cut else self._printed(len(self._seen) - self._held()))
        return "stop" if self.stop else None

    def extend(self, tokens: Sequence[int]) -> None:
        assert not self.stops, "stop strings are looked for after every token"
        self._see(self._detokenizer.push(*(token for token in tokens if token not in self._hidden)))

    def finish(self) -> None:
        if not self.stop:
            self._see(self._detokenizer.flush())

    def take(self, tokens: int | None = None) -> str:
        """Return the text that was certain after so many tokens and was not returned before; all of it without."""
        end = len(self.text) if tokens is None else self._certain[tokens - 1] if tokens else 0
        piece, self._taken = self.text[self._taken : end], max(self._taken, end)
        return piece

    def _see(self, piece: str, printed: bool = True) -> None:
        """Append a piece, and cut the text before the first stop string that is complete with it."""
        begin = len(self._seen)
        if printed:
            self.text += piece
        elif any(piece in stop for stop in self.stops):
            self._unprinted.append((begin, len(piece)))
        else:
            return
        if not self.stops or not piece:
            return
        self._seen += piece
        if self.count <= self._least:
            return
        places = ((self._seen.find(stop, max(0, begin - len(stop) + 1)), stop) for stop in self.stops)
        if ends := [found for found in places if found[0] >= 0]:
            place, self.stop = min(ends)
            end = self._printed(place)
            if end == len(self.text):  # at a hidden token: a character before it stays incomplete
                self.text += self._detokenizer.flush()
            else:
                self.text = self.text[:end]

    def _printed(self, place: int) -> int:
        return place - sum(min(length, max(0, place - begin)) for begin, length in self._unprinted)

    def _held(self) -> int:
        """Return the length of the longest suffix of what was seen that is a prefix of a stop string."""
        lengths = range(min(len(self._seen), max(map(len, self.stops)) - 1), 0, -1)
        tails = ((length, self._seen[-length:]) for length in lengths)
        return next((length for length, tail in tails if any(stop.startswith(tail) for stop in self.stops)), 0)
