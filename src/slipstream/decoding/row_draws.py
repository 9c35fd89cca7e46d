"""The `Rng` of a batch whose rows may have different rules, or a drafter that is not trusted."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.core.draws import Rng, RowByRow, Sealed
from slipstream.core.request import Row
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
