"""Reading sources of encoder-decoders by graphs: the encoder, and the projections of its states to keys and values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from slipstream.execution.graphs import LEAST, Frozen, graph_progress, vary, warn
from slipstream.execution.passes import EAGERLY, compare

States = list[tuple[Tensor, Tensor]]
"""Keys and values (rows, heads, source, head_dim) of cross-attention by layer, as the model computes them."""

Reader = Callable[[Tensor, Tensor | None], States]
"""A function from ids (rows, longest) and their mask, or features and None, to keys and values of cross-attention."""


@dataclass
class CompiledReader:
    """A reader as graphs made by inductor: one for batches of sources of any length, and one for single sources.

    A graph is made when it is first needed (`progress` is called) and compared with the eager reader. If it cannot be
    made or gives other keys and values than rounding in the encoder's `dtype` explains, one warning says so, and
    sources are read eagerly from then on. Audio is read eagerly: its passes are long, and bound by arithmetic.
    """

    eager: Reader
    name: str
    dtype: torch.dtype
    progress: Callable[[str], object] | None = None
    _graphs: dict[bool, Any] = field(default_factory=dict)
    _failed: bool = False

    def __call__(self, inputs: Tensor, mask: Tensor | None) -> States:
        """See `Reader`."""
        if self._failed or mask is None or inputs.shape[1] < LEAST:
            return self.eager(inputs, mask)
        single = inputs.shape[0] == 1
        try:
            return self._graphs[single](inputs, mask) if single in self._graphs else self._make(single, inputs, mask)
        except Exception as error:  # of any type, from dynamo, inductor or the machine's C++ compiler
            self._failed = True
            warn(self.name, f"reads sources {EAGERLY}", error)
            return self.eager(inputs, mask)

    def _make(self, single: bool, inputs: Tensor, mask: Tensor) -> States:
        """Make the graph for one source or for batches, compare it with the eager reader, and return its result."""
        eager = self.eager

        def function(inputs: Tensor, mask: Tensor) -> States:
            return eager(inputs, mask)

        vary([(tensor, {0: "rows", 1: "tokens"}) for tensor in (inputs, mask)], {"rows"} if single else ())
        on_graph = graph_progress(self.progress, f"{self.name} for {'one source' if single else 'batches of sources'}")
        graph = Frozen(function, ["inputs", "mask"], on_graph)
        states = graph(inputs, mask)
        for layer, same in zip(self.eager(inputs, mask), states, strict=True):
            for expected, made in zip(layer, same, strict=True):
                compare(expected.to(self.dtype), made.to(self.dtype), "keys and values")
        self._graphs[single] = graph
        return states
