"""A model's passes as programs that the kernels run, compared with the model's own pass before they are used (CPU)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from slipstream.cache.stores import Stores
from slipstream.core.values import first_sentence
from slipstream.execution.passes import (
    Pass,
    PassResult,
    Places,
    Watching,
    compare,
    sizes_of_pass,
    tensors_of_pass,
    traced_pass,
)
from slipstream.execution.programs import Program, recorded
from slipstream.execution.recording import Recording
from slipstream.kernels.packing import inputs_as_they_are


@dataclass
class Native:
    """Passes of a model as programs: recorded once for passes of any size, and run by one call into the kernels.

    The first pass is compared with the model's own. If it cannot be recorded or gives other logits, `fault` says why,
    and all passes run eagerly.
    """

    model: PreTrainedModel
    name: str
    fault: str | None = None
    least = 0
    _recordings: dict[Places, Recording] = field(default_factory=dict)
    _programs: dict[tuple[Places, bool], Program] = field(default_factory=dict)

    def run(
        self, work: Pass, stores: Stores, places: Places = (), watching: Watching | None = None, logits: bool = True
    ) -> PassResult | None:
        if self.fault or not stores:
            return None
        if not all(map(Tensor.is_contiguous, own := (work.tokens, work.positions, work.slots))):
            tokens, positions, slots = map(Tensor.contiguous, own)
            work = Pass(tokens, positions, slots, work.masks, work.cross)
        inputs = tensors_of_pass(work, stores)
        if places not in self._recordings:
            try:
                self._record(work, stores, inputs, places, watching)
            except Exception as error:  # of any type, from the model's own code on small tensors
                self.fault = f"{self.name} runs without a program: {first_sentence(error)}"
                return None
        if (program := self._programs.get((places, logits))) is None:
            kept = [number for number in range(1 + len(places)) if logits or number]
            program = self._programs[places, logits] = Program(self._recordings[places], kept)
        outputs = program(inputs)
        return PassResult(outputs[0], dict(zip(places, outputs[1:], strict=True)))

    def of(self, model: PreTrainedModel, name: str) -> Native:
        return Native(model, name)

    def _record(
        self, work: Pass, stores: Stores, inputs: tuple[Any, ...], places: Places, watching: Watching | None
    ) -> None:
        """Record a pass with its states at `places`. Raises ValueError if its program gives other results."""
        function = traced_pass(self.model, places, watching)
        recording = recorded(function, inputs, sizes_of_pass(work, stores))
        program = Program(recording)
        with inputs_as_they_are(self.model) as rounds:
            unrounded = function(*inputs) if rounds else None
        eager, made = function(*inputs), program(inputs)
        for number, what in enumerate(("logits", *["hidden states"] * len(places))):
            compare(eager[number], made[number], what, None if unrounded is None else unrounded[number])
        self._recordings[places], self._programs[places, True] = recording, program
