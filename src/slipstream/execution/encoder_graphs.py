"""Reading sources by graphs: an encoder, and what makes its states into keys and values, for encoder-decoders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from slipstream.execution.graphs import LEAST, Frozen, teller, vary, warn
from slipstream.execution.passes import EAGERLY, Stores, compare

Reader = Callable[[Tensor, Tensor | None], Stores]
"""Ids (rows, longest) and which of them are heard, or features without -> keys and values of cross-attention."""


@dataclass
class CompiledReader:
    """A reader as graphs made by inductor: one for batches of sources of any length, and one for single sources.

    A graph is made when it is first needed (`progress` is called), compared with the eager reader, and given up,
    with one warning, if it cannot be made or reads something else. Audio is read eagerly: its passes are long, and
    there arithmetic counts.
    """

    eager: Reader
    name: str
    progress: Callable[[str], object] | None = None
    _graphs: dict[bool, Any] = field(default_factory=dict)
    _failed: bool = False

    def __call__(self, given: Tensor, heard: Tensor | None) -> Stores:
        """See `Reader`."""
        if self._failed or heard is None or given.shape[1] < LEAST:
            return self.eager(given, heard)
        single = given.shape[0] == 1
        try:
            return self._graphs[single](given, heard) if single in self._graphs else self._make(single, given, heard)
        except Exception as error:  # whatever dynamo, inductor or the machine's C++ compiler object to
            self._failed = True
            warn(self.name, f"reads sources {EAGERLY}", error)
            return self.eager(given, heard)

    def _make(self, single: bool, given: Tensor, heard: Tensor) -> Stores:
        eager = self.eager

        def function(given: Tensor, heard: Tensor) -> Stores:
            return eager(given, heard)

        vary([(tensor, {0: "rows", 1: "tokens"}) for tensor in (given, heard)], {"rows"} if single else ())
        told = teller(self.progress, f"{self.name} for {'one source' if single else 'batches of sources'}")
        graph = Frozen(function, ["given", "heard"], told)
        found = graph(given, heard)
        for layer, same in zip(self.eager(given, heard), found, strict=True):
            for ours, theirs in zip(layer, same, strict=True):
                compare(ours, theirs, "keys and values")
        self._graphs[single] = graph
        return found
