"""Deliberately broken rules, as negative controls: a check that does not notice them proves nothing."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from slipstream.core.draft import Draft, Verdict, Verifier
from slipstream.core.law import Law
from slipstream.decoding.rules import TOKEN, Rule

Draw = Callable[..., Tensor]


def broken(rule: Rule, greedy: bool, sampled: bool = False, cut: bool = False) -> list[Rule]:
    """Return the controls of a rule: they draw as it does, except those that break token verification itself.

    With `sampled` drafts there is one more, in which the drafted tokens decide how many of them are verified, and with
    drafts `cut` to a part of the tokens another, which takes their law for one of all tokens.
    """
    everything = Rule("accept everything", _everything(rule.verify), rule.rng)
    first = Rule("first draft token unverified", _first(rule.verify), rule.rng)
    if greedy:
        return [everything, first]
    controls = [everything, first, Rule("correction from p", _from_p)]
    controls += [Rule("budget by the drafted tokens", _by_these_tokens)] if sampled else []
    return [*controls, Rule("distribution over the whole vocabulary", _of_all_tokens)] if cut else controls


def _everything(verify: Verifier) -> Verifier:
    def accept(p: Law, draft: Draft, draw: Draw) -> Verdict:
        verdict = verify(p, draft, draw)
        return verdict if draft.law is None else _stand(verdict, p, draft, torch.tensor(draft.depths))

    return accept


def _first(verify: Verifier) -> Verifier:
    """Make a broken verifier that accepts the first drafted token untested, as an index off by one would."""

    def accept(p: Law, draft: Draft, draw: Draw) -> Verdict:
        verdict = verify(p, draft, draw)
        if draft.law is None:
            return verdict
        slipped = _stand(verdict, p, draft, torch.tensor(draft.depths).clamp(max=1))
        late = verdict.accepted > 0
        law = Law.join([_dense(each, p) for each in (slipped.law, verdict.law)], 1).at(late.long())
        path = verdict.path
        if path is not None and slipped.path is not None:
            path = torch.where(late[:, None], path, slipped.path)
        return replace(verdict, accepted=verdict.accepted.where(late, slipped.accepted), law=law, path=path)

    return accept


def _stand(verdict: Verdict, p: Law, draft: Draft, counts: Tensor) -> Verdict:
    """Return a verdict in which `counts` tokens stand, in a tree along the first branch; the next comes from p."""
    counts = counts.to(p.device)
    if draft.parents is None:
        return replace(verdict, accepted=counts, law=p.at(counts))
    line = [next(n for n, parent in enumerate(draft.parents) if parent == -1)]
    while children := [n for n, parent in enumerate(draft.parents) if parent == line[-1]]:
        line.append(children[0])
    path = torch.tensor(line, device=p.device).expand(p.rows, -1)
    law = p.at(torch.tensor([0, *(node + 1 for node in line)], device=p.device)[counts])
    return replace(verdict, accepted=counts, law=law, path=path)


def _from_p(p: Law, draft: Draft, draw: Draw) -> Verdict:
    """Verify by token verification, but draw corrections from p itself, which is wrong."""
    verdict = TOKEN.verify(p, draft, draw)
    if verdict.path is None:
        return replace(verdict, law=p.at(verdict.accepted))
    last = verdict.path.gather(1, (verdict.accepted - 1).clamp(min=0)[:, None])[:, 0]
    return replace(verdict, law=p.at(torch.where(verdict.accepted > 0, last + 1, 0)))


def _by_these_tokens(p: Law, draft: Draft, draw: Draw) -> Verdict:
    """Verify by token verification, but drop drafts whose first token is not the draft's likeliest, as if they had
    never been sampled, which is wrong (arXiv 2607.05147, section 3.2.2, is about this trap)."""
    if draft.law is None or draft.law.point:
        return TOKEN.verify(p, draft, draw)
    q = draft.law.dense[:, 0]
    promising = (q.gather(1, draft.tokens[:, :1].clamp(min=0))[:, 0] >= q.amax(1)).tolist()
    lengths = tuple(length * kept for length, kept in zip(draft.lengths, promising, strict=True))
    return TOKEN.verify(p, replace(draft, lengths=lengths), draw)


def _of_all_tokens(p: Law, draft: Draft, draw: Draw) -> Verdict:
    """Verify by token verification, but with the law of a draft that knows the tokens it lacks as well as the target
    does, which is wrong: tokens were drawn from the law without them, and now nothing gives them their chance."""
    if draft.law is None or draft.law.point:
        return TOKEN.verify(p, draft, draw)
    q, parents = draft.law.dense, draft.parents or range(-1, draft.law.positions - 1)
    lacking = p.dense[:, [parent + 1 for parent in parents]].to(q).where(q == 0, 0)
    law = Law(probs=q * (1 - lacking.sum(-1, keepdim=True)) + lacking)
    return TOKEN.verify(p, replace(draft, law=law), draw)


def _dense(law: Law, like: Law) -> Law:
    """Return a point mass in dense form if p is dense, so that both fit in one law."""
    if law.probs is not None or like.probs is None:
        return law.bare()
    return Law(probs=torch.nn.functional.one_hot(law.ids, like.probs.shape[-1]).to(like.probs.dtype))
