"""Lossy rules of other papers, as verifiers: what each lets pass, and how far its law is from the target's.

Each reports `distance`, the total variation of the law by which it emits the token of a position from the target's, for
greedy decoding 1 where another token than the target's may stand. They work on chains, and are no rules of the engine.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from slipstream.core.draft import Draft, Verdict, Verifier
from slipstream.core.law import Law, distance, total_variation
from slipstream.decoding import acceptance
from slipstream.paper.baselines.drafting import confidence, probabilities

Draw = Callable[..., Tensor]


def typical(epsilon: float) -> Verifier:
    """Typical acceptance (Medusa, arXiv 2401.10774): a drafted token stands if p(x) > min(epsilon, delta exp(-H(p))),
    where delta is the root of epsilon and H the entropy; after the first that does not, the next token comes from p.

    Greedy decoding keeps the target's own tokens alone, as Medusa does at temperature 0.
    """

    def verify(p: Law, draft: Draft, draw: Draw) -> Verdict:
        if draft.law is None or p.point:
            return _priced(acceptance.token(p, draft, draw), draft)
        ours = p.first(draft.law.positions)
        entropy = torch.special.entr(ours.dense).sum(-1)
        bar = torch.minimum(torch.full_like(entropy, epsilon), epsilon**0.5 * (-entropy).exp())
        stands = ours.dense > bar.unsqueeze(-1)
        kept = draft.law.dense * stands
        law = kept + (1 - kept.sum(-1, keepdim=True)) * ours.dense
        passed = stands.gather(-1, draft.tokens.unsqueeze(-1)).squeeze(-1)
        return _verdict(passed, p, draft, total_variation(law, ours.dense))

    return verify


def cascade(alpha: float) -> Verifier:
    """Speculative cascade (arXiv 2405.19261), its rule OPT: Algorithm 1 with pi in place of p, where pi is q as long as
    max q >= max p - alpha TV(p, q), and p elsewhere. Greedily the same choice is made between the two best tokens."""

    def verify(p: Law, draft: Draft, draw: Draw) -> Verdict:
        if draft.law is None:
            return acceptance.nothing_drafted(p)
        ours, theirs = p.first(draft.law.positions), draft.law
        apart = total_variation(probabilities(ours), probabilities(theirs))
        trusted = confidence(theirs) >= confidence(ours) - alpha * apart
        if p.point:
            assert p.tokens is not None
            passed = trusted | (draft.tokens == ours.tokens)
            return _verdict(passed, p, draft, (trusted & (draft.tokens != ours.tokens)).float())
        mixed = torch.where(trusted.unsqueeze(-1), theirs.dense, ours.dense)
        whole = Law(probs=torch.cat([mixed, p.dense[:, draft.law.positions :]], 1))
        return _priced(acceptance.token(whole, draft, draw), draft, apart * trusted)

    return verify


def committee(p: Law, draft: Draft, draw: Draw) -> Verdict:
    """Wisdom of committees (arXiv 2012.01988), token by token: what the smaller model drafted stands, for it drafts
    only where it is sure (`ScoredDrafter`); the next token is the target's."""
    if draft.law is None:
        return acceptance.nothing_drafted(p)
    ours = p.first(draft.law.positions)
    apart = distance(draft.law.bare(), ours.bare())
    return _verdict(torch.ones_like(draft.tokens, dtype=torch.bool), p, draft, apart)


def _verdict(passed: Tensor, p: Law, draft: Draft, moved: Tensor) -> Verdict:
    """What passed stands up to the first that did not; the next token is the target's own, whichever stood."""
    assert draft.law is not None
    accepted = acceptance.leading(passed, draft)
    verdict = Verdict(accepted, p.at(accepted).bare(), acceptance.beta(p, draft.law.bare()))
    return _priced(verdict, draft, moved)


def _priced(verdict: Verdict, draft: Draft, moved: Tensor | None = None) -> Verdict:
    """The verdict with its price; none is 0."""
    none = torch.zeros(draft.tokens.shape, device=draft.tokens.device)
    apart = none if moved is None else moved.float()
    return Verdict(verdict.accepted, verdict.law, verdict.beta, none.bool(), apart)
