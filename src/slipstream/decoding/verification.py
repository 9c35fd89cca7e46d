"""Verification: from the target's logits to its laws, the verdict on a draft, and the token after the accepted ones.

A batch may hold rows with different rules or samplers, greedy and sampled ones together. Rows that agree cost nothing
here; otherwise passes of target and draft still serve all rows, and laws are verified group by group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.core.draft import Draft, Verdict, Verifier, merge_verdicts
from slipstream.core.draws import Purpose
from slipstream.core.law import Faults, Law
from slipstream.core.request import Row
from slipstream.core.round import Context


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of verification: the target's laws `p` after the pending token and after every drafted one, the
    `verdict` on the draft, and the tokens (rows,) that follow the accepted ones.

    `faults` are the positions where no law can be made.
    """

    p: Law
    verdict: Verdict
    following: Tensor
    faults: Faults


Verification = Callable[[Verifier, Context, Tensor, Draft, str], Outcome]
"""A way to verify a draft: (verifier, context, logits (rows, gamma + 1, vocab), draft, name of the target) -> Outcome.

The verifier serves the rows whose requests name no rule.
"""


def verify_eagerly(verifier: Verifier, context: Context, logits: Tensor, draft: Draft, model: str) -> Outcome:
    p, faults = context.target_law(logits, draft, model)
    verdict = _verdict(verifier, context, p, draft)
    return Outcome(p, verdict, draw_next(context, verdict), faults)


def draw_next(context: Context, verdict: Verdict) -> Tensor:
    return context.draw(verdict.law, Purpose.NEXT, verdict.accepted.tolist())[:, 0]


def verifier_of(row: Row, otherwise: Verifier) -> Verifier:
    return otherwise if row.request.rule is None else row.request.rule.verify


def _verdict(verifier: Verifier, context: Context, p: Law, draft: Draft) -> Verdict:
    groups: dict[tuple[Verifier, bool], list[int]] = {}
    for place, row in enumerate(context.rows):
        groups.setdefault((verifier_of(row, verifier), row.request.sampler.greedy), []).append(place)
    if len(groups) == 1:
        [(shared, _)] = groups
        return shared(p, draft, context.draw)
    verdicts = [
        rule(p.select(torch.tensor(places, device=p.device)), draft.select(places), context.select(places).draw)
        for (rule, _), places in groups.items()
    ]
    return merge_verdicts(verdicts, list(groups.values()))
