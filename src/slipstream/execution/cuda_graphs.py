"""Passes as CUDA graphs: captured once per shape and replayed without the cost of Python and of launches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from slipstream.execution.graphs import GRAPHS, warn
from slipstream.execution.passes import EAGERLY, MOST_WIDTH, Pass, PassResult, Places, Stores, forward_showing

BUCKET = 64  # slots of captured passes are rounded up to this


# ---- captured passes --------------------------------------------------------------------------------------------


@dataclass
class Graph:
    """A captured pass: the tensors it reads, the logits and hidden states it writes, and a function that runs it."""

    work: Pass
    found: list[Tensor]
    replay: Callable[[], None]


@dataclass
class Captured:
    """Passes as CUDA graphs, one per number of rows, of new tokens, and of slots rounded up to `BUCKET`.

    A replay has no cost of Python and of launches. Graphs hold addresses: when the stores have moved, they are dropped.
    A model that cannot be captured runs eagerly, with one warning.
    """

    model: PreTrainedModel
    name: str
    progress: Callable[[str], object] | None = None
    _graphs: dict[tuple[int, ...], Graph] = field(default_factory=dict)
    _stores: int = 0  # the address of the stores that the graphs use
    _failed: bool = False

    def width(self, rows: int, count: int) -> int:
        """Return `count`: no padding is needed."""
        return count

    def of(self, model: PreTrainedModel, name: str) -> Captured:
        """See `Execution`."""
        return Captured(model, name, self.progress)

    def run(self, work: Pass, stores: Stores, places: Places = ()) -> PassResult | None:
        """See `Execution`."""
        if self._failed or work.cross or not stores or work.tokens.shape[1] > MOST_WIDTH:
            return None
        if self._stores != (address := stores[0][0].data_ptr()):
            self._stores, self._graphs = address, {}
        end = next(iter(work.masks.values())).shape[-1]
        end = min(-(-end // BUCKET) * BUCKET, stores[0][0].shape[2])
        key = (*work.tokens.shape, end, *places)
        if key not in self._graphs:
            try:
                self._graphs[key] = self._capture(_widened(work, end), stores, places)
            except Exception as error:  # a synchronization in the model's code, too little memory, ...
                self._failed = True
                warn(self.name, f"runs {EAGERLY}", error)
                return None
        graph = self._graphs[key]
        _fill(graph.work, work)
        graph.replay()
        logits, *states = (part.clone() for part in graph.found)
        return PassResult(logits, dict(zip(places, states, strict=True)))

    def _capture(self, work: Pass, stores: Stores, places: Places) -> Graph:
        """Capture a pass of this shape as a graph."""
        if self.progress:
            rows, width, end = *work.tokens.shape, next(iter(work.masks.values())).shape[-1]
            self.progress(f"capturing {self.name} for {rows} x {width} tokens and {end} slots")
        outputs, replay = record(lambda: forward_showing(self.model, work, stores, places))
        return Graph(work, outputs, replay)


def record(function: Callable[[], list[Tensor]]) -> tuple[list[Tensor], Callable[[], None]]:
    """Capture a function's work on the GPU -> the tensors it returns, and a function that repeats the work on them."""
    GRAPHS.captured += 1
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # the first runs choose kernels and allocate, which cannot be captured
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = function()
    return outputs, graph.replay


def _widened(work: Pass, end: int) -> Pass:
    """Return a pass with tensors of its own and masks over `end` slots; no token attends to the added ones."""

    def wide(mask: Tensor) -> Tensor:
        return nn.functional.pad(mask, (0, end - mask.shape[-1]), value=torch.finfo(mask.dtype).min)

    masks = {kind: wide(mask) for kind, mask in work.masks.items()}
    return Pass(work.tokens.clone(), work.positions.clone(), work.slots.clone(), masks)


def _fill(fixed: Pass, work: Pass) -> None:
    """Copy a pass into the tensors that a graph reads; slots beyond it stay masked."""
    for name in ("tokens", "positions", "slots"):
        getattr(fixed, name).copy_(getattr(work, name))
    for kind, mask in work.masks.items():
        end = mask.shape[-1]
        fixed.masks[kind][..., :end].copy_(mask)
        fixed.masks[kind][..., end:] = torch.finfo(mask.dtype).min
