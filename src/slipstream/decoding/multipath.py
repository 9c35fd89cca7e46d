"""Greedy multi-path block verification: of several independent drafts, the greatest by p/q is verified as a block.

The same contract as on chains (`acceptance`) and trees (`tree_acceptance`): laws in, a law out, randomness only through
`draw`. The draft is a tree of k paths that branch at the root (`Draft.paths`), each drawn from q independently of the
others, so that two of them may have the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.core.draft import Draft, Draw, Verdict
from slipstream.core.law import Law
from slipstream.decoding.acceptance import beta, block, nothing_drafted
from slipstream.decoding.tree_acceptance import match


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
    assert draft.law is not None and draft.paths is not None
    count, rows = draft.paths, torch.arange(p.rows, device=p.device)
    alive = torch.ones(p.rows, count, dtype=torch.bool, device=p.device)
    place = torch.zeros(p.rows, 1, dtype=torch.float64, device=p.device)  # A / (A + J); J / (A + J) is the rest
    nodes, laws = list[Tensor](), list[Tensor]()
    position = torch.zeros_like(rows)
    for start in range(0, draft.tokens.shape[1], count):
        tokens, first = draft.tokens[:, start : start + count], start + alive.int().argmax(-1)
        order = Order.of(p.dense[rows, position], draft.law.dense[rows, first])
        laws.append(order.greatest(place, count).to(draft.law.dense.dtype))
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
