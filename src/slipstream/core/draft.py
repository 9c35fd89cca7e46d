"""`Draft` and `Verdict`: proposed tokens with the law each was sampled from, and what a verifier decides about them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby

import torch
from torch import Tensor

from slipstream.core.law import Law

ABSENT = -1  # the token id that marks a tree node which a row does not have


@dataclass(frozen=True, slots=True)
class Tree:
    """The positions and the attention mask of a forward pass whose new tokens form a tree, per row or shared by all.

    `held[r]` tree tokens of row r are in the cache already, at its end, and the new ones follow. Tree token k has the
    position base + depths[r, k], where base is the length before the tree; new token i attends to the text before the
    tree and to the tree tokens with seen[r, i, k]: its ancestors and itself. Padding attends to no tree token.

    Shapes: held (rows or 1, 1), depths (rows or 1, tokens), seen (rows or 1, new, tokens).
    """

    held: Tensor
    depths: Tensor
    seen: Tensor

    @staticmethod
    @lru_cache(maxsize=256)
    def of(parents: tuple[int, ...], new: int) -> Tree:
        """Make a tree from the parent of each token (-1: the text itself); the last `new` tokens are fed."""
        lines = ancestors(parents)
        seen = torch.zeros(len(parents), len(parents), dtype=torch.bool)
        for node, line in enumerate(lines):
            seen[node, list(line)] = True
        held = len(parents) - new
        return Tree(torch.tensor([[held]]), torch.tensor([[len(line) - 1 for line in lines]]), seen[None, held:])

    def of_row(self, row: int) -> tuple[int, Tensor]:
        """Return the number of a row's tree tokens in the cache, and the mask of its new ones, (new, tokens)."""
        row = row if len(self.held) > 1 else 0
        return int(self.held[row, 0]), self.seen[row]


