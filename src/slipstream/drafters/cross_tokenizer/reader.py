"""The text of a target, read in a draft's tokens while it grows, and the draft's cache kept in step with it."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Sequence

from torch import Tensor

from slipstream.core.draft import padded
from slipstream.core.protocols import Scorer
from slipstream.core.request import Row
from slipstream.core.round import Stopwatch
from slipstream.drafters.cross_tokenizer.vocabulary import ABSENT, Common, Vocabulary
from slipstream.drafters.following import still_first

LONG = 128
"""Characters that are encoded anew with every round, before a part of them is closed."""

BEHIND = 32
"""Characters that stay open behind a cut, so that what follows them can still change their tokens."""

_WORDS = re.compile(r"(?<=\S)(?=\s)|(?<=\s)(?=\S)")


class Encoding:
    """A growing text in the tokens of a vocabulary.

    Only the end of the text is encoded anew when it grows: an anchor of text whose tokens no longer change, and what
    is open behind it. A cut is made only where it is seen to change nothing: the tokens before it are those of the
    text before it, and the tokens behind it are the same with the shorter anchor. Should an anchor's own tokens
    change after all, the whole text is encoded again.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.text = ""
        self._vocabulary = vocabulary
        self._closed: list[int] = []
        self._anchor, self._open = "", ""
        self._anchored: list[int] = []  # tokens of the anchor on its own
        self._opened: list[int] = []  # tokens of what is open, behind the anchor
        self._patience = LONG

    @property
    def ids(self) -> list[int]:
        """The tokens of the text."""
        return self._closed + self._opened

    def write(self, text: str) -> None:
        """Append to the text."""
        if not text:
            return
        self.text += text
        self._open += text
        whole = self._vocabulary.encode(self._anchor + self._open)
        if whole[: len(self._anchored)] != self._anchored:
            self._closed, self._anchored = [], []
            self._anchor, self._open = "", self.text
            whole = self._vocabulary.encode(self._open)
        self._opened = whole[len(self._anchored) :]
        if len(self._open) > self._patience:
            self._close(whole)

    def _close(self, whole: list[int]) -> None:
        """Cut the open text at the last place where that changes nothing; if there is none, try again later."""
        for cut in _cuts(self._open):
            head, rest = self._open[:cut], self._open[cut:]
            anchor = head[next(_cuts(head), 0) :]
            before = self._vocabulary.encode(self._anchor + head)
            anchored, behind = self._vocabulary.encode(anchor), whole[len(before) :]
            safe = whole[: len(before)] == before and self._vocabulary.encode(anchor + rest) == [*anchored, *behind]
            if safe:
                self._closed += before[len(self._anchored) :]
                self._anchor, self._anchored = anchor, anchored
                self._open, self._opened = rest, behind
                self._patience = LONG
                return
        self._patience = 2 * len(self._open)


def _cuts(text: str) -> Iterator[int]:
    """Where a text may be cut: around one of the last words, or anywhere, with enough behind the cut."""
    last = len(text) - BEHIND
    if last > 0:
        yield from [match.start() for match in _WORDS.finditer(text, max(0, last - LONG), last)][:-7:-1]
        yield last


class Reading:
    """The tokens of one row, in the draft's vocabulary.

    Bytes become characters as they are complete; until then the tokens that hold them are read by their counterparts.
    Special tokens are read as the draft's of the same name or role, and passed over where it has none.
    """

    def __init__(self, target: Vocabulary, draft: Vocabulary, common: Common) -> None:
        self._target, self._draft, self._common = target, draft, common
        self._before = list(draft.prefix)
        self._encoding = Encoding(draft)
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._held: list[int] = []  # counterparts of the tokens of an unfinished character
        self._begun = False
        self.read = 0

    @property
    def ids(self) -> list[int]:
        """All tokens so far."""
        return [*self._before, *self._encoding.ids, *(token for token in self._held if token != ABSENT)]

    @property
    def text(self) -> str:
        """The text since the last special token."""
        return self._encoding.text

    @property
    def whole(self) -> bool:
        """Whether the text ends in a whole character."""
        return not self._held

    @property
    def ready(self) -> bool:
        """Whether the draft sees all of the text."""
        return ABSENT not in self._held

    def follow(self, tokens: Sequence[int]) -> None:
        """Read what was added to a row's tokens."""
        text = ""
        for token in tokens[self.read :]:
            piece = self._target.piece(token)
            if piece is None:
                self._encoding.write(text)
                text = ""
                self._pass(token)
            else:
                text += self._complete(token, piece)
            self.read += 1
        self._encoding.write(text)

    def _complete(self, token: int, piece: bytes) -> str:
        """The characters that a token completes."""
        if not self._begun and self._target.strips:
            piece = piece.removeprefix(b" ")
        self._begun = True
        text = self._characters.decode(piece)
        if not self._characters.getstate()[0]:
            self._held = []
        elif text:  # it ends one character and begins another
            self._held = [ABSENT]
        else:
            self._held.append(int(self._common.to_draft[token]))
        return text

    def _pass(self, token: int) -> None:
        """A special token ends the text before it."""
        if self._target.prefix[self.read : self.read + 1] == (token,) and not self._begun:
            return  # what either tokenizer puts before a text is its own affair
        counterpart = self._common.special.get(token)
        self._before += self._encoding.ids
        if counterpart is not None:
            self._before.append(counterpart)
        self._encoding = Encoding(self._draft)
        self._characters.reset()
        self._held = []


