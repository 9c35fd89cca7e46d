"""Self-speculation with fewer layers: the target drafts with some of its layers, its own head and its own cache.

Drafting with the first layers only is how LayerSkip checkpoints are meant to be used (arXiv 2404.16710); leaving out
layers in the middle needs no training (Draft & Verify, arXiv 2309.08168). Both work on any target; how well depends on
its layers, and `slipstream.plan.layers` measures it.

Keys of the first layers are the target's own; behind a skipped layer, the keys of drafted tokens are approximations.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.core.protocols import HasModel
from slipstream.drafters.same_rows import SameRowsDrafter
from slipstream.models.layers import find_layers, kept_layers, part_of


def exit_drafter(target: HasModel, layers: int | Sequence[int]) -> SameRowsDrafter:
    """Make the drafter that samples a chain from some layers of the target, on the rows of its cache.

    `layers` is the number of first layers to run, or the numbers of layers, from 0. Raises ValueError if the target has
    no such layers or cannot run with some of them.
    """
    count = len(find_layers(target.model, target.name)[1])
    return SameRowsDrafter(part_of(target, kept_layers(layers, count)))
