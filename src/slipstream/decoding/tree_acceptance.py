"""Verifiers on trees: several candidates per position, scored by one target call.

The same contract as on chains (`acceptance`): laws in, a law out, randomness only through `draw`. `p` covers the
pending token (position 0) and every node j (position j + 1). All rows share the topology; each is verified by itself.
`gbv` is for trees of independent paths that branch at the root, two of which may have the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.core.draft import ABSENT, Draft, Draw, Verdict, ancestors
from slipstream.core.draws import Purpose
from slipstream.core.law import Law
from slipstream.decoding.acceptance import beta, block, nothing_drafted

ROOT = -1


def recursive(p: Law, draft: Draft, draw: Draw) -> Verdict:
    """Verify by recursive rejection, from the root down (arXiv 2305.09781; without replacement: 2402.14160).

    With R = p at the node: candidate x passes with chance min(1, R(x)/D(x)) and becomes the node; after a refusal
    R <- norm(max(0, R - D)). D is the law the candidate was drawn from: q, without the siblings drawn before it.
    """
    if draft.law is None:
        return nothing_drafted(p)
    if p.point:
        return match(p, draft, draw)
    walk = TreeWalk(p, draft, draw)
    _descend(walk, ROOT, walk.everyone)
    return walk.verdict()


def _descend(walk: TreeWalk, node: int, here: Tensor) -> None:
    """Verify the subtree of a node in the rows `here`, which have reached it, and settle them; see `recursive`."""
    rest = walk.p(node)
    for child, (token, law, present) in walk.candidates(node):
        x = token.unsqueeze(-1)
        tested = here & present
        q_x = law.gather(-1, x).squeeze(-1)
        keep = torch.minimum(rest.gather(-1, x).squeeze(-1), q_x)
        passed = walk.toss(keep, q_x - keep, tested, child)
        _descend(walk, child, passed)
        here = here & ~passed
        rest = _where(tested & here, _norm((rest - law).clamp(min=0), rest), rest)
    walk.settle(node, here, rest)


def traversal(p: Law, draft: Draft, draw: Draw) -> Verdict:
    """Verify a tree from the leaves to the root (traversal, arXiv 2505.12398); on a chain it is block verification.

    A node is reached with chance a (1 at the root, min(1, a p(v)/q(v)) at child v). If no child's subtree accepts,
    R = max(0, a P - D), a <- s/(s + 1 - a) with s = sum R, P <- norm R after each; then the path to the node stands
    with chance a and P is the law of the next token. Candidates have to be drawn without replacement.
    """
    if draft.law is None:
        return nothing_drafted(p)
    if p.point:
        return match(p, draft, draw)
    assert not draft.replacement, "traversal verification needs candidates drawn without replacement"
    walk = TreeWalk(p, draft, draw)
    _visit(walk, ROOT, torch.ones_like(walk.everyone, dtype=torch.float64), walk.everyone)
    return walk.verdict()


def _visit(walk: TreeWalk, node: int, a: Tensor, here: Tensor) -> Tensor:
    """Verify the subtree of a node -> the rows (bool) that settle at this node or below."""
    law, open_ = walk.p(node), here
    for child, (token, q, present) in walk.candidates(node):
        tested, x = open_ & present, token.unsqueeze(-1)
        ratio = law.gather(-1, x).squeeze(-1).double() / q.gather(-1, x).squeeze(-1).double().clamp(min=1e-300)
        open_ = open_ & ~_visit(walk, child, (a * ratio).clamp(max=1), tested)
        refused = tested & open_
        rest = (a.unsqueeze(-1).to(law.dtype) * law - q).clamp(min=0)
        total = rest.sum(-1).double()
        lost = total + (1 - a)
        a = torch.where(refused, torch.where(lost > 0, total / lost, 1.0).clamp(max=1), a)
        law = _where(refused, _norm(rest, law), law)
    settled = walk.toss(a, 1 - a, open_, node)
    walk.settle(node, settled, law)
    return here & (settled | ~open_)


def match(p: Law, draft: Draft, draw: Draw) -> Verdict:
    """Sample and match: draw y from p at the node, descend if a candidate equals y, else emit y.

    It is exact for any candidates chosen independently of y, optimal for deterministic ones, and with coupled draws the
    drafter-invariant rule (arXiv 2408.07978).
    """
    if draft.law is None:
        return nothing_drafted(p)
    walk = TreeWalk(p, draft, draw)
    node = torch.full((p.rows,), ROOT, device=p.device)
    here, choice = walk.everyone, node
    for depth in range(walk.depth + 1):
        drawn = draw(p.at(node + 1), Purpose.NEXT, depth)[:, 0]
        choice = drawn.where(here, choice)
        below = node
        for child, parent in enumerate(walk.parents):
            if walk.level(child) == depth:
                hit = here & (node == parent) & walk.present(child) & (draft.tokens[:, child] == drawn)
                below = torch.where(hit, child, below)
        here, node = here & (below != node), below
    walk.node = node
    return walk.verdict(Law(tokens=choice.unsqueeze(-1)))


class TreeWalk:
    """The state of a tree verification: the node that each row has reached, and the law of its next token there."""

    def __init__(self, p: Law, draft: Draft, draw: Draw) -> None:
        assert draft.parents is not None
        self.parents, self.lines = draft.parents, ancestors(draft.parents)
        self.depth = max(map(len, self.lines))
        self.everyone = torch.ones(p.rows, dtype=torch.bool, device=p.device)
        self.node = torch.full((p.rows,), ROOT, device=p.device)
        self._p, self._draft, self._draw = p, draft, draw
        self._lengths = torch.tensor(draft.lengths, device=p.device)
        self._law: Tensor | None = None if p.point else p.dense[:, 0].clone()

    def p(self, node: int) -> Tensor:
        return self._p.dense[:, node + 1]

    def level(self, node: int) -> int:
        return len(self.lines[node]) - 1

    def present(self, node: int) -> Tensor:
        return (self._lengths > node) & (self._draft.tokens[:, node] != ABSENT)

    def candidates(self, node: int) -> list[tuple[int, tuple[Tensor, Tensor, Tensor]]]:
        """Return a node's children: (child, (token, the law it was drawn from (rows, vocab), rows that have it))."""
        children, drawn = [], list[Tensor]()
        for child, parent in enumerate(self.parents):
            if parent == node:
                token = self._draft.tokens[:, child].clamp(min=0)
                children.append((child, (token, self._q(child, drawn), self.present(child))))
                if not self._draft.replacement:
                    drawn.append(token)
        return children

    def _q(self, child: int, drawn: list[Tensor]) -> Tensor:
        """Return the law (rows, vocab) that a child was drawn from: q without its siblings that were `drawn` before."""
        law = self._draft.q
        if law.tokens is not None:
            return torch.zeros_like(self.p(ROOT)).scatter_(-1, law.tokens[:, child : child + 1].clamp(min=0), 1)
        q = law.dense[:, child]
        if not drawn:
            return q
        rest = q.scatter(-1, torch.stack(drawn, -1), 0)
        return _norm(rest, q)

    def toss(self, heads: Tensor, tails: Tensor, asked: Tensor, node: int) -> Tensor:
        """Toss a coin with these weights in the `asked` rows -> heads (rows,); all other rows get False."""
        coin = torch.stack([torch.where(asked, heads, 1), torch.where(asked, tails, 0)], -1)
        return asked & (self._draw(Law(probs=coin.unsqueeze(1)), Purpose.ACCEPT, node=node)[:, 0] == 0)

    def settle(self, node: int, here: Tensor, law: Tensor) -> None:
        """End the rows `here` at this node; `law` (rows, vocab) is the law of their next token."""
        assert self._law is not None
        self.node = torch.where(here, node, self.node)
        self._law = _where(here, law, self._law)

    def verdict(self, law: Law | None = None) -> Verdict:
        """Return the verdict; `law`, if given, replaces the laws that `settle` has stored."""
        lines = [(*line, *(0,) * (self.depth - len(line))) for line in ((), *self.lines)]
        table = torch.tensor(lines, device=self.node.device)
        counts = torch.tensor([0, *map(len, self.lines)], device=self.node.device)
        path, accepted = table[self.node + 1], counts[self.node + 1]
        if law is None:
            assert self._law is not None
            law = Law(probs=self._law.unsqueeze(1))
        # Sum min(p, q) along the path, the chance of ONE candidate as in the paper, without the tree's gain.
        # The first child of every node, the root in front: the candidate that a chain would have drafted there.
        first = [
            next((c for c, parent in enumerate(self.parents) if parent == node), 0)
            for node in range(-1, max(self.parents) + 1)
        ]
        first += [0] * (len(self.parents) + 1 - len(first))
        children = torch.tensor(first, device=path.device)
        nodes = torch.nn.functional.pad(path, (1, 0), value=ROOT)[:, :-1] + 1
        laws = [beta(self._p.at(nodes[:, d]), self._draft.q.at(children[nodes[:, d]])) for d in range(self.depth)]
        return Verdict(accepted, law, torch.cat(laws, 1), path=path)


