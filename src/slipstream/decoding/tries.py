"""`TrieCache`: the prefixes of several beam searches in one model's KV cache, a row for each prompt.

Each prompt is read once. A trie of prefixes is stored behind it, in which each prefix attends to its ancestors only, so
that nothing is copied when beams fork, and one call scores the new prefixes of all rows.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.core.beams import Prefix
from slipstream.core.draft import Tree, padded
from slipstream.core.protocols import HasModel, Scorer
from slipstream.core.request import Request

WASTE = 24  # the number of unneeded prefixes that a row may hold before the needed ones are compacted


@dataclass(frozen=True)
class _RowTrie:
    """The contents of a row: `base` tokens of text, which all beams share, and the trie of prefixes behind them.

    `start` is the position of the root. `places` maps prefixes to their slots, parents first; `seen` (prefixes,
    prefixes) is the attention mask between them.
    """

    start: int
    base: int
    places: dict[Prefix, int]
    seen: Tensor

    def lacks(self, prefix: Prefix) -> bool:
        """Return whether this prefix is not in the row yet, so that it must be fed before its continuations."""
        return prefix not in self.places and self.start + prefix.depth >= self.base

    def grown(self, new: Sequence[Prefix]) -> _RowTrie:
        held, places = len(self.places), dict(self.places)
        seen = torch.zeros(held + len(new), held + len(new), dtype=torch.bool)
        seen[:held, :held] = self.seen
        for place, prefix in enumerate(new, held):
            if prefix.parent in places:
                seen[place] = seen[places[prefix.parent]]
            seen[place, place] = True
            places[prefix] = place
        return replace(self, places=places, seen=seen)

    @property
    def depths(self) -> list[int]:
        return [self.start + prefix.depth - self.base for prefix in self.places]

    def useful(self, live: Sequence[Prefix]) -> list[Prefix]:
        """Return the prefixes in the row that are ancestors of live ones, live themselves, or their continuations."""
        above, below = set[Prefix](), set[Prefix]()
        for prefix in live:
            for node in prefix.upward():
                if node in above or not (node in self.places or self.lacks(node)):
                    break
                above.add(node)
        for prefix in self.places:
            if prefix in live or prefix.parent in below:
                below.add(prefix)
        return [prefix for prefix in self.places if prefix in above or prefix in below]

    def settled(self, kept: Sequence[Prefix], live: Sequence[Prefix]) -> _RowTrie:
        """Return the row compacted to the kept prefixes; prefixes that all live ones begin with join the base."""
        places = [self.places[prefix] for prefix in kept]
        seen = self.seen[places][:, places]
        common = set.intersection(*({*prefix.upward()} for prefix in live))
        count = next((i for i, prefix in enumerate(kept) if prefix not in common), len(kept))
        left = {prefix: place for place, prefix in enumerate(kept[count:])}
        return _RowTrie(self.start, self.base + count, left, seen[count:, count:])


class TrieCache:
    """Feeds prefixes to a Scorer, each once, and keeps them in its cache; the Scorer must have no other user."""

    def __init__(self, scorer: Scorer) -> None:
        self.scorer = scorer
        self.rows: list[_RowTrie] = []

    def add(self, requests: Sequence[Request]) -> None:
        """Append a row for each request, and prefill its prompt without the last token, the root of the trie."""
        first = len(self.rows)
        self.scorer.add(len(requests), [request.source for request in requests])
        self.scorer.prefill([request.prompt[:-1] for request in requests], first)
        ends = [len(request.prompt) - 1 for request in requests]
        self.rows += [_RowTrie(end, end, {}, torch.zeros(0, 0, dtype=torch.bool)) for end in ends]

    def free(self, places: Collection[int]) -> None:
        self.scorer.free(sorted(places))
        self.rows = [row for place, row in enumerate(self.rows) if place not in places]

    def lacking(self, place: int, wanted: Sequence[Prefix]) -> list[Prefix]:
        """Return the prefixes to feed so that a row holds the wanted ones: those and their ancestors not in it yet."""
        missing: dict[Prefix, None] = {}
        for prefix in wanted:
            path = []
            for node in prefix.upward():
                if node in missing or not self.rows[place].lacks(node):
                    break
                path.append(node)
            missing.update(dict.fromkeys(reversed(path)))
        return list(missing)

    def feed(self, new: Sequence[Sequence[Prefix]]) -> Tensor:
        """Feed each row prefixes that it lacks, parents first -> logits (all prefixes, vocab), row by row."""
        held = torch.tensor([[len(row.places)] for row in self.rows])
        self.rows = [row.grown(more) if more else row for row, more in zip(self.rows, new, strict=True)]
        width = max(map(len, new))
        if isinstance(self.scorer, HasModel) and self.scorer.execution is not None:
            width = 1 << (width - 1).bit_length()  # a power of two, so that few compiled graphs are made
        # Rows hold and get different numbers of prefixes; what a row lacks is masked, and its logits are cut away.
        count = int(held.max()) + width
        depths = torch.zeros(len(new), count, dtype=torch.long)
        seen = torch.zeros(len(new), width, count, dtype=torch.bool)
        for place, (row, more) in enumerate(zip(self.rows, new, strict=True)):
            size = len(row.places)
            if more:
                depths[place, :size] = torch.tensor(row.depths)
                seen[place, : len(more), :size] = row.seen[size - len(more) :]
        tokens = padded([[prefix.token for prefix in more] for more in new], torch.device("cpu"))
        tokens = torch.nn.functional.pad(tokens, (0, width - tokens.shape[1])).to(self.scorer.device)
        logits = self.scorer.extend(tokens, [len(more) for more in new], tree=Tree(held, depths, seen))
        return torch.cat([logits[place, : len(more)] for place, more in enumerate(new)])

    def prune(self, live: Sequence[Sequence[Prefix]]) -> None:
        """Remove prefixes that are neither ancestors nor continuations of live ones, in rows with more than `WASTE`."""
        kept = [row.useful(some) for row, some in zip(self.rows, live, strict=True)]
        worth = [len(row.places) - len(some) > WASTE for row, some in zip(self.rows, kept, strict=True)]
        if not any(worth):
            return
        kept = [some if move else list(row.places) for row, some, move in zip(self.rows, kept, worth, strict=True)]
        bases = [row.base for row in self.rows]
        paths = [[row.places[prefix] for prefix in some] for row, some in zip(self.rows, kept, strict=True)]
        self.scorer.keep(bases, paths)
        self.scorer.rollback([base + len(path) for base, path in zip(bases, paths, strict=True)])
        self.rows = [
            row.settled(some, prefixes) if move else row
            for row, some, prefixes, move in zip(self.rows, kept, live, worth, strict=True)
        ]

    def shared_with(self, scorer: Scorer) -> TrieCache:
        """Return a `TrieCache` on the same rows for a Scorer that shares them.
        `scorer.rollback` to the present lengths undoes what is fed through it."""
        other = TrieCache(scorer)
        other.rows = list(self.rows)
        return other
