"""Runs passes of a model by graphs where there are any for them, otherwise by calling the model itself."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from weakref import WeakSet

import torch
from torch import Tensor, nn

from slipstream.execution.names import with_cache
from slipstream.execution.passes import Execution, Pass
from slipstream.models.facts import ModelFacts
from slipstream.models.heads.hidden_states import HiddenStates
from slipstream.models.memory import CacheFilled, HFCache, Memory

NO_LOGITS = torch.empty(0, dtype=torch.long)
"""The positions whose logits are needed in a pass that only fills the cache: none."""


class PassRunner:
    """Runs passes of a model (or of the decoder of one) over the rows of a memory.

    `execution` is used for passes whose rows are the first ones of the memory: their stores begin where all stores
    begin, so a graph does not depend on the rows after them.
    """

    def __init__(self, module: nn.Module, facts: ModelFacts, memory: Memory, execution: Execution | None) -> None:
        self._call = with_cache(module)
        self._facts, self._memory, self.execution = facts, memory, execution
        self._cache = HFCache(memory)
        self._writes: int | None = None  # to the cache, in every pass; None before the first
        self.recorded: WeakSet[HiddenStates] = WeakSet()  # hidden states to record

    def width(self, rows: int, count: int) -> int:
        """Return how many columns a pass of `count` tokens for each of `rows` rows should have."""
        return self.execution.width(rows, count) if self.execution else count

    def logits(self, work: Pass) -> Tensor:
        """Return the logits (rows, n, vocab) of a pass, in the model's dtype."""
        if self.execution and not self._memory.texts.part.start:
            places = tuple(sorted({place for states in self.recorded for place in states.places}))
            result = self.execution.run(work, self._memory.texts.taking_part, places)
            if result is not None:
                for states in self.recorded:
                    states.store(states.joined(result.states))
                return result.logits
        self._cache.begin()
        return self._eager(work.to(work.tokens.device), keep=0)

    def feed(self, work: Pass) -> None:
        """Run a pass that only fills the cache; it ends when the last layer has written its keys and values.

        What follows them in that layer would be computed for nothing, unless hidden states are recorded.
        """
        self._cache.begin(None if self.recorded else self._writes)
        with suppress(CacheFilled):
            self._eager(work, keep=NO_LOGITS)
            self._writes = self._cache.writes

    def _eager(self, work: Pass, keep: int | Tensor) -> Tensor:
        """Call the model on a pass -> logits of the positions `keep`, or of that many last ones (0: of all).

        Models that cannot leave out logits return all of them.
        """
        with ExitStack() as watched:
            seen = [(states, watched.enter_context(states.watching())) for states in self.recorded]
            out = self._call(
                input_ids=work.tokens,
                attention_mask=work.mask,
                position_ids=work.positions,
                cache=self._cache,
                use_cache=True,
                **work.cross_arguments,
                **({"logits_to_keep": keep} if self._facts.drops_logits else {}),
            )
        for states, by_place in seen:
            states.store(states.joined(by_place))
        return out.logits
