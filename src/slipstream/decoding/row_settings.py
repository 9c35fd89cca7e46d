"""Serves batches whose rows have different rules, draws or samplers, greedy and sampled ones together.

A batch whose rows agree costs nothing here. Otherwise passes of target and draft still serve all rows; only laws are
verified group by group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slipstream.core.draft import Draft, Verdict, Verifier, merge_verdicts
from slipstream.core.draws import Rng, RowByRow, Sealed
from slipstream.core.law import Law
from slipstream.core.request import Row
from slipstream.core.round import Context
from slipstream.decoding.decoder import Decoder


def rng_of(decoder: Decoder, rows: Sequence[Row]) -> Rng:
    """Return the `Rng` of the rows, from their requests' rules or else from the decoder; with an untrusted drafter,
    draws are made with its secret, so that the seed is not enough to predict them."""
    rules, secret = [row.request.rule for row in rows], decoder.secret
    if not any(rules):
        return decoder.rng if secret is None else _sealed(decoder.rng, secret, len(rows))
    ways = [decoder.rng.select([place]) if rule is None else rule.rng for place, rule in enumerate(rules)]
    if secret is not None:
        made = {id(way): _sealed(way, secret, 1) for way in ways}
        ways = [made[id(way)] for way in ways]
    return RowByRow.of(ways)


def _sealed(rng: Rng, secret: int, rows: int) -> Rng:
    """Return draws made with a secret; coupled draws, which need none, stay as they are."""
    if not rng.coupled:
        return Sealed(rng, secret)
    ways = [rng.select([place]) for place in range(rows)]
    if all(way.coupled for way in ways):
        return rng
    return RowByRow(tuple(way if way.coupled else Sealed(way, secret) for way in ways))


def verify(decoder: Decoder, context: Context, p: Law, draft: Draft) -> Verdict:
    """Return the verdict on all rows, each by its own rule; greedy and sampled rows are verified separately."""
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