@lru_cache(maxsize=256)
def ancestors(parents: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the path from the root to each node, itself included. Parents come before their children."""
    lines: list[tuple[int, ...]] = []
    for node, parent in enumerate(parents):
        assert parent < node, "parents come before their children"
        lines.append((*(lines[parent] if parent >= 0 else ()), node))
    return tuple(lines)


def padded(texts: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Convert texts of different lengths to a tensor (rows, longest), padded on the right with zeros."""
    width = max(map(len, texts), default=0)
    return torch.tensor([[*text, *[0] * (width - len(text))] for text in texts], dtype=torch.long, device=device)


def common_length(left: Sequence[int], right: Sequence[int]) -> int:
    length = min(len(left), len(right))
    if left[:length] == right[:length]:  # the usual case, without a loop
        return length
    return next((place for place in range(length) if left[place] != right[place]), length)


def runs_of_texts(texts: Sequence[Sequence[int]]) -> Iterator[tuple[int, Sequence[Sequence[int]]]]:
    """Yield the first row and the texts of every run of neighbouring rows whose texts are not empty."""
    for some, run in groupby(range(len(texts)), lambda row: bool(texts[row])):
        rows = list(run)
        if some:
            yield rows[0], texts[rows[0] : rows[-1] + 1]


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed tokens and the law each was REALLY sampled from.

    `tokens` (rows, gamma) is padded on the right; row r proposes `lengths[r]` tokens, possibly none. `law` covers
    the same positions; None only if no row proposes anything.

    `parents` is None for a chain. In a tree it names each node's parent (-1 for the pending token; level by level);
    siblings were drawn one after the other from the law at their parent, each without the tokens drawn before if
    `replacement` is False. A row may lack nodes: those from `lengths[r]` on, and those whose token is ABSENT.

    `parts` are what a draft was made from that was not drawn token by token: the drafts that it was chosen from, or the
    rounds of a draft that is drafted itself. Decoding does not read them; a certificate does.

    `counts` are the lengths as a tensor (rows,), for verification in a graph that serves drafts of different lengths.
    """

    tokens: Tensor
    law: Law | None
    lengths: tuple[int, ...]
    parents: tuple[int, ...] | None = None
    replacement: bool = False
    parts: tuple[ScopedDraft, ...] = ()
    counts: Tensor | None = None

    @property
    def q(self) -> Law:
        """The law of a draft that proposes something."""
        assert self.law is not None
        return self.law

    @property
    def ragged(self) -> bool:
        return self.counts is not None or min(self.lengths) < self.tokens.shape[1]

    def counted(self, device: torch.device) -> Tensor:
        return torch.tensor(self.lengths, device=device) if self.counts is None else self.counts

    @property
    def tree(self) -> Tree | None:
        """The tree of the pending token and all nodes, with which the target scores them; None for a chain."""
        if self.parents is None:
            return None
        return Tree.of((-1, *(parent + 1 for parent in self.parents)), 1 + len(self.parents))

    @property
    def paths(self) -> int | None:
        """The number of independent paths in a draft whose nodes were drawn with replacement and that branches at the
        root alone; None for chains and other trees."""
        if self.parents is None or not self.replacement:
            return None
        count = self.parents.count(-1)
        levels = tuple(node - count for node in range(count, len(self.parents)))
        return count if self.parents == (*(-1,) * count, *levels) else None

    @property
    def fed(self) -> Tensor:
        """The tokens with 0 in place of ABSENT, as they are fed to a model."""
        return self.tokens if self.parents is None else self.tokens.clamp(min=0)

    @property
    def depths(self) -> tuple[int, ...]:
        if self.parents is None:
            return self.lengths
        lines = ancestors(self.parents)
        return tuple(len(lines[length - 1]) if length else 0 for length in self.lengths)

    @staticmethod
    def empty(rows: int, device: torch.device) -> Draft:
        """Make a draft without tokens, with which a round becomes a plain decoding step."""
        return Draft(torch.empty(rows, 0, dtype=torch.long, device=device), None, (0,) * rows)

    def to(self, device: torch.device) -> Draft:
        if self.tokens.device == device:
            return self
        return replace(self, tokens=self.tokens.to(device), law=self.law and self.law.to(device))

    def select(self, places: Sequence[int]) -> Draft:
        """Return the draft of the rows at these places, in this order, without its parts."""
        return replace(
            self,
            tokens=self.tokens[list(places)],
            law=self.law and self.law.select(torch.tensor(places, device=self.law.device)),
            lengths=tuple(self.lengths[place] for place in places),
            parts=(),
        )


@dataclass(frozen=True, slots=True)
class ScopedDraft:
    """A draft that another draft was made from. The names of its draws begin with `scope`, if that is not empty.

    If it was verified, as inside a draft that is drafted itself, `p` is the law at each of its positions (see
    `Round.p`) and `verdict` the outcome. `rows` are the places, in the whole draft, of its rows.
    """

    scope: str
    draft: Draft
    rows: tuple[int, ...]
    p: Law | None = None
    verdict: Verdict | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision of a verifier: `accepted` (rows,) drafted tokens stand, and `law` (rows, 1) is the next token's.

    `beta` (rows, gamma) is the chance, given the prefix, that the drafted token of that position is kept if it is
    tested: sum_x min(p(x), q(x)) when sampling (Theorem 3.5), and for greedy decoding whether it is kept.
    Lossy rules report their price per drafted token, both (rows, gamma): `relaxed`, whether it passed only thanks to
    the relaxation, and `distance`, the total variation of that position's law from the target's. `path` (rows, depth)
    names the accepted nodes of a tree; None for a chain.
    """

    accepted: Tensor
    law: Law
    beta: Tensor
    relaxed: Tensor | None = None
    distance: Tensor | None = None
    path: Tensor | None = None


def merge_verdicts(verdicts: Sequence[Verdict], places: Sequence[Sequence[int]]) -> Verdict:
    """Join the verdicts of groups of rows into one; the rows of each group stand at its `places`."""
    order = torch.tensor([place for group in places for place in group]).argsort().to(verdicts[0].accepted.device)

    def priced(name: str) -> Tensor | None:
        """Join a figure that only lossy rules report; rows of other rules get 0."""
        if all(getattr(verdict, name) is None for verdict in verdicts):
            return None
        figures = [getattr(verdict, name) for verdict in verdicts]
        zeros = (torch.zeros_like(verdict.beta) for verdict in verdicts)
        return torch.cat([zero if each is None else each for each, zero in zip(figures, zeros, strict=True)])[order]

    paths = [verdict.path for verdict in verdicts if verdict.path is not None]
    return Verdict(
        torch.cat([verdict.accepted for verdict in verdicts])[order],
        Law.join([verdict.law for verdict in verdicts], 0).select(order),
        torch.cat([verdict.beta for verdict in verdicts])[order],
        priced("relaxed"),
        priced("distance"),
        torch.cat(paths)[order] if paths else None,
    )


def accepted_paths(verdict: Verdict) -> list[list[int]]:
    assert verdict.path is not None
    pairs = zip(verdict.path.tolist(), verdict.accepted.tolist(), strict=True)
    return [path[:count] for path, count in pairs]


Draw = Callable[..., Tensor]  # the only randomness of a verifier: draw(law, purpose, start=0, node=None) -> tokens
Verifier = Callable[[Law, Draft, Draw], Verdict]  # A verifier: (p over gamma + 1 positions, draft, draw) -> Verdict
