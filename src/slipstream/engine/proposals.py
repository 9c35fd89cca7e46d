"""The note for a user who loads a target without a draft: how the target could draft for itself."""

from __future__ import annotations

from typing import Any

from slipstream.core.protocols import HasModel, LiesOnRanks
from slipstream.kernels.packing import layer_bytes, lowest_bits, quantizing_fault

WORTHWHILE = 1 << 26
"""The size of linear layers, in bytes, above which reading fewer bits saves time: smaller ones fit processor caches."""


def self_draft_proposal(scorer: Any, least: int = WORTHWHILE) -> list[str]:
    """Return a sentence that proposes the target's own weights in 4 bits as its draft, in a list.

    The list is empty where that is not possible, and where the linear layers take fewer than `least` bytes or have
    4 bits already.
    """
    if not isinstance(scorer, HasModel) or isinstance(scorer, LiesOnRanks) or quantizing_fault(scorer.model):
        return []
    if lowest_bits(scorer.model) == 4 or layer_bytes(scorer.model) < least:
        return []
    return [
        f"{scorer.name} decodes without a draft; draft='int4' (--draft int4) drafts with its own weights in 4 bits and "
        "leaves its texts exact, and `slipstream plan` measures whether that is faster here."
    ]
