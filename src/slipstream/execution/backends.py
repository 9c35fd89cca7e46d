"""Choosing how passes and drafts run on a device: eagerly, as programs, or captured as CUDA graphs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from slipstream.cache.stores import Stores
from slipstream.core.values import first_sentence
from slipstream.execution.cuda_graphs import Captured, CapturedDrafts
from slipstream.execution.draft_graphs import FED, DraftGraphs, Network
from slipstream.execution.passes import (
    Execution,
    Mode,
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
from slipstream.kernels.cpu import kernel_missing
from slipstream.kernels.packing import inputs_as_they_are, is_packed
from slipstream.kernels.placement import why_in_parts


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


CAPTURED = frozenset({"cuda"})  # the types of devices on which work is captured as CUDA graphs


def execution(model: PreTrainedModel, name: str, mode: Mode) -> Execution | None:
    """Return what makes passes of few tokens faster, or None for eager passes.

    On CPUs packed models run as programs. Warns if the mode is compiled, but the model's device or placement allows
    only eager passes.
    """
    why = why_in_parts(model)
    if why is None and captures(model.device):
        return Captured(model, name, mode.progress) if mode.compiled else None
    if why is None and model.device.type == "cpu":
        return Native(model, name) if kernel_missing() is None and is_packed(model) else None
    if mode.compiled:
        why = why or f"passes on {model.device} are not compiled"
        warnings.warn(f"{name} runs eagerly: {why}.", RuntimeWarning, stacklevel=3)
    return None


def captures(device: torch.device) -> bool:
    return device.type in CAPTURED


def draft_graphs(
    network: Network,
    name: str,
    device: torch.device,
    sizes: Sequence[int],
    most_fed: int = FED,
    progress: Callable[[str], object] | None = None,
) -> DraftGraphs:
    """Return the graphs by which a network on a device drafts; see `DraftGraphs`."""
    if captures(device):
        return CapturedDrafts(network, name, most_fed, progress, sizes=tuple(sizes))
    return DraftGraphs(network, name, max(most_fed, 16), progress)  # a program of one step is entered fast enough
