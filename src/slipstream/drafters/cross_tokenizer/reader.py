"""Reads the target's texts in the draft's own tokens while they grow, and keeps the draft's cache up to date."""

import codecs
import re
from collections.abc import Iterator, Sequence

from torch import Tensor

from slipstream.core.draft import common_length, padded
from slipstream.core.protocols import Scorer
from slipstream.core.request import Row
from slipstream.core.round import Stopwatch
from slipstream.drafters.cross_tokenizer.vocabulary import ABSENT, CommonTokens, Vocabulary
from slipstream.drafters.following import still_first

LONG = 128  # the number of characters that may be encoded again in every round before a part of them is closed
BEHIND = 32  # the number of characters that stay open after a cut, because later text can still change their tokens
_WORDS = re.compile(r"(?<=\S)(?=\s)|(?<=\s)(?=\S)")


class Encoding:
    """A growing text in the tokens of a vocabulary.

    Only the end of the text is encoded again when it grows: an anchor of text whose tokens no longer change, and the
    open text after it. A cut is made only where it verifiably changes nothing: the tokens before it are those of the
    text before it, and the tokens after it are the same with the shorter anchor. If an anchor's own tokens change
    nevertheless, the whole text is encoded again.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.text = ""
        self._vocabulary = vocabulary
        self._closed: list[int] = []
        self._anchor, self._open = "", ""
        self._anchored: list[int] = []  # tokens of the anchor on its own
        self._opened: list[int] = []  # tokens of the open text, after the anchor
        self._patience = LONG

    @property
    def ids(self) -> list[int]:
        return self._closed + self._opened

    def write(self, text: str) -> None:
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
        """Cut the open text at the last place where that changes no token; if there is none, try again later."""
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
    """Yield the places where a text may be cut, at least BEHIND characters before its end: around words, then any."""
    last = len(text) - BEHIND
    if last > 0:
        yield from [match.start() for match in _WORDS.finditer(text, max(0, last - LONG), last)][:-7:-1]
        yield last


class RetokenizedRow:
    """The tokens of one row, in the draft's vocabulary.

    Bytes are converted to characters when these are complete; until then their tokens are replaced by counterparts.
    Special tokens are read as the draft's of the same name or role, and skipped if it has none.
    """

    def __init__(self, target: Vocabulary, draft: Vocabulary, common: CommonTokens) -> None:
        self._target, self._draft, self._common = target, draft, common
        self._before = list(draft.prefix)
        self._encoding = Encoding(draft)
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._held: list[int] = []  # counterparts of the tokens of an unfinished character
        self._begun = False
        self.read = 0

    @property
    def ids(self) -> list[int]:
        return [*self._before, *self._encoding.ids, *(token for token in self._held if token != ABSENT)]

    @property
    def text(self) -> str:
        return self._encoding.text

    @property
    def whole(self) -> bool:
        """Whether the text ends with a complete character."""
        return not self._held

    @property
    def ready(self) -> bool:
        """Whether the whole text has tokens of the draft, including an incomplete character at its end."""
        return ABSENT not in self._held

    def follow(self, tokens: Sequence[int]) -> None:
        text = ""
        for token in tokens[self.read :]:
            piece = self._target.piece(token)
            if piece is not None:
                if not self._begun and self._target.strips:
                    piece = piece.removeprefix(b" ")
                self._begun = True
                complete = self._characters.decode(piece)
                text += complete
                if not self._characters.getstate()[0]:
                    self._held = []
                elif complete:  # the token ends one character and begins another
                    self._held = [ABSENT]
                else:
                    self._held.append(int(self._common.to_draft[token]))
            else:  # a special token
                self._encoding.write(text)
                text = ""
                # Each tokenizer puts its own tokens before a text.
                if self._begun or self._target.prefix[self.read : self.read + 1] != (token,):
                    counterpart = self._common.special.get(token)
                    self._before += [*self._encoding.ids, *([] if counterpart is None else [counterpart])]
                    self._encoding = Encoding(self._draft)
                    self._characters.reset()
                    self._held = []
            self.read += 1
        self._encoding.write(text)


class RetokenizingReader:
    """Keeps a draft's cache up to date with the rows of a context, each read in the draft's own tokens.

    The cache is kept as far as its tokens equal those of the new reading, after refused drafts as after changed
    readings, and fed from there on. A reading longer than the draft's context is followed in a window of its last
    tokens.
    """

    def __init__(self, scorer: Scorer, target: Vocabulary, draft: Vocabulary, common: CommonTokens) -> None:
        scorer.free(range(len(scorer.lengths)))  # leftovers of an earlier drafter
        self.scorer, self.target, self.draft, self.common = scorer, target, draft, common
        self.starts: list[int] = []  # the position at which each row's window begins in its reading
        self.readings: list[RetokenizedRow] = []
        self._rows: list[Row] = []
        self._fed: list[list[int]] = []  # the tokens in the cache, per row
        self._watch = Stopwatch()

    def follow(self, rows: Sequence[Row], watch: Stopwatch) -> None:
        """Follow the rows, which keep their order, and read their new tokens; `prefill` is timed by the watch."""
        self._watch = watch
        kept = still_first(self._rows, rows)
        self.scorer.free([place for place in range(len(self._rows)) if place not in set(kept)])
        new = len(rows) - len(kept)
        self.scorer.add(new)
        self.starts = [*(self.starts[place] for place in kept), *[0] * new]
        self._fed = [*(self._fed[place] for place in kept), *([] for _ in range(new))]
        fresh = [RetokenizedRow(self.target, self.draft, self.common) for _ in range(new)]
        self.readings = [*(self.readings[place] for place in kept), *fresh]
        self._rows = list(rows)
        for row, reading in zip(rows, self.readings, strict=True):
            reading.follow(row.readable)

    def catch_up(self, room: int) -> Tensor:
        """Feed the missing tokens, leaving room for `room` more -> logits (rows, 1, vocab) after the last token.
        They are meaningless for a row whose reading is empty."""
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

    def _align(self, room: int) -> list[list[int]]:
        """Roll the cache back to the tokens that still agree -> those to feed; the last is fed again for its logits."""
        missing = []
        for place, reading in enumerate(self.readings):
            ids, limit, start = reading.ids, self.scorer.context, self.starts[place]
            # A new window of half the context begins if text and draft no longer fit, or the reading became shorter.
            if limit is not None and (len(ids) - start + room > limit or len(ids) <= start):
                self.starts[place] = max(0, len(ids) - max(1, min(limit // 2, limit - room)))
                self._fed[place] = []
            ids = ids[self.starts[place] :]
            have = min(common_length(self._fed[place], ids), max(0, len(ids) - 1))
            del self._fed[place][have:]
            missing.append(ids[have:])
        self.scorer.rollback([len(fed) for fed in self._fed])
        return missing

    def _note(self, tokens: Sequence[Sequence[int]]) -> None:
        for fed, new in zip(self._fed, tokens, strict=True):
            fed += new
