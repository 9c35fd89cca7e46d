"""Loading the target, in one piece or divided among processes, and the notes for users on it."""

from __future__ import annotations

import logging
import signal
import warnings
from pathlib import Path
from typing import Any

from slipstream.core.model_options import MODEL_OPTIONS, ModelOptions
from slipstream.core.protocols import HasModel, LiesOnRanks
from slipstream.core.signals import ENDING, handling
from slipstream.execution.passes import Mode
from slipstream.execution.ranks import join, place
from slipstream.kernels.cpu import kernel_missing
from slipstream.kernels.packing import layer_bytes, lowest_bits, quantizing_fault
from slipstream.kernels.placement import is_sharded, why_in_parts
from slipstream.models.leading import FollowingRank, LeadingScorer, lead
from slipstream.models.loading.load import AnyScorer, load_scorer
from slipstream.models.loading.origin import source_name

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


OTHERWISE = ("tp_size", "distributed_config", "device_mesh")
"""Options of transformers that divide a model too; they are refused, because the other ranks would not take part."""


def target_scorer(how: ModelOptions, mode: Mode) -> AnyScorer | LeadingScorer:
    """Load a target -> its Scorer; with a plan for tensor parallelism, on all ranks. Raises ValueError."""
    source = how.target
    if refused := [name for name in OTHERWISE if name in how.from_pretrained]:
        raise ValueError(f"{refused[0]} is not possible here: give tp_plan='auto', which divides the target by itself.")
    if how.tp_plan is None:
        if is_sharded(source):  # the other ranks have to load it together with this one
            raise ValueError(
                f"this model lies on {source.tp_size} ranks already: give its name or folder, and tp_plan='auto'."
            )
        return load_scorer(source, how.dtype, how.device, mode, **how.for_target())
    if not isinstance(how.target, str | Path):
        raise ValueError("tp_plan divides a model while it is loaded on every rank: give its name or folder.")
    if how.tp_plan != "auto" and not isinstance(how.tp_plan, dict):
        raise ValueError(
            f"tp_plan={how.tp_plan!r} is not possible: give 'auto', or a dictionary of transformers' rules."
        )
    for name in how.given():
        if reason := MODEL_OPTIONS[name].one_piece:
            raise ValueError(f"{name} cannot be used with tp_plan, for {reason}: leave one of them out.")
    ranks = join()
    if not ranks.leads:
        raise ValueError(f"this is rank {ranks.rank}, which works for rank 0: call slipstream.follow() before load().")
    scorer = lead(ranks, source, how.dtype, how.tp_plan, **how.for_target())
    if mode.compiled:
        warnings.warn(f"{scorer.name} runs eagerly: {why_in_parts(scorer.model)}.", RuntimeWarning, stacklevel=3)
    return scorer


def as_they_are(scorer: Any, mode: Mode) -> list[str]:
    """List a sentence for the user if the weights stay unpacked as the model is in parts."""
    why = why_in_parts(scorer.model)
    if not why or mode.packed is False or scorer.device.type != "cpu" or kernel_missing():
        return []
    return [f"{source_name(scorer.name)} runs with its weights as they are, not packed for this processor: {why}."]


def follow() -> bool:
    """Work for rank 0 until it ends -> True; on rank 0, and where torchrun did not start several, return False at once.

    Every rank but the first holds a part of each target that rank 0 loads with `tp_plan`, and repeats its calls.
    Raises ConnectionError, with the reason, if a rank is lost.

    >>> if slipstream.follow(): sys.exit()  # doctest: +SKIP
    """
    if place()[1] < 2:
        return False
    ranks = join()
    if ranks.leads:
        return False
    logging.getLogger("transformers").setLevel(logging.ERROR)  # rank 0 logs the same messages
    try:
        with handling(signal.SIG_IGN, *ENDING):  # rank 0 gets them too, finishes, and ends the other ranks
            FollowingRank(ranks).run()
    finally:
        ranks.close()
    return True
