"""Draft by a smaller model: the paper's approximation model M_q, sampled token by token, as a chain or a tree."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, islice, pairwise
from numbers import Integral
from operator import mul

import torch
from torch import Tensor

from slipstream.fused import FED, Wish
from slipstream.laws import Law, fit
from slipstream.models import CausalScorer, padded
from slipstream.records import ABSENT, Context, Draft, Round, Row, Scorer, Texts, Tree, accepted_paths, ancestors
from slipstream.sampling import Sampling, draw, uniforms


class Follower:
    """Keeps a scorer's cache in step with the rows of a context.

    The cache may lag behind the text: by two tokens after a full acceptance (the last draft was sampled but never
    fed), by any number after rounds without drafting, by the whole prompt at the start; `catch_up` feeds what is
    missing. A text longer than the scorer's context is followed in a window of its last tokens.
    """

    def __init__(self, scorer: Scorer) -> None:
        scorer.free(range(len(scorer.lengths)))  # leftovers of an earlier drafter
        self.scorer = scorer
        self.starts: list[int] = []  # where each row's window begins in its text
        self._rows: list[Row] = []

    def follow(self, rows: Sequence[Row]) -> None:
        """Make our rows those of the context: free the ended, add the new. Rows that run on keep their order."""
        running = {id(row) for row in rows}
        if ended := [place for place, row in enumerate(self._rows) if id(row) not in running]:
            self.scorer.free(ended)
            self.starts = [start for place, start in enumerate(self.starts) if place not in set(ended)]
        if new := len(rows) - len(self.starts):
            self.scorer.add(new, [row.request.source for row in rows[len(rows) - new :]])
            self.starts += [0] * new
        self._rows = list(rows)

    def catch_up(self, room: int) -> Tensor:
        """Feed what the cache lacks, leaving room for more tokens -> logits (rows, 1, vocab) of the last token."""
        return self.feed(self.lacking(room))

    def lacking(self, room: int) -> list[list[int]]:
        """Feed what the cache lacks but one or two tokens, leaving room for more -> those tokens."""
        self._slide(room)
        missing = self._missing()
        if max(map(len, missing)) > FED:
            self.scorer.prefill([tokens[:-1] for tokens in missing])
            missing = self._missing()
        return missing

    def feed(self, missing: Sequence[Sequence[int]]) -> Tensor:
        """Feed tokens, one or more for every row -> logits (rows, 1, vocab) of the last ones."""
        counts = torch.tensor([len(tokens) for tokens in missing], device=self.scorer.device)
        logits = self.scorer.extend(padded(missing, self.scorer.device), counts.tolist())
        return logits[torch.arange(len(missing), device=counts.device), counts - 1].unsqueeze(1)

    def cover(self, room: int) -> None:
        """Feed what the cache lacks but the last token, leaving room for more: as a target's cache before a round."""
        self._slide(room)
        missing = [tokens[:-1] for tokens in self._missing()]
        if any(missing):
            self.scorer.prefill(missing)

    def rollback(self, round: Round) -> None:
        """Forget drafted tokens that were not kept; in a tree, move the accepted ones together."""
        if not self._rows:
            return
        kept = [len(row.tokens) - 1 - start for row, start in zip(self._rows, self.starts, strict=True)]
        have = self.scorer.lengths
        if round.verdict.path is not None and round.draft.parents is not None:
            fed = _inner(round.draft.parents)
            paths = [[node for node in path if node < fed] for path in accepted_paths(round.verdict)]
            bases = [length + 1 - len(new) for length, new in zip(kept, round.tokens, strict=True)]
            self.scorer.keep([min(base, length) for base, length in zip(bases, have, strict=True)], paths)
            have = [min(h, base + len(path)) for h, base, path in zip(have, bases, paths, strict=True)]
        self.scorer.rollback([min(pair) for pair in zip(have, kept, strict=True)])

    def _missing(self) -> list[list[int]]:
        """The tokens the cache lacks. An id that only the target knows is fed as the draft's last one (padding)."""
        last = self.scorer.vocab - 1
        places = zip(self._rows, self.starts, self.scorer.lengths, strict=True)
        return [[min(token, last) for token in row.tokens[start + have :]] for row, start, have in places]

    def _slide(self, room: int) -> None:
        """Begin a new window of half the context where text and draft no longer fit."""
        limit = self.scorer.context
        if limit is None:
            return
        lengths = list(self.scorer.lengths)
        for place, row in enumerate(self._rows):
            if len(row.tokens) - self.starts[place] + room > limit:
                self.starts[place] = len(row.tokens) - max(1, min(limit // 2, limit - room))
                lengths[place] = 0
        self.scorer.rollback(lengths)


class ModelDrafter:
    """Samples a chain from a Scorer with the request's own sampling settings.

    Drafting from a window of the text is exact, since q is the law the token was really sampled from; the
    statistics count such tokens as `windowed`.
    """

    def __init__(self, scorer: Scorer, vocab: int | None = None) -> None:
        """`vocab`: size of the target's logits. The draft's padding ids beyond it are never proposed."""
        self.scorer = scorer
        self.vocab = vocab or scorer.vocab
        self._follower = Follower(scorer)

    def propose(self, context: Context, gammas: Sequence[int]) -> Draft:
        """Sample up to `gammas[r]` tokens per row, each from the law given all before it."""
        self._follower.follow(context.rows)
        gamma = max(gammas, default=0)
        if not gamma:
            return Draft.empty(len(context.rows), self.scorer.device)
        missing = self._follower.lacking(gamma)
        if (draft := self._at_once(context, missing, gammas)) is not None:
            return draft
        logits = self._follower.feed(missing)
        tokens = torch.empty(len(context.rows), 0, dtype=torch.long, device=self.scorer.device)
        laws: list[Law] = []
        for i in range(gamma):
            laws.append(context.law(fit(logits, self.vocab), Texts.chain(tokens, 1), self.scorer.name).bare())
            tokens = torch.cat([tokens, context.draw(laws[-1], "draft", start=i)], 1)
            if i + 1 < gamma:
                logits = self.scorer.extend(tokens[:, -1:], [int(i + 1 < wanted) for wanted in gammas])
        return Draft(tokens, Law.join(laws, 1), tuple(gammas), _windowed(self._follower, gammas))

    def _at_once(self, context: Context, missing: Sequence[Sequence[int]], gammas: Sequence[int]) -> Draft | None:
        """The chains by graphs, with the draws they would have token by token; None if there are no such graphs, or if
        more than temperatures makes the laws. (Greedy texts and sampled ones are decoded apart.)"""
        if not isinstance(self.scorer, CausalScorer) or self.scorer.fused is None or context.seam is not draw:
            return None
        samplers = [row.request.sampler for row in context.rows]
        known = [sampler.temperature_alone for sampler in samplers if isinstance(sampler, Sampling)]
        temperatures = [each for each in known if each is not None]
        if len(temperatures) < len(samplers):
            return None
        chances = uniforms(context.key("draft"), max(gammas)) if any(temperatures) else ()
        chains = self.scorer.chain(Wish(missing, gammas, temperatures, self.vocab, chances))
        return chains and Draft(*chains, tuple(gammas), _windowed(self._follower, gammas))

    def observe(self, round: Round) -> None:
        """Forget drafted tokens that were not kept."""
        self._follower.rollback(round)


MOST_NODES, MOST_LEVELS = 1024, 64
"""The largest tree: every node is a token of one pass of the target, and verifying goes from level to level."""


def tree_shape(shape: Sequence[int], vocab: int | None = None) -> tuple[int, ...]:
    """Candidates per level, checked: as integers, within what can be verified and within the draft's vocabulary.

    Raises ValueError for anything else.
    """
    if isinstance(shape, str) or not isinstance(shape, Iterable):
        raise ValueError(f"a tree of shape {shape!r} is not possible: give candidates per level, such as (3, 2, 1).")
    levels = tuple(shape)
    whole = all(isinstance(width, Integral) and not isinstance(width, bool) for width in levels)
    if not levels or not whole or min(levels) < 1:
        raise ValueError(f"a tree of shape {levels} is not possible: give 1 or more candidates per level.")
    widths = list(islice(accumulate(levels, mul), MOST_LEVELS))
    if len(levels) > MOST_LEVELS or sum(widths) > MOST_NODES:
        raise ValueError(
            f"a tree of shape {_short(levels)} is too large: all levels together may hold {MOST_NODES} candidates, "
            f"in at most {MOST_LEVELS} levels."
        )
    if vocab is not None and max(levels) > vocab:
        raise ValueError(
            f"a tree of shape {levels} is not possible: the draft has {vocab} tokens, fewer than candidates."
        )
    return tuple(map(int, levels))


def _short(levels: tuple[int, ...]) -> str:
    return str(levels) if len(levels) < 9 else f"({', '.join(map(str, levels[:8]))}, ...)"


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

    def propose(self, context: Context, gammas: Sequence[int]) -> Draft:
        """Grow the tree as deep as the longest of `gammas`; row r has the levels up to `gammas[r]`."""
        self._follower.follow(context.rows)
        depth = min(max(gammas, default=0), len(self.shape))
        if not depth:
            return Draft.empty(len(context.rows), self.scorer.device)
        parents, ends = tree_parents(self.shape[:depth])
        logits = self._follower.catch_up(len(parents))
        tokens = torch.empty(len(context.rows), 0, dtype=torch.long, device=self.scorer.device)
        laws: list[Law] = []
        for level, (start, end) in enumerate(pairwise(ends)):
            drawn, law = self._level(context, logits, tokens, (parents[:end], start, level))
            tokens, laws = torch.cat([tokens, drawn], 1), [*laws, law]
            if end < len(parents):
                tree = Tree.of(parents[:end], end - start)
                logits = self.scorer.extend(drawn.clamp(min=0), [end - start] * len(context.rows), tree=tree)
        lengths = tuple(ends[min(gamma, depth)] for gamma in gammas)
        windowed = _windowed(self._follower, lengths)
        return Draft(tokens, Law.join(laws, 1), lengths, windowed, parents, self.replacement)

    def observe(self, round: Round) -> None:
        """Keep the accepted path, forget the rest."""
        self._follower.rollback(round)

    def _level(
        self, context: Context, logits: Tensor, tokens: Tensor, place: tuple[tuple[int, ...], int, int]
    ) -> tuple[Tensor, Law]:
        """Candidates (rows, nodes of this level) and the law each was drawn from; logits are their parents'."""
        parents, start, level = place
        above = sorted(set(parents[start:]))  # the parents, in the order of their logits
        texts = Texts(tokens.clamp(min=0), [ancestors(parents)[node] if node >= 0 else () for node in above])
        law = context.law(fit(logits, self.vocab), texts, self.scorer.name)
        picks = [self._siblings(context, law, (place, start, level)) for place in range(len(above))]
        drawn = torch.cat([tokens for tokens, _ in picks], 1)
        if level:  # children of a missing candidate are missing
            drawn = drawn.where(tokens[:, list(parents[start:])] != ABSENT, ABSENT)
        return drawn, Law.join([law for _, law in picks], 1)

    def _siblings(self, context: Context, law: Law, where: tuple[int, int, int]) -> tuple[Tensor, Law]:
        place, start, level = where
        width = self.shape[level]
        one = law.at(torch.full((law.rows,), place, device=law.device))
        if one.scores is not None:  # greedy: the best candidates, the lowest id first among equals
            best = one.scores[:, 0].sort(descending=True, stable=True).indices[:, :width]
            return best, Law(tokens=best)
        drawn, left = [], one.dense
        for sibling in range(width):
            some = left.sum(-1, keepdim=True) > 0
            weights = Law(probs=torch.where(some, left, one.dense))
            new = context.draw(weights, f"draft.{start + place * width + sibling}", start=level)
            drawn.append(new.where(some[..., 0], ABSENT))
            if not self.replacement:
                left = left.scatter(-1, new.unsqueeze(-1), 0)
        return torch.cat(drawn, 1), Law.join([one] * width, 1)


def tree_parents(shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Branching by level -> the parent of every node, level by level, and where each level ends (from 0)."""
    parents: list[int] = []
    above, ends = [-1], [0]
    for width in shape:
        parents += [parent for parent in above for _ in range(width)]
        above = list(range(ends[-1], len(parents)))
        ends.append(len(parents))
    return tuple(parents), tuple(ends)


def _inner(parents: tuple[int, ...]) -> int:
    """How many nodes were fed to the draft: all but the last level."""
    deepest = max(len(line) for line in ancestors(parents))
    return sum(len(line) < deepest for line in ancestors(parents))


def _windowed(follower: Follower, lengths: Sequence[int]) -> tuple[int, ...]:
    return tuple(length if start else 0 for length, start in zip(lengths, follower.starts, strict=True))
