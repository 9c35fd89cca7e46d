"""Passes and drafts on a GPU as CUDA graphs, which are replayed without the cost of Python and of launches."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from slipstream.cache.stores import Stores
from slipstream.core.law import Law
from slipstream.execution.draft_graphs import (
    Drafted,
    DraftGraphs,
    GraphKind,
    Inputs,
    Room,
    Wish,
    describe,
    draft,
    drafted_of,
    sizes_of_draft,
    traced_draft,
)
from slipstream.execution.graphs import Fused, Graph, Graphs, graph_progress, shapes, warn
from slipstream.execution.names import with_cache
from slipstream.execution.passes import (
    EAGERLY,
    MOST_WIDTH,
    Cross,
    Pass,
    PassResult,
    Places,
    Watching,
    compare,
    forward_showing,
    sizes_of_pass,
    tensors_of_pass,
    traced_pass,
)

BUCKET = 256  # the fewest slots that captured work reads; see `bucket`


def bucket(slots: int) -> int:
    """Round slots up, to a quarter of a power of two: few graphs serve all texts, and little is read in vain."""
    step = max(BUCKET, (1 << max(slots - 1, 0).bit_length()) // 8)
    return -(-slots // step) * step


@dataclass
class Captured:
    """Passes as CUDA graphs, one per number of rows, of new tokens, and of slots rounded up by `bucket`.

    Their kernels are fused before: once for single texts and once for batches, of one token and of more. Every graph is
    compared with the eager pass when it is made. A model that cannot be captured, or whose graph gives other logits,
    runs eagerly, with one warning.
    """

    model: PreTrainedModel
    name: str
    progress: Callable[[str], object] | None = None
    least = BUCKET
    _graphs: Graphs = field(default_factory=Graphs)
    _fused: dict[Hashable, Fused] = field(default_factory=dict)
    _failed: bool = False

    def of(self, model: PreTrainedModel, name: str) -> Captured:
        return Captured(model, name, self.progress)

    def run(
        self, work: Pass, stores: Stores, places: Places = (), watching: Watching | None = None, logits: bool = True
    ) -> PassResult | None:
        """See `Execution`; prefills run eagerly."""
        if self._failed or not logits or not stores or work.tokens.shape[1] > MOST_WIDTH:
            return None
        work = _widened(work, _rounded(work.end, stores))
        inputs, cross = _inputs(work), work.cross and work.cross.stores
        key, caches = (places, *work.masks, shapes(inputs)), [stores, cross] if cross else [stores]
        try:
            graph = self._graphs.find(key, caches) or self._capture(key, work, stores, places)
            outputs = graph.run(inputs)
        except Exception as error:  # a synchronization in the model's code, too little memory, ...
            self._failed = True
            warn(self.name, f"runs {EAGERLY}", error)
            return None
        return PassResult(outputs[0], dict(zip(places, outputs[1:], strict=True)))

    def _capture(self, key: Hashable, work: Pass, stores: Stores, places: Places) -> Graph:
        if self.progress:
            rows, width = work.tokens.shape
            self.progress(f"capturing {self.name} for {rows} x {width} tokens and {work.end} slots")

        def function(inputs: Sequence[Tensor | None]) -> list[Tensor]:
            given = _pass(inputs, work)
            fused = self._fused_pass(given, places)
            outputs: list[Tensor] = fused(tensors_of_pass(given, stores), sizes_of_pass(given, stores))
            return outputs

        inputs = _inputs(work)
        graph = self._graphs.capture(key, function, inputs, stores[0][0].device)
        compare(
            forward_showing(with_cache(self.model), _pass(graph.inputs, work), stores, places)[0], graph.run(inputs)[0]
        )
        return graph

    def _fused_pass(self, work: Pass, places: Places) -> Fused:
        # Sizes of one do not vary: torch takes them for constants.
        constant = frozenset(what for what, size in zip(("rows", "new"), work.tokens.shape, strict=True) if size == 1)
        if (constant, places) not in self._fused:
            rows, new = work.tokens.shape
            what = f"{self.name} for {'one text' if rows == 1 else 'batches'}, {'one token' if new == 1 else 'tokens'}"
            self._fused[constant, places] = Fused(
                traced_pass(self.model, places), constant, self.name, graph_progress(self.progress, what)
            )
        return self._fused[constant, places]


def _inputs(work: Pass) -> list[Tensor | None]:
    cross = (work.cross.mask, work.cross.back) if work.cross else (None, None)
    return [work.tokens, work.positions, work.slots, *cross, *work.masks.values()]


def _pass(inputs: Sequence[Tensor | None], like: Pass) -> Pass:
    tokens, positions, slots, seen, back, *masks = inputs
    assert tokens is not None and positions is not None and slots is not None
    cross = Cross(like.cross.stores, seen, back) if like.cross and seen is not None else None
    by_kind = {kind: mask for kind, mask in zip(like.masks, masks, strict=True) if mask is not None}
    return Pass(tokens, positions, slots, by_kind, cross)


def _rounded(slots: int, stores: Stores) -> int:
    return min(bucket(slots), stores[0][0].shape[2])


def _widened(work: Pass, end: int) -> Pass:
    """Return a pass with masks over `end` slots, and rounded numbers of those of sources; added ones are hidden."""
    cross = work.cross
    if cross:
        back = cross.back if cross.back is None else nn.functional.pad(cross.back, (0, end - cross.back.shape[-1]))
        cross = replace(_widened_source(cross), back=back)
    masks = {kind: _hiding(mask, end) for kind, mask in work.masks.items()}
    return replace(work, masks=masks, cross=cross)


def _widened_source(cross: Cross) -> Cross:
    return replace(cross, mask=_hiding(cross.mask, _rounded(cross.mask.shape[-1], cross.stores)))


def _hiding(mask: Tensor, end: int) -> Tensor:
    return nn.functional.pad(mask, (0, end - mask.shape[-1]), value=torch.finfo(mask.dtype).min)


@dataclass
class CapturedDrafts(DraftGraphs):
    """Drafts as CUDA graphs: every chain is one graph, of any length and for any number of texts.

    Capturing takes a fraction of a second, so no chain has to be made of steps. One that is shorter than one of the
    `sizes` is cut from such a chain, which saves graphs.
    """

    least = BUCKET
    whole = True
    sizes: tuple[int, ...] = ()
    _captured: Graphs = field(default_factory=Graphs)
    _unread: Tensor | None = None  # the greatest logits of the last draft

    @property
    def made(self) -> frozenset[GraphKind]:
        return frozenset(kind for kind, _ in self._captured.keys)

    def length(self, wish: Wish) -> int:
        """Return the number of tokens of the only graph: all of the wish, or the next of the `sizes`."""
        return min((size for size in self.sizes if size >= wish.gamma), default=wish.gamma)

    def run(self, wish: Wish, room: Room) -> tuple[Tensor, Law] | None:
        """See `DraftGraphs`; logits that are not finite are noticed at the draft after theirs.

        Reading them earlier would wait for the GPU, while the target's pass can be prepared. The law that such tokens
        were drawn from is uniform, with which decoding is as exact as with any other.
        """
        last, self._unread = self._unread, None
        if last is not None and not super()._finite(last):
            return None
        return super().run(wish, room)

    def _finite(self, best: Tensor) -> bool:
        self._unread = best
        return True

    def _inputs(self, wish: Wish, room: Room) -> tuple[Any, ...]:
        cross = room.cross and _widened_source(room.cross)
        return super()._inputs(wish, replace(room, end=_rounded(room.end, room.stores), cross=cross))

    def _run(self, kind: GraphKind, inputs: Inputs) -> Drafted:
        stores, parts = inputs[5:7]
        caches, tensors = [stores, parts[0]] if parts else [stores], _tensors(inputs)
        key = (kind, shapes(tensors))
        graph = self._captured.find(key, caches) or self._capture(key, kind, inputs)
        return drafted_of(kind, graph.run(tensors))

    def _capture(self, key: Hashable, kind: GraphKind, inputs: Inputs) -> Graph:
        if self.progress:
            self.progress(f"capturing {self.name} for {describe(kind)} and {len(inputs[4])} slots")
        stores, parts = inputs[5:7]

        def step(given: Inputs) -> Drafted:
            state = 0 if given[1] is None else given[1].ndim
            one = kind._replace(size=1, width=given[0].shape[1], state=state)
            if one not in self._graphs:
                on_graph = graph_progress(self.progress, f"{self.name} for {describe(one)}")
                self._graphs[one] = Fused(traced_draft(self.network, one), one.constant, self.name, on_graph)
            drafted: Drafted = self._graphs[one](given, sizes_of_draft(given))
            return drafted

        def function(tensors: Sequence[Any]) -> list[Tensor]:
            *first, seen, temperatures, chances = tensors
            cross = parts and (parts[0], seen, None)
            drafted = draft(step, kind.size, (*first, stores, cross, temperatures, chances))
            return [part for part in drafted if part is not None]

        return self._captured.capture(key, function, _tensors(inputs), stores[0][0].device)


def _tensors(inputs: Inputs) -> list[Tensor | None]:
    *first, _, parts, temperatures, chances = inputs
    return [*first, parts and parts[1], temperatures, chances]
