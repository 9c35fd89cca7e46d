"""Rows of one batch that are decoded in different ways: each with its own rule and draws, greedy beside sampled.

A batch whose rows agree costs nothing here. Where they differ, passes of target and draft still serve all rows; only
laws are verified group by group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slipstream.core.draft import Draft, Verdict, Verifier, merge_verdicts
from slipstream.core.draws import Rng, RowByRow
from slipstream.core.law import Law
from slipstream.core.request import Row
from slipstream.core.round import Context
from slipstream.decoding.decoder import Decoder


def rng_of(decoder: Decoder, rows: Sequence[Row]) -> Rng:
    """How the rows draw: by the rules of their requests, else by the decoder's."""
    rules = [row.request.rule for row in rows]
    if not any(rules):
        return decoder.rng
    return RowByRow.of([decoder.rng.select([place]) if rule is None else rule.rng for place, rule in enumerate(rules)])


def verify(decoder: Decoder, context: Context, p: Law, draft: Draft) -> Verdict:
    """The verdict on all rows, each by its own rule; greedy and sampled rows are verified apart."""
    groups: dict[tuple[Verifier, bool], list[int]] = {}
    for place, row in enumerate(context.rows):
        verifier = decoder.verifier if row.request.rule is None else row.request.rule.verify
        groups.setdefault((verifier, row.request.sampler.greedy), []).append(place)
    if len(groups) == 1:
        [(verifier, _)] = groups
        return verifier(p, draft, context.draw)
    verdicts = []
    for (verifier, _), places in groups.items():
        law = p.select(torch.tensor(places, device=p.device))
        verdicts.append(verifier(law, draft.select(places), context.select(places).draw))
    return merge_verdicts(verdicts, list(groups.values()))
