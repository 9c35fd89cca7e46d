"""Lossy rules of other papers as verifiers, which also report how far their law is from the target's.

Each reports `distance`, the total variation between the law by which it emits the token of a position and the target's;
for greedy decoding it is 1 where a token other than the target's is accepted. They work on chains, and engines do not
use them.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from reproduction.baselines.drafting import confidence, probabilities
from slipstream.core.draft import Draft, Verdict, Verifier
from slipstream.core.law import Law, distance, total_variation
from slipstream.decoding import acceptance

Draw = Callable[..., Tensor]


def typical(epsilon: float) -> Verifier:
    """Return the verifier of typical acceptance (Medusa, arXiv 2401.10774).

    A drafted token is accepted if p(x) > min(epsilon, delta exp(-H(p))), where delta is the square root of epsilon and
    H the entropy; after the first that is not, the next token is drawn from p.

    Greedy decoding keeps only the target's own tokens, as Medusa does at temperature 0.
    """

    def verify(p: Law, draft: Draft, draw: Draw) -> Verdict:
        if draft.law is None or p.point:
            return _priced(acceptance.token(p, draft, draw), draft)
        ours = p.first(draft.law.positions)
        entropy = torch.special.entr(ours.dense).sum(-1)
        bar = torch.minimum(torch.full_like(entropy, epsilon), epsilon**0.5 * (-entropy).exp())
        acceptable = ours.dense > bar.unsqueeze(-1)
        kept = draft.law.dense * acceptable
        law = kept + (1 - kept.sum(-1, keepdim=True)) * ours.dense
        passed = acceptable.gather(-1, draft.tokens.unsqueeze(-1)).squeeze(-1)
        return _verdict(passed, p, draft, total_variation(law, ours.dense))

    return verify


def cascade(alpha: float) -> Verifier:
    """Return the verifier of speculative cascades (arXiv 2405.19261) with their rule OPT.

    It is Algorithm 1 with pi in place of p, where pi is q as long as max q >= max p - alpha TV(p, q), and p elsewhere.
    For greedy decoding, the same choice is made between the two best tokens.
    """

    def verify(p: Law, draft: Draft, draw: Draw) -> Verdict:
        if draft.law is None:
            return acceptance.nothing_drafted(p)
        target_law, draft_law = p.first(draft.law.positions), draft.law
        apart = total_variation(probabilities(target_law), probabilities(draft_law))
        trusted = confidence(draft_law) >= confidence(target_law) - alpha * apart
        if p.point:
            assert p.tokens is not None
            passed = trusted | (draft.tokens == target_law.tokens)
            return _verdict(passed, p, draft, (trusted & (draft.tokens != target_law.tokens)).float())
        mixed = torch.where(trusted.unsqueeze(-1), draft_law.dense, target_law.dense)
        whole = Law(probs=torch.cat([mixed, p.dense[:, draft.law.positions :]], 1))
        return _priced(acceptance.token(whole, draft, draw), draft, apart * trusted)

    return verify


def committee(p: Law, draft: Draft, draw: Draw) -> Verdict:
    """Accept every drafted token, as in Wisdom of committees (arXiv 2012.01988), token by token.

    The smaller model drafts only where it is sure (`ScoredDrafter`); the next token is the target's.
    """
    if draft.law is None:
        return acceptance.nothing_drafted(p)
    ours = p.first(draft.law.positions)
    apart = distance(draft.law.bare(), ours.bare())
    return _verdict(torch.ones_like(draft.tokens, dtype=torch.bool), p, draft, apart)


def _verdict(passed: Tensor, p: Law, draft: Draft, moved: Tensor) -> Verdict:
    """Accept tokens up to the first that has not passed; the next token is drawn from the target's law p."""
    assert draft.law is not None
    accepted = acceptance.leading(passed, draft)
    verdict = Verdict(accepted, p.at(accepted).bare(), acceptance.beta(p, draft.law.bare()))
    return _priced(verdict, draft, moved)


def _priced(verdict: Verdict, draft: Draft, moved: Tensor | None = None) -> Verdict:
    """Return the verdict with the distances `moved` (rows, positions); None means 0 everywhere."""
    none = torch.zeros(draft.tokens.shape, device=draft.tokens.device)
    apart = none if moved is None else moved.float()
    return Verdict(verdict.accepted, verdict.law, verdict.beta, none.bool(), apart)
