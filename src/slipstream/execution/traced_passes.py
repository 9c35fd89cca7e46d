"""Passes as functions of tensors that dynamo traces, with the sizes that vary between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from slipstream.cache.stores import Stores
from slipstream.execution.graphs import equate
from slipstream.execution.names import with_cache
from slipstream.execution.passes import Cross, Parts, Pass, Places, forward_showing, sizes_of_stores


def tensors_of_pass(work: Pass, stores: Stores) -> tuple[Any, ...]:
    cross = (work.cross.stores, work.cross.mask, work.cross.back) if work.cross else None
    return work.tokens, work.positions, work.slots, work.masks, stores, cross


def traced_pass(model: PreTrainedModel, places: Places) -> Callable[..., list[Tensor]]:
    call = with_cache(model)

    def function(
        tokens: Tensor, positions: Tensor, slots: Tensor, masks: dict[str, Tensor], stores: Stores, cross: Parts
    ) -> list[Tensor]:
        work = Pass(tokens, positions, slots, masks, cross and Cross(*cross))
        equate(sizes_of_pass(work, stores))
        return forward_showing(call, work, stores, places)

    return function


def constant_sizes(work: Pass) -> frozenset[str]:
    """Return the names of the sizes of one, which do not vary: torch takes them for constants."""
    return frozenset(what for what, size in zip(("rows", "new"), work.tokens.shape, strict=True) if size == 1)


def sizes_of_pass(work: Pass, stores: Stores) -> list[tuple[Tensor, dict[int, str]]]:
    cross = [(work.cross.mask, {0: "rows", 3: "source"})] if work.cross else []
    if work.cross and work.cross.back is not None:
        cross.append((work.cross.back, {0: "rows", 1: "new", 2: "end"}))
    return [
        *((tensor, {0: "rows", 1: "new"}) for tensor in (work.tokens, work.positions, work.slots)),
        *((mask, {0: "rows", 2: "new", 3: "end"}) for mask in work.masks.values()),
        *sizes_of_stores(stores, "slots"),
        *cross,
        *sizes_of_stores(work.cross.stores if work.cross else [], "source slots"),
    ]
