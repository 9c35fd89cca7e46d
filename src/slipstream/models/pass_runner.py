"""Runs passes of a model by graphs where there are any for them, otherwise by calling the model itself."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from weakref import WeakSet

import torch
from torch import Tensor, nn

from slipstream.execution.names import with_cache
from slipstream.execution.passes import Execution, Pass, PassResult
from slipstream.models.facts import ModelFacts
from slipstream.models.heads.hidden_states import HiddenStates
from slipstream.models.memory import HFCache, Memory

NO_LOGITS = torch.empty(0, dtype=torch.long)
"""The positions whose logits are needed in a pass that only fills the cache: none."""


class PassRunner:
    """Runs passes of a model (or of the decoder of one) over a memory; graphs on a GPU run its first rows."""

    def __init__(self, module: nn.Module, facts: ModelFacts, memory: Memory, execution: Execution | None) -> None:
        self._call = with_cache(module)
        self._facts, self._memory, self.execution = facts, memory, execution
        self._cache = HFCache(memory)
        self.recorded: WeakSet[HiddenStates] = WeakSet()  # hidden states to record

    def logits(self, work: Pass) -> Tensor:
        """Return the logits (rows, n, vocab) of a pass, in the model's dtype."""
        if (result := self._run(work)) is not None:
            return result.logits
        return self._eager(work.to(work.tokens.device), keep=0)

    def _run(self, work: Pass, logits: bool = True) -> PassResult | None:
        """Run a pass by the execution, and store its hidden states; None if it has to run eagerly."""
        if not self.execution or (self._memory.texts.part.start and work.tokens.device.type == "cuda"):
            return None
        places = tuple(sorted({place for states in self.recorded for place in states.places}))
        result = self.execution.run(
            work, self._memory.texts.taking_part, places, self._watching if places else None, logits
        )
        if result is not None:
            for states in self.recorded:
                states.store(states.joined(result.states))
        return result

    @contextmanager
    def _watching(self) -> Iterator[Mapping[int, Tensor]]:
        """Yield a mapping that a pass in the block fills with the states to record, by place."""
        with ExitStack() as watched:
            yield ChainMap(*[watched.enter_context(states.watching()) for states in self.recorded])

    def feed(self, work: Pass) -> None:
        """Run a pass that only fills the cache."""
        if self._run(work, logits=False) is None:
            self._eager(work, keep=NO_LOGITS)

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
