"""Running passes: by graphs where there are some for them, otherwise by calling the model."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from slipstream.execution.passes import Execution, Pass
from slipstream.models.facts import ModelFacts
from slipstream.models.hidden_states import HiddenStates
from slipstream.models.memory import HFCache, Memory

NO_LOGITS = torch.empty(0, dtype=torch.long)
"""The positions whose logits a pass needs that is run for its keys and values."""


class PassRunner:
    """Runs passes of a model (or of the decoder of one) over the rows of a memory.

    `execution` serves passes whose rows are the first ones of the memory: their stores begin where all stores begin,
    so a graph does not care whether other rows lie behind.
    """

    def __init__(self, module: nn.Module, facts: ModelFacts, memory: Memory, execution: Execution | None) -> None:
        self._module: Any = module
        self._facts, self._memory, self.execution = facts, memory, execution
        self._cache = HFCache(memory)
        self.recorded: WeakSet[HiddenStates] = WeakSet()  # what passes leave in the memory beside keys and values

    def width(self, rows: int, count: int) -> int:
        """How many columns a pass of `count` tokens for each of so many rows should have."""
        return self.execution.width(rows, count) if self.execution else count

    def logits(self, work: Pass) -> Tensor:
        """The logits (rows, n, vocab) of a pass, in the model's dtype."""
        if self.execution and not self._memory.texts.part.start:
            places = tuple(sorted({place for states in self.recorded for place in states.places}))
            found = self.execution.run(work, self._memory.texts.taking_part, places)
            if found is not None:
                for states in self.recorded:
                    states.store(states.joined(found.states))
                return found.logits
        return self._eager(work, keep=0)

    def feed(self, work: Pass) -> None:
        """Run a pass for what it leaves in the cache."""
        self._eager(work, keep=NO_LOGITS)

    def _eager(self, work: Pass, keep: int | Tensor) -> Tensor:
        """The logits of the tokens `keep`, or of so many last ones, where the model can leave out the others; 0 keeps
        all."""
        with ExitStack() as watched:
            seen = [(states, watched.enter_context(states.watching())) for states in self.recorded]
            out = self._module(
                input_ids=work.tokens,
                attention_mask=work.mask,
                position_ids=work.positions,
                past_key_values=self._cache,
                use_cache=True,
                **work.beside,
                **({"logits_to_keep": keep} if self._facts.drops_logits else {}),
            )
        for states, found in seen:
            states.store(states.joined(found))
        return out.logits
