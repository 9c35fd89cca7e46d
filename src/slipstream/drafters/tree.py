"""`TreeDrafter` drafts a tree of candidates, level by level, from a smaller model."""

from collections.abc import Iterable, Sequence
from itertools import accumulate, islice, pairwise
from numbers import Integral
from operator import mul

import torch
from torch import Tensor

from slipstream.core.draft import ABSENT, Draft, Tree, ancestors
from slipstream.core.draws import Purpose
from slipstream.core.law import Law, pad_vocabulary
from slipstream.core.protocols import Scorer, Traits
from slipstream.core.request import Prefixes
from slipstream.core.round import Context, Round
from slipstream.drafters.following import Follower

MOST_NODES, MOST_LEVELS = 1024, 64
"""The limits of a tree's size: the target scores all its nodes in one pass, and verification goes level by level."""


def tree_shape(shape: Sequence[int], vocab: int | None = None) -> tuple[int, ...]:
    if isinstance(shape, str) or not isinstance(shape, Iterable):
        raise ValueError(f"a tree of shape {shape!r} is not possible: give candidates per level, such as (3, 2, 1).")
    levels = tuple(shape)
    whole = all(isinstance(width, Integral) and not isinstance(width, bool) for width in levels)
    if not levels or not whole or min(levels) < 1:
        raise ValueError(f"a tree of shape {levels} is not possible: give 1 or more candidates per level.")
    widths = list(islice(accumulate(levels, mul), MOST_LEVELS))
    if len(levels) > MOST_LEVELS or sum(widths) > MOST_NODES:
        shown = str(levels) if len(levels) < 9 else f"({', '.join(map(str, levels[:8]))}, ...)"
        raise ValueError(
            f"a tree of shape {shown} is too large: all levels together may hold {MOST_NODES} candidates, "
            f"in at most {MOST_LEVELS} levels."
        )
    if vocab is not None and max(levels) > vocab:
        raise ValueError(f"a tree of shape {levels} is not possible: the draft has only {vocab} tokens.")
    return tuple(map(int, levels))


class TreeDrafter:
    """Drafts a small tree: `shape[d]` candidates for every node at depth d, level by level.

    Sampling: siblings are drawn from the law at their parent one after the other, without replacement unless
    `replacement`. Greedy: the best candidates, each a point mass. Gamma limits the depth.
    """

    def __init__(
        self, scorer: Scorer, shape: Sequence[int], vocab: int | None = None, replacement: bool = False
    ) -> None:
        self.scorer, self.replacement = scorer, replacement
        self.vocab = vocab or scorer.vocab
        self.shape = tree_shape(shape, min(self.vocab, scorer.vocab))
        self._follower = Follower(scorer)
        self.traits = Traits((scorer,), scorer, release=self._follower.release)

    def propose(self, context: Context, gammas: Sequence[int]) -> Draft:
        """Grow the tree as deep as the longest of `gammas`; row r has the levels up to `gammas[r]`."""
        gammas = self._follower.begin(context, gammas)
        if not any(gammas):
            return Draft.empty(len(context.rows), self.scorer.device)
        depth = min(max(gammas), len(self.shape))
        parents, ends = tree_parents(self.shape[:depth])
        logits = self._follower.catch_up(len(parents))
        tokens = torch.empty(len(context.rows), 0, dtype=torch.long, device=self.scorer.device)
        laws: list[Law] = []
        for level, (start, end) in enumerate(pairwise(ends)):
            above = sorted(set(parents[start:end]))  # the parents, in the order of their logits
            texts = Prefixes(tokens.clamp(min=0), [ancestors(parents)[node] if node >= 0 else () for node in above])
            law = context.law(pad_vocabulary(logits, self.vocab), texts, self.scorer.name)
            picks = [self._siblings(context, law, (place, start, level)) for place in range(len(above))]
            drawn = torch.cat([each for each, _ in picks], 1)
            if level:  # children of a missing candidate are missing
                drawn = drawn.where(tokens[:, list(parents[start:end])] != ABSENT, ABSENT)
            tokens, laws = torch.cat([tokens, drawn], 1), [*laws, *(law for _, law in picks)]
            if end < len(parents):
                tree = Tree.of(parents[:end], end - start)
                logits = self.scorer.extend(
                    drawn.clamp(min=0), [(end - start) * bool(gamma) for gamma in gammas], tree=tree
                )
        lengths = tuple(ends[min(gamma, depth)] for gamma in gammas)
        return Draft(tokens, Law.join(laws, 1), lengths, parents, self.replacement)

    def observe(self, round: Round) -> None:
        self._follower.rollback(round)

    def _siblings(self, context: Context, law: Law, where: tuple[int, int, int]) -> tuple[Tensor, Law]:
        """Draw the children of one node -> tokens (rows, width), and the law they were drawn from.
        `where` holds the place of the node in `law`, the number of the first node of this level, and the level."""
        place, start, level = where
        width = self.shape[level]
        one = law.at(torch.full((law.rows,), place, device=law.device))
        if one.points is not None:
            assert law.points is not None
            kinds = [[row for row, point in enumerate(law.points) if point is kind] for kind in (True, False)]
            parts = [
                self._siblings(context.select(rows), law.select(torch.tensor(rows, device=law.device)), where)
                for rows in kinds
            ]
            order = torch.tensor([row for rows in kinds for row in rows], device=law.device).argsort()
            tokens, laws = zip(*parts, strict=True)
            return torch.cat(tokens)[order], Law.join(laws, 0).select(order)
        if one.scores is not None:  # greedy: the best candidates, the lowest id first among equals
            best = one.scores[:, 0].sort(descending=True, stable=True).indices[:, :width]
            return best, Law(tokens=best)
        drawn, left = [], one.dense
        for sibling in range(width):
            some = left.sum(-1, keepdim=True) > 0
            weights = Law(probs=torch.where(some, left, one.dense))
            new = context.draw(weights, Purpose.DRAFT, start=level, node=start + place * width + sibling)
            drawn.append(new.where(some[..., 0], ABSENT))
            if not self.replacement:
                left = left.scatter(-1, new.unsqueeze(-1), 0)
        return torch.cat(drawn, 1), Law.join([one] * width, 1)


def tree_parents(shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Convert branching by level to the parent of every node, level by level, and the end of each level (from 0)."""
    parents: list[int] = []
    above, ends = [-1], [0]
    for width in shape:
        parents += [parent for parent in above for _ in range(width)]
        above = list(range(ends[-1], len(parents)))
        ends.append(len(parents))
    return tuple(parents), tuple(ends)
