"""`TrieCache`: the prefixes of several searches in the cache of one model, a row for each prompt.

The prompt is read once. Behind it lies a trie of prefixes, of which each sees its own line: nothing is copied when
beams fork, and one call scores whatever is new in all rows.
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

WASTE = 24
"""Dead prefixes that a row may hold before the others are moved together."""


@dataclass(frozen=True)
class _Held:
    """What a row holds: `base` tokens of text, which all beams have in common, and the trie behind them.

    `start` is the position of the root. `places` are the prefixes in the order of their slots, parents first; `seen`
    (prefixes, prefixes) is which of them each sees.
    """

    start: int
    base: int
    places: dict[Prefix, int]
    seen: Tensor

    def lacks(self, prefix: Prefix) -> bool:
        """Whether the row has to be fed this prefix before what continues it."""
        return prefix not in self.places and self.start + prefix.depth >= self.base

    def grown(self, new: Sequence[Prefix]) -> _Held:
        """The row with more prefixes."""
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
        """How many tokens behind the base each prefix stands."""
        return [self.start + prefix.depth - self.base for prefix in self.places]

    def useful(self, live: Sequence[Prefix]) -> list[Prefix]:
        """The prefixes of which live ones are continuations, and those that continue live ones."""
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

    def settled(self, kept: Sequence[Prefix], live: Sequence[Prefix]) -> _Held:
        """The row with the kept prefixes alone, moved together; those that all live ones begin with become text."""
        places = [self.places[prefix] for prefix in kept]
        seen = self.seen[places][:, places]
        common = set.intersection(*({*prefix.upward()} for prefix in live))
        count = next((i for i, prefix in enumerate(kept) if prefix not in common), len(kept))
        left = {prefix: place for place, prefix in enumerate(kept[count:])}
        return _Held(self.start, self.base + count, left, seen[count:, count:])


class TrieCache:
    """Feeds prefixes to a Scorer that serves nobody else meanwhile, each once."""

    def __init__(self, scorer: Scorer) -> None:
        self.scorer = scorer
        self.rows: list[_Held] = []

    def add(self, requests: Sequence[Request]) -> None:
        """Append a row for each request, and read all of the prompts but their last tokens, the roots."""
        first = len(self.rows)
        self.scorer.add(len(requests), [request.source for request in requests])
        self.scorer.prefill([request.prompt[:-1] for request in requests], first)
        ends = [len(request.prompt) - 1 for request in requests]
        self.rows += [_Held(end, end, {}, torch.zeros(0, 0, dtype=torch.bool)) for end in ends]

    def free(self, places: Collection[int]) -> None:
        """Remove rows; the others keep their order."""
        self.scorer.free(sorted(places))
        self.rows = [row for place, row in enumerate(self.rows) if place not in places]

    def lacking(self, place: int, wanted: Sequence[Prefix]) -> list[Prefix]:
        """What a row has to be fed to hold these prefixes: they and their beginnings, as far as it lacks them."""
        found: dict[Prefix, None] = {}
        for prefix in wanted:
            line = []
            for node in prefix.upward():
                if node in found or not self.rows[place].lacks(node):
                    break
                line.append(node)
            found.update(dict.fromkeys(reversed(line)))
        return list(found)

    def feed(self, new: Sequence[Sequence[Prefix]]) -> Tensor:
        """Feed each row prefixes that it lacks, parents first -> logits (all prefixes, vocab), row by row."""
        held = torch.tensor([[len(row.places)] for row in self.rows])
        self.rows = [row.grown(more) if more else row for row, more in zip(self.rows, new, strict=True)]
        width = self._width(max(map(len, new)))
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

    def _width(self, count: int) -> int:
        """Graphs are made for widths: few different ones are enough."""
        by_graphs = isinstance(self.scorer, HasModel) and self.scorer.execution is not None
        return 1 << (count - 1).bit_length() if by_graphs else count

    def prune(self, live: Sequence[Sequence[Prefix]]) -> None:
        """Forget, of each row, what no live prefix begins with or is continued by, where that is worth moving keys."""
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
        """The same rows for a Scorer that shares them; `scorer.rollback` to the present lengths takes back what it
        adds."""
        other = TrieCache(scorer)
        other.rows = list(self.rows)
        return other
