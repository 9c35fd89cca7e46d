"""The prompts that are being read: in pieces, the short ones first, equal ones once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.cache.prefixes import Recalling
from slipstream.core.media import ReadsMedia, same_media
from slipstream.core.protocols import Scorer
from slipstream.core.request import Row
from slipstream.core.source import same_source
from slipstream.decoding.accounting import Stopwatch


@dataclass
class Reading:
    """Rows whose texts are equal, of which one is read for all, in one row of the target's cache."""

    rows: list[Row]

    @property
    def text(self) -> list[int]:
        """What has to be read: all but the last token, which stays pending."""
        return self.rows[0].tokens[:-1]

    def equals(self, row: Row) -> bool:
        """Whether what is read for these rows will do for another one."""
        ours, its = self.rows[0].request, row.request
        if self.rows[0].tokens != row.tokens or ours.cache_salt != its.cache_salt:
            return False
        return same_source(ours.source, its.source) and same_media(ours.media, its.media)

    @property
    def has_media(self) -> bool:
        """Whether images or sounds belong to the text: it is read in one piece, and not stored, for its tokens do not
        tell them."""
        return self.rows[0].request.media is not None


class Reader:
    """Reads the texts of new rows into the target's cache, behind the rows that run.

    While rows run, one call reads one piece, of at most `piece` tokens, or up to `growth` times as many where that many
    texts wait for each row that runs: larger pieces are read faster, but all that run wait for them. Where none runs,
    it reads `growth` pieces of each text. Texts that are nearly read go first, so that a short prompt does not wait for
    a long one; the eldest gets half of every piece, so that it does not wait forever.
    """

    def __init__(self, target: Scorer, store: Recalling, piece: int, growth: int = 1) -> None:
        self.target, self.piece, self.growth, self._store = target, piece, growth, store
        self.groups: list[Reading] = []  # in the order of their rows in the target's cache

    @property
    def rows(self) -> list[Row]:
        """Everybody whose text is being read."""
        return [row for group in self.groups for row in group.rows]

    def add(self, row: Row) -> None:
        """Begin to read the text of a row, or let it wait for an equal one that is being read."""
        twin = next((group for group in self.groups if group.equals(row)), None)
        if twin:
            twin.rows.append(row)
        else:
            self.target.add(1, [row.request.source])
            if row.request.media is not None:
                assert isinstance(self.target, ReadsMedia), "requests are checked when they come"
                self.target.attach(len(self.target.lengths) - 1, row.request.media)
            self.groups.append(Reading([row]))

    def drop(self, gone: Sequence[Row], first: int) -> None:
        """Read no further for these rows; `first` is the place of the first text in the target's cache."""
        names = set(map(id, gone))
        for group in self.groups:
            group.rows = [row for row in group.rows if id(row) not in names]
        if empty := [first + place for place, group in enumerate(self.groups) if not group.rows]:
            self.target.free(empty)
            self.groups = [group for group in self.groups if group.rows]

    def read(self, first: int) -> list[Row]:
        """Read a piece -> the rows that can run now; those lie behind the `first` rows that did already."""
        if not self.groups:
            return []
        watch = Stopwatch()
        self._recall(first)
        pieces = self._pieces(first, self.target.lengths[first:])
        if any(pieces):
            self.target.prefill(pieces, first)
        watch.lap("prefill")
        share = watch.laps["prefill"] / max(1, sum(map(bool, pieces)))
        for group, piece in zip(self.groups, pieces, strict=True):
            seconds = group.rows[0].stats.seconds
            seconds["prefill"] = seconds.get("prefill", 0.0) + share * bool(piece)
        return self._release(first)

    def _recall(self, first: int) -> None:
        """Take over what is stored of the texts that nothing was read of."""
        for place, group in enumerate(self.groups, first):
            if not self.target.lengths[place] and group.text and not group.has_media:
                known = self._store.recall(place, group.text, group.rows[0].request.cache_salt)
                group.rows[0].stats.cached += 0 if group.rows[0].output else known

    def _pieces(self, running: int, have: Sequence[int]) -> list[list[int]]:
        """What to read of every text now, while so many rows run."""
        left = [max(0, len(group.text) - known) for group, known in zip(self.groups, have, strict=True)]
        if running:
            counts, room = [0] * len(left), self.piece * min(self.growth, max(1, len(left) // running))
            eldest = min(range(len(left)), key=lambda place: self.groups[place].rows[0].turn)
            counts[eldest] = min(left[eldest], (room + 1) // 2)
            for place in sorted(range(len(left)), key=lambda place: (left[place], self.groups[place].rows[0].turn)):
                counts[place] += min(left[place] - counts[place], room - sum(counts))
        else:
            counts = [min(count, self.piece * self.growth) for count in left]
        parts = zip(self.groups, have, counts, strict=True)
        return [
            group.text[known:] if count and group.has_media else group.text[known : known + count]
            for group, known, count in parts
        ]

    def _release(self, first: int) -> list[Row]:
        """Put the rows that are read in front of the others, each with a copy of its own -> those rows."""
        have = self.target.lengths[first:]
        places = {id(group): first + place for place, group in enumerate(self.groups)}
        done = [group for group, known in zip(self.groups, have, strict=True) if known >= len(group.text)]
        if not done:
            return []
        for group in (group for group in done if not group.has_media):
            self._store.remember(places[id(group)], group.text, group.rows[0].request.cache_salt)
        twins = [(row, places[id(group)]) for group in done for row in group.rows[1:]]
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
