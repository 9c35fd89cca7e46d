"""Passes as graphs made by inductor for the CPU, compared with the eager pass before they are used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from slipstream.cache.stores import Stores
from slipstream.execution.graphs import LEAST, Frozen, graph_progress, vary, warn
from slipstream.execution.names import with_cache
from slipstream.execution.passes import (
    EAGERLY,
    MOST_WIDTH,
    Pass,
    PassResult,
    Places,
    compare,
    forward_showing,
)
from slipstream.execution.traced_passes import INPUTS, constant_sizes, sizes_of_pass, tensors_of_pass, traced_pass
from slipstream.kernels.packing import inputs_as_they_are


@dataclass
class Compiled:
    """Passes as graphs made by inductor, with the weights frozen into them and a C++ wrapper (CPU).

    The numbers of rows, new tokens and slots are symbols, so one graph serves every batch, another batches of one new
    token per text, and a third single texts. A graph is made when it is first needed (some ten seconds; `progress` is
    called) and compared with the eager pass. If it cannot be made or gives other logits, one warning says so, and all
    later passes run eagerly.
    """

    model: PreTrainedModel
    name: str
    progress: Callable[[str], object] | None = None
    least = LEAST
    _graphs: dict[tuple[str, Places], Any] = field(default_factory=dict)  # by passes served, in words, and places
    _failed: bool = False

    def width(self, rows: int, count: int) -> int:
        """Return at least two columns for a single text, where they cost no more than one."""
        return count if self._failed or rows > 1 else max(count, LEAST)

    def run(self, work: Pass, stores: Stores, places: Places = ()) -> PassResult | None:
        """See `Execution`."""
        rows, width = work.tokens.shape
        if self._failed or not stores or not self.width(rows, 1) <= width <= MOST_WIDTH:
            return None
        work = _settled(work)
        served = "one text" if rows == 1 else "batches" if width > 1 else "batches, a token each"
        if (graph := self._graphs.get((served, places))) is None:
            return self._make(served, work, stores, places)
        try:
            return _result(places, graph(*tensors_of_pass(work, stores)))
        except Exception as error:  # the pass has something that dynamo did not see when the graph was made
            self._give_up(error)
            return None

    def of(self, model: PreTrainedModel, name: str) -> Compiled:
        """See `Execution`."""
        return Compiled(model, name, self.progress)

    def _make(self, served: str, work: Pass, stores: Stores, places: Places) -> PassResult | None:
        """Make a graph for such passes and compare it with the eager pass -> the outputs; None: run eagerly."""
        try:
            with inputs_as_they_are(self.model) as rounds:
                unrounded = forward_showing(with_cache(self.model), work, stores, places) if rounds else None
            eager = forward_showing(with_cache(self.model), work, stores, places)
        except (AttributeError, IndexError, TypeError) as error:
            if not places:
                raise
            self._give_up(error)  # a model that cannot return hidden states
            return None
        graph = Frozen(
            traced_pass(self.model, places), INPUTS, graph_progress(self.progress, f"{self.name} for {served}")
        )
        try:
            vary(sizes_of_pass(work, stores), constant_sizes(work))
            outputs = graph(*tensors_of_pass(work, stores))
            for place, what in enumerate(("logits", *["hidden states"] * len(places))):
                compare(eager[place], outputs[place], what, None if unrounded is None else unrounded[place])
        except Exception as error:  # of any type, from dynamo, inductor or the machine's C++ compiler
            self._give_up(error)
            return _result(places, eager)
        self._graphs[served, places] = graph
        return _result(places, outputs)

    def _give_up(self, error: Exception) -> None:
        self._failed = True
        warn(self.name, f"runs {EAGERLY}", error)


def _result(places: Places, outputs: list[Tensor]) -> PassResult:
    """Return the outputs of a graph as a `PassResult`."""
    return PassResult(outputs[0], dict(zip(places, outputs[1:], strict=True)))


def _settled(work: Pass) -> Pass:
    """Return the pass with copies of its integers, made in inference mode, each contiguous in memory of its own.

    Torch would make another graph in the middle of a call for a column of a wider tensor, or for one tensor passed
    twice.
    """
    parts = (work.tokens, work.positions, work.slots)
    tokens, positions, slots = (part.clone(memory_format=torch.contiguous_format) for part in parts)
    return Pass(tokens, positions, slots, work.masks, work.cross)
