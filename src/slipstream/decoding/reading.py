"""Chunked prefill: prompts are read in pieces, the shortest rest first, and equal prompts only once."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.cache.prefixes import Recalling
from slipstream.core.law import Fault, token_logprobs, wide
from slipstream.core.media import ReadsMedia
from slipstream.core.protocols import Scorer
from slipstream.core.request import Row
from slipstream.core.round import Stopwatch
from slipstream.core.source import same_source
from slipstream.core.values import first_sentence

SCORED = 128  # the most tokens of a prompt that are scored at once: their logits take as many times the vocabulary


@dataclass
class PromptReading:
    """Rows with equal texts, which are read once for all of them, in one row of the target's cache."""

    rows: list[Row]

    @property
    def text(self) -> list[int]:
        return self.rows[0].tokens[:-1]

    def equals(self, row: Row) -> bool:
        ours, its = self.rows[0].request, row.request
        if self.rows[0].tokens != row.tokens or ours.cache_salt != its.cache_salt:
            return False
        if ours.prompt_logprobs != its.prompt_logprobs or not same_source(ours.source, its.source):
            return False
        return (ours.media and ours.media.digest) == (its.media and its.media.digest)

    @property
    def has_media(self) -> bool:
        """Whether the text has images or sounds: it is read in one piece and not stored, as its tokens do not identify
        them."""
        return self.rows[0].request.media is not None

    @property
    def is_scored(self) -> bool:
        """Whether the tokens of the text get logprobs; not again for a preempted row, which has them."""
        return self.rows[0].request.prompt_logprobs is not None and not self.rows[0].output

    def score(self, logits: Tensor) -> None:
        """Add the logprobs of the next tokens of the text, from logits (tokens, vocab) of those before them."""
        known, top = self.rows[0].prompt_logprobs, self.rows[0].request.prompt_logprobs
        assert top is not None, "only the texts of rows that want it are scored"
        tokens = self.rows[0].tokens[1 + len(known) :][: len(logits)]
        scored = [*known, *token_logprobs(wide(logits).log_softmax(-1), tokens, top)]
        for row in self.rows:
            row.prompt_logprobs = scored


