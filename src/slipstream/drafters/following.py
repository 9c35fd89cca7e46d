"""`Follower` keeps a draft model's cache up to date with the texts of a batch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.cache.prefixes import recalling
from slipstream.core.draft import accepted_paths, ancestors, padded
from slipstream.core.protocols import HasModel, Scorer
from slipstream.core.request import Row
from slipstream.core.round import Context, Round, Stopwatch
from slipstream.execution.draft_graphs import FED


class Follower:
    """Keeps a Scorer's cache up to date with the rows of a context.

    The cache may lag behind the text: by two tokens after a full acceptance (the last draft was sampled but never
    fed), by any number after rounds without drafting, by the whole prompt at the start; `catch_up` feeds the missing
    tokens. A text longer than the Scorer's context is followed in a window of its last tokens.
    """

    def __init__(self, scorer: Scorer, at_once: int = FED) -> None:
        """Take over a Scorer, and free its rows; `at_once` missing tokens may be fed with the first drafting step."""
        self._at_once = at_once
        scorer.free(range(len(scorer.lengths)))  # leftovers of an earlier drafter
        self.scorer, self._store = scorer, recalling(scorer)
        self.starts: list[int] = []  # the position at which each row's window begins in its text
        self._rows: list[Row] = []
        self._known: list[int] = []  # how many tokens of each row are stored in the prefix cache
        self._late: list[bool] = []  # per row: its text is not read yet, so it gets no draft in this round
        self._watch = Stopwatch()

    def release(self) -> None:
        self.follow(())

    def follow(self, rows: Sequence[Row], watch: Stopwatch | None = None) -> None:
        """Follow the rows of the context: free the rows that left, and add the new ones.

        Rows that run on keep their order; a preempted row that came back is among the new. The time of reading until
        the next call counts as `prefill` on the watch.
        """
        self._watch = watch or Stopwatch()
        kept = still_first(self._rows, rows)
        if left := [place for place in range(len(self._rows)) if place not in set(kept)]:
            for place in left:
                self._remember(place)
            self.scorer.free(left)
        self.starts = [self.starts[place] for place in kept]
        self._known = [self._known[place] for place in kept]
        for row in rows[len(kept) :]:
            with self._watch.apart("prefill"):  # an encoder of the draft's own reads the source
                self.scorer.add(1, [row.request.source])
            text, limit, known = self._ids(row.readable[:-1]), self.scorer.context, 0
            if row.request.gamma != 0 and (limit is None or len(text) < limit):
                known = self._store.recall(len(self.starts), text, row.request.cache_salt)
            self.starts.append(0)
            self._known.append(known)
        self._rows, self._late = list(rows), [False] * len(rows)

    def begin(self, context: Context, gammas: Sequence[int]) -> list[int]:
        """Follow the rows of a context and read what they lack -> how many tokens to draft; see `read_late`."""
        if not any(gammas):
            return [0] * len(gammas)
        self.follow(context.rows, context.watch)
        return self.read_late(gammas, context.prefill_chunk)

    def _remember(self, place: int) -> None:
        row, have = self._rows[place], self.scorer.lengths[place]
        if not self.starts[place] and row.finish_reason != "error":
            self._store.remember(place, self._ids(row.readable[:have]), row.request.cache_salt)
        self._known[place] = have

    def read_late(self, gammas: Sequence[int], piece: int) -> list[int]:
        """Read at most `piece` missing tokens of the texts, if running rows would have to wait for more.

        Returns how many tokens to draft for each row in this round: none for rows whose text is not read yet, `gammas`
        for the others. Which texts are unread is known before anything is sampled, so that this choice is exact.
        """
        texts = self._texts_behind()
        wanted = [bool(gamma) and row.request.gamma != 0 for row, gamma in zip(self._rows, gammas, strict=True)]
        behind = [len(text) if want and len(text) > FED else 0 for want, text in zip(wanted, texts, strict=True)]
        # Texts without a wanted draft are not read until one is; a token or two are fed along, which costs nothing.
        self._late = [
            not want and row.request.gamma != 0 and len(text) > FED
            for want, row, text in zip(wanted, self._rows, texts, strict=True)
        ]
        if sum(behind) <= piece or not any(row.output for row in self._rows):
            return list(gammas)
        counts, room = [0] * len(texts), piece
        for place in sorted(range(len(texts)), key=behind.__getitem__):  # the shortest first
            counts[place] = min(behind[place], room)
            room -= counts[place]
        late = [count < length for count, length in zip(counts, behind, strict=True)]
        pieces = [text[:count] if is_late else [] for is_late, text, count in zip(late, texts, counts, strict=True)]
        self._read(pieces)
        self._late = [is_late or is_idle for is_late, is_idle in zip(late, self._late, strict=True)]
        return [0 if is_late else gamma for is_late, gamma in zip(late, gammas, strict=True)]

    def catch_up(self, room: int) -> Tensor:
        """Feed the missing tokens, leaving room for `room` more -> logits (rows, 1, vocab) after the last token."""
        return self.feed(self.lacking(room))

    def lacking(self, room: int) -> list[list[int]]:
        """Feed all but at most `at_once` missing tokens, leaving room for `room` more -> the tokens still missing."""
        self._slide(room)
        missing = self._missing()
        if max(map(len, missing)) > self._at_once:
            self._read([tokens[:-1] for tokens in missing])
            missing = self._missing()
        return missing

    def feed(self, missing: Sequence[Sequence[int]]) -> Tensor:
        """Feed tokens -> logits (rows, 1, vocab) after the last ones, meaningless for a row that is fed none."""
        counts = torch.tensor([len(tokens) for tokens in missing], device=self.scorer.device)
        logits = self.scorer.extend(padded(missing, self.scorer.device), counts.tolist())
        return logits[torch.arange(len(missing), device=counts.device), counts - 1].unsqueeze(1)

    def cover(self, room: int) -> None:
        """Feed the missing tokens but the last, leaving room for `room` more: as a target's cache before a round."""
        self._slide(room)
        self._read([tokens[:-1] for tokens in self._texts_behind()])

    def rollback(self, round: Round) -> None:
        """Drop drafted tokens that were not kept; in a tree, move the accepted ones together."""
        if not self._rows or not any(round.gammas):  # nothing was drafted, so there is nothing to drop
            return
        if round.verdict.path is not None and round.draft.parents is not None:
            kept, have = self._kept(), self.scorer.lengths
            levels = list(map(len, ancestors(round.draft.parents)))
            fed = sum(level < max(levels) for level in levels)  # the last level was not fed
            paths = [[node for node in path if node < fed] for path in accepted_paths(round.verdict)]
            bases = [length + 1 - len(new) for length, new in zip(kept, round.tokens, strict=True)]
            self.scorer.keep([min(base, length) for base, length in zip(bases, have, strict=True)], paths)
            moved = [min(h, base + len(path)) for h, base, path in zip(have, bases, paths, strict=True)]
            self.scorer.rollback(moved)
        self.trim()

    def trim(self) -> None:
        """Drop the cached tokens of each row that are not part of its text, and the pending last one."""
        if not self._rows:
            return
        self.scorer.rollback([min(pair) for pair in zip(self.scorer.lengths, self._kept(), strict=True)])
        for place, row in enumerate(self._rows):
            if self._known[place] < len(row.readable) - len(row.output) - 1 <= self.scorer.lengths[place]:
                self._remember(place)  # the prompt has been read

    def _read(self, pieces: Sequence[Sequence[int]]) -> None:
        if any(pieces):
            with self._watch.apart("prefill"):
                self.scorer.prefill(pieces)

    def _kept(self) -> list[int]:
        return [len(row.readable) - 1 - start for row, start in zip(self._rows, self.starts, strict=True)]

    def _missing(self) -> list[list[int]]:
        """Return the tokens that the cache lacks: only the last one for a row with gamma 0, whose text is never read
        because its logits are not used; none for a row that has read its piece of this round."""
        texts = zip(self._rows, self._texts_behind(), self._late, strict=True)
        return [[] if late else text if row.request.gamma != 0 else text[-1:] for row, text, late in texts]

    def _texts_behind(self) -> list[list[int]]:
        """Return the tokens of each text that come after those in the cache; unknown ids become the last id."""
        places = zip(self._rows, self.starts, self.scorer.lengths, strict=True)
        return [self._ids(row.readable[start + have :]) for row, start, have in places]

    def _ids(self, tokens: Sequence[int]) -> list[int]:
        last = self.scorer.vocab - 1
        return [min(token, last) for token in tokens]

    def _slide(self, room: int) -> None:
        limit = self.scorer.context
        if limit is None:
            return
        lengths = list(self.scorer.lengths)
        for place, row in enumerate(self._rows):
            if (length := len(row.readable)) - self.starts[place] + room > limit:
                self.starts[place] = length - max(1, min(limit // 2, limit - room))
                lengths[place] = 0
        self.scorer.rollback(lengths)


def still_first(known: Sequence[Row], rows: Sequence[Row]) -> list[int]:
    """Return the places of the known rows that the context begins with, in its order."""
    kept = list[int]()
    for place, row in enumerate(known):
        if len(kept) < len(rows) and row is rows[len(kept)]:
            kept.append(place)
    return kept


def read_by_target(target: HasModel, context: Context, gammas: Sequence[int]) -> list[int]:
    """Return `gammas`, with 0 for rows of which the target has not read all tokens but the pending one."""
    lengths = [*target.lengths, *[0] * len(context.rows)]
    read = [have > 0 and have == len(row.tokens) - 1 for have, row in zip(lengths, context.rows, strict=False)]
    return [gamma if known else 0 for gamma, known in zip(gammas, read, strict=True)]