class Reader:
    """Keeps a draft's cache in step with the rows of a context, each read in the draft's own tokens.

    The cache is kept as far as its tokens are those of the new reading, refused drafts and changed readings alike,
    and fed from there on. A reading longer than the draft's context is followed in a window of its last tokens.
    """

    def __init__(self, scorer: Scorer, target: Vocabulary, draft: Vocabulary, common: Common) -> None:
        scorer.free(range(len(scorer.lengths)))  # leftovers of an earlier drafter
        self.scorer, self.target, self.draft, self.common = scorer, target, draft, common
        self.starts: list[int] = []  # where each row's window begins in its reading
        self.readings: list[Reading] = []
        self._rows: list[Row] = []
        self._fed: list[list[int]] = []  # what is in the cache
        self._watch = Stopwatch()

    def follow(self, rows: Sequence[Row], watch: Stopwatch) -> None:
        """Make our rows those of the context and read what they added. Rows that run on keep their order.

        What the draft reads until the next call counts as `prefill` of the watch.
        """
        self._watch = watch
        kept = still_first(self._rows, rows)
        self.scorer.free([place for place in range(len(self._rows)) if place not in set(kept)])
        new = len(rows) - len(kept)
        self.scorer.add(new)
        self.starts = [*(self.starts[place] for place in kept), *[0] * new]
        self._fed = [*(self._fed[place] for place in kept), *([] for _ in range(new))]
        fresh = [Reading(self.target, self.draft, self.common) for _ in range(new)]
        self.readings = [*(self.readings[place] for place in kept), *fresh]
        self._rows = list(rows)
        for row, reading in zip(rows, self.readings, strict=True):
            reading.follow(row.readable)

    def catch_up(self, room: int) -> Tensor:
        """Feed what the cache lacks, leaving room for more tokens -> logits (rows, 1, vocab) of the last token.

        They mean nothing for a row whose reading is empty.
        """
        missing = self._align(room)
        if max(map(len, missing)) > 2:
            early = [tokens[:-1] for tokens in missing]
            with self._watch.apart("prefill"):
                self.scorer.prefill(early)
            self._note(early)
            missing = [tokens[-1:] for tokens in missing]
        counts = [len(tokens) for tokens in missing]
        fed = padded([tokens or [0] for tokens in missing], self.scorer.device)
        logits = self.scorer.extend(fed, counts)
        self._note(missing)
        last = [max(0, count - 1) for count in counts]
        return logits[range(len(last)), last].unsqueeze(1)

    def feed(self, tokens: Tensor, counts: Sequence[int]) -> Tensor:
        """Feed drafted tokens (rows, 1), of which `counts[r]` are real -> logits (rows, 1, vocab)."""
        self._note([row[:count] for row, count in zip(tokens.tolist(), counts, strict=True)])
        return self.scorer.extend(tokens, counts)

    def windowed(self, lengths: Sequence[int]) -> tuple[int, ...]:
        """How many of the drafted tokens come from a shortened text, per row."""
        return tuple(length if start else 0 for length, start in zip(lengths, self.starts, strict=True))

    def _align(self, room: int) -> list[list[int]]:
        """Roll the cache back to what is still right -> the tokens to feed; the last is fed again for its logits."""
        missing = []
        for place, reading in enumerate(self.readings):
            ids = reading.ids
            self._slide(place, len(ids), room)
            ids = ids[self.starts[place] :]
            have = min(_shared(self._fed[place], ids), max(0, len(ids) - 1))
            del self._fed[place][have:]
            missing.append(ids[have:])
        self.scorer.rollback([len(fed) for fed in self._fed])
        return missing

    def _slide(self, place: int, length: int, room: int) -> None:
        """Begin a new window of half the context where text and draft no longer fit, or the reading grew shorter."""
        limit, start = self.scorer.context, self.starts[place]
        if limit is not None and (length - start + room > limit or length <= start):
            self.starts[place] = max(0, length - max(1, min(limit // 2, limit - room)))
            self._fed[place] = []

    def _note(self, tokens: Sequence[Sequence[int]]) -> None:
        for fed, new in zip(self._fed, tokens, strict=True):
            fed += new


def _shared(left: list[int], right: list[int]) -> int:
    """How many tokens two lists begin with alike."""
    least = min(len(left), len(right))
    if left[:least] == right[:least]:
        return least
    return next(i for i in range(least) if left[i] != right[i])