class PromptReader:
    """Reads the texts of new rows into the target's cache, after the rows that run.

    While rows run, one call reads one piece, of at most `piece` tokens, or up to `growth` times as many if that many
    texts wait for each running row: larger pieces are read faster, but all running rows wait for them. If no row runs,
    it reads `growth` pieces of each text. Texts with the fewest tokens left go first, so that a short prompt does not
    wait for a long one: where no row runs, a text that fits into one piece does not wait for large pieces of longer
    ones. The oldest text gets half of every piece, so that it does not wait forever.
    """

    def __init__(self, target: Scorer, store: Recalling, piece: int, growth: int = 1) -> None:
        self.target, self.piece, self.growth, self._store = target, piece, growth, store
        self.groups: list[PromptReading] = []  # in the order of their rows in the target's cache

    @property
    def rows(self) -> list[Row]:
        return [row for group in self.groups for row in group.rows]

    def add(self, row: Row) -> None:
        """Begin to read the text of a row, or add the row to an equal text that is being read."""
        twin = next((group for group in self.groups if group.equals(row)), None)
        if twin:
            twin.rows.append(row)
            row.prompt_logprobs = twin.rows[0].prompt_logprobs
        else:
            watch = Stopwatch()
            self.target.add(1, [row.request.source])
            if row.request.media is not None:
                assert isinstance(self.target, ReadsMedia), "requests are checked when they come"
                self.target.attach(len(self.target.lengths) - 1, row.request.media)
            self.groups.append(PromptReading([row]))
            if self.groups[-1].is_scored:
                row.prompt_logprobs = []  # a row that was preempted while it was read begins again
            watch.lap("prefill")
            row.stats.spend("prefill", watch.laps["prefill"])

    def drop(self, gone: Sequence[Row], first: int) -> None:
        """Stop reading for these rows; `first` is the place of the first text in the target's cache."""
        for group in self.groups:
            group.rows = [row for row in group.rows if row not in gone]
        if empty := [first + place for place, group in enumerate(self.groups) if not group.rows]:
            self.target.free(empty)
            self.groups = [group for group in self.groups if group.rows]

    def read(self, first: int) -> list[Row]:
        """Read a piece -> the rows that can run now, placed after the `first` rows that run already."""
        if not self.groups:
            return []
        watch = Stopwatch()
        for place, group in enumerate(self.groups, first):
            if not self.target.lengths[place] and group.text and not (group.has_media or group.is_scored):
                known = self._store.recall(place, group.text, group.rows[0].request.cache_salt)
                group.rows[0].stats.cached += 0 if group.rows[0].output else known
        pieces = self._pieces(first, self.target.lengths[first:])
        silent = [list[int]() if group.is_scored else piece for group, piece in zip(self.groups, pieces, strict=True)]
        for place, group in enumerate(self.groups):
            if group.has_media and (piece := silent[place]):
                silent[place] = []
                try:
                    self.target.prefill([piece], first + place)
                except Exception as error:  # of any type, from the model's own code: it ends these rows alone
                    fault = Fault.of(f"the model fails on the images or sounds: {first_sentence(error)}", error)
                    for row in group.rows:
                        row.finish_reason, row.error = "error", fault
        if any(silent):
            self.target.prefill(silent, first)
        # The texts that are scored are fed each by itself, since every logit of them is needed.
        for place, (group, piece) in enumerate(zip(self.groups, pieces, strict=True), first):
            for start in range(0, len(piece) if group.is_scored else 0, SCORED):
                part = torch.tensor([piece[start : start + SCORED]], device=self.target.device)
                group.score(self.target.extend(part, [part.shape[1]], place)[0])
                self.target.rollback(self.target.lengths[: place + 1])  # nothing; but earlier states can be dropped
        watch.lap("prefill")
        share = watch.laps["prefill"] / max(1, sum(map(bool, pieces)))
        for group, piece in zip(self.groups, pieces, strict=True):
            group.rows[0].stats.spend("prefill", share * bool(piece))
        return self._release(first)

    def _pieces(self, running: int, have: Sequence[int]) -> list[list[int]]:
        left = [max(0, len(group.text) - known) for group, known in zip(self.groups, have, strict=True)]
        eldest = min(range(len(left)), key=lambda place: self.groups[place].rows[0].turn)
        if running:
            counts, room = [0] * len(left), self.piece * min(self.growth, max(1, len(left) // running))
            counts[eldest] = min(left[eldest], (room + 1) // 2)
            for place in sorted(range(len(left)), key=lambda place: (left[place], self.groups[place].rows[0].turn)):
                counts[place] += min(left[place] - counts[place], room - sum(counts))
        elif min(left) <= self.piece and max(left) > self.piece * self.growth:
            counts = [count if count <= self.piece else 0 for count in left]
            counts[eldest] = min(left[eldest], max(counts[eldest], (self.piece + 1) // 2))
        else:
            counts = [min(count, self.piece * self.growth) for count in left]
        parts = zip(self.groups, have, counts, strict=True)
        return [
            group.text[known:] if count and group.has_media else group.text[known : known + count]
            for group, known, count in parts
        ]

    def _release(self, first: int) -> list[Row]:
        """Move rows whose texts are read completely to the front, each with its own copy in the cache -> those rows."""
        have = self.target.lengths[first:]
        places = {id(group): first + place for place, group in enumerate(self.groups)}
        done = [group for group, known in zip(self.groups, have, strict=True) if known >= len(group.text)]
        if not done:
            return []
        for group in (group for group in done if not group.has_media):
            self._store.remember(places[id(group)], group.text, group.rows[0].request.cache_salt)
        twins = [(row, places[id(group)]) for group in done for row in group.rows[1:]]
        # Rows can only be appended and removed. So copies for twins go behind all, and so do the texts that would
        # otherwise stand before a row that runs now: each is copied behind, then removed from its old place.
        last = len(self.target.lengths) if twins else places[id(done[-1])]
        late = [group for group in self.groups if group not in done and places[id(group)] < last]
        moved = [places[id(group)] for group in late]
        if copies := [*(place for _, place in twins), *moved]:
            self.target.fork(copies)
            self.target.free(moved)
        for row, _ in twins:
            row.stats.cached += 0 if row.output else len(row.tokens) - 1
        self.groups = [group for group in self.groups if group not in done and group not in late] + late
        return [*(group.rows[0] for group in done), *(row for row, _ in twins)]