def _norm(weights: Tensor, otherwise: Tensor) -> Tensor:
    """Normalize weights (rows, vocab); where all are zero, return the row of `otherwise`."""
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0, weights / total, otherwise)


def _where(rows: Tensor, one: Tensor, other: Tensor) -> Tensor:
    return torch.where(rows.unsqueeze(-1), one, other)


def gbv(p: Law, draft: Draft, draw: Draw) -> Verdict:
    """Verify by greedy multi-path block verification (arXiv 2602.16961): choose a path, then verify it as a block.

    After every prefix the tokens are ordered by p/q, the lowest id first among equals, and paths by their first token
    that differs. The greatest of k independent paths has a law of its own, which has a closed form:

        q*(v | s) = ((A + J F(<=v))^k - (A + J F(<v))^k) / ((A + J)^k - A^k)

    with J = q(s), A the chance that one path begins with less than s, F the sums of q(. | s) in that order. For any
    order, block verification of that path with q* in place of q is exact. With one path q* is q. The paths have to
    be drawn independently of each other; for a point mass p the rule is `tree_acceptance.match`.
    """
    if draft.law is None:
        return nothing_drafted(p)
    if p.point:
        return match(p, draft, draw)
    paths = draft.paths
    assert paths is not None, "gbv verifies independent paths; `block` and `traversal` have other drafts"
    nodes, q_star = greatest_path(p, draft)
    lengths = tuple(length // paths for length in draft.lengths)
    chain = Draft(draft.tokens.gather(1, nodes), q_star, lengths)
    along = torch.nn.functional.pad(nodes + 1, (1, 0))
    laws = Law(probs=_rows_at(p.dense, along))
    verdict = block(laws, chain, draw)
    q = Law(probs=_rows_at(draft.law.dense, nodes))
    return replace(verdict, beta=beta(laws, q), path=nodes)


def greatest_path(p: Law, draft: Draft) -> tuple[Tensor, Law]:
    """Follow the greatest token at every node, from the root down -> its nodes, and the law q* of each of its tokens.

    Paths with the same tokens so far have the same prefix; p and q of the first of them are used for all, so that their
    next tokens are in one order. Shapes: p (rows, 1 + nodes, vocab), the draft's law (rows, nodes, vocab); both results
    are (rows, depth).
    """
    assert draft.paths is not None
    count, rows = draft.paths, torch.arange(p.rows, device=p.device)
    alive = torch.ones(p.rows, count, dtype=torch.bool, device=p.device)
    place = torch.zeros(p.rows, 1, dtype=torch.float64, device=p.device)  # A / (A + J); J / (A + J) is the rest
    nodes, laws = list[Tensor](), list[Tensor]()
    position = torch.zeros_like(rows)
    for start in range(0, draft.tokens.shape[1], count):
        tokens, first = draft.tokens[:, start : start + count], start + alive.int().argmax(-1)
        order = Order.of(p.dense[rows, position], draft.q.dense[rows, first])
        laws.append(order.greatest(place, count).to(draft.q.dense.dtype))
        path = order.rank.gather(1, tokens).where(alive, -1).argmax(-1)
        token = tokens.gather(1, path[:, None])
        alive &= tokens == token
        place = order.place_of(token, place)
        nodes.append(start + path)
        position = nodes[-1] + 1
    return torch.stack(nodes, 1), Law(probs=torch.stack(laws, 1))


@dataclass(frozen=True)
class Order:
    """The order of the tokens after one prefix by rising p/q. All tensors are (rows, vocab); `upto` and `before` are
    F(<=v) and F(<v) in float64, by token, and `rank` is a token's place in the order."""

    rank: Tensor
    upto: Tensor
    before: Tensor

    @staticmethod
    def of(p: Tensor, q: Tensor) -> Order:
        """Make the order from p and q, ties by token id: choice and sums must break ties alike, or q* is wrong."""
        order = torch.where(q > 0, p / q, torch.inf).argsort(dim=-1, stable=True)
        sums = q.double().gather(-1, order).cumsum(-1)
        sums = sums / sums[:, -1:]  # q in float32 sums to one up to rounding, which the powers would enlarge
        rank = torch.empty_like(order).scatter_(-1, order, torch.arange(q.shape[-1], device=q.device).expand_as(order))
        lower = torch.nn.functional.pad(sums, (1, 0))[:, :-1]
        return Order(rank, sums.gather(-1, rank), lower.gather(-1, rank))

    def greatest(self, place: Tensor, count: int) -> Tensor:
        """Return q* (rows, vocab) after a prefix whose `place` (rows, 1) is A / (A + J), for `count` (k) paths.

        b^k - a^k is computed as (b - a)(b^(k-1) + b^(k-2) a + ... + a^(k-1)), as a difference of powers would cancel.
        """
        here = 1 - place
        upper, lower = place + here * self.upto, place + here * self.before
        powers = sum(upper**i * lower ** (count - 1 - i) for i in range(count))
        weights = (self.upto - self.before) * powers
        return weights / weights.sum(-1, keepdim=True)

    def place_of(self, token: Tensor, place: Tensor) -> Tensor:
        """Return the `place` A / (A + J) (rows, 1) of the prefix that is one `token` longer; see `gbv`."""
        here = 1 - place
        upper, lower = place + here * self.upto.gather(-1, token), place + here * self.before.gather(-1, token)
        return torch.where(upper > 0, lower / upper, 0.0)


def _rows_at(laws: Tensor, places: Tensor) -> Tensor:
    """Select laws (rows, n, vocab) at places (rows, m) -> (rows, m, vocab)."""
    return laws[torch.arange(laws.shape[0], device=laws.device)[:, None], places]
