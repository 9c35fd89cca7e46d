"""Finds the rows that a draft on the target's hidden states can draft for."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.core.protocols import HasModel
from slipstream.core.round import Context


def read_by_target(target: HasModel, context: Context, gammas: Sequence[int]) -> list[int]:
    """Return `gammas`, with 0 for rows of which the target has not read all tokens but the pending one."""
    lengths = [*target.lengths, *[0] * len(context.rows)]
    read = [have > 0 and have == len(row.tokens) - 1 for have, row in zip(lengths, context.rows, strict=False)]
    return [gamma if known else 0 for gamma, known in zip(gammas, read, strict=True)]
