"""Decoder layers of models with a state per row as graphs, one for all layers of a kind.

A whole model as one graph would take minutes to make: its layers are written out one behind the other, and each brings
states of its own. Here a layer is a function of its weights, of what its model hands it and of its state, so that a
model of 24 layers of two kinds has two graphs. What lies between the layers runs as it does eagerly.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import (
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from slipstream.execution.graphs import LEAST, Frozen, equate, graph_progress, vary, warn
from slipstream.execution.passes import EAGERLY, MOST_WIDTH, compare
from slipstream.execution.structure import PLAIN
from slipstream.models.layers import find_layers
from slipstream.models.recurrences import KINDS, record, recording

NUMBERS = {"layer_idx", "layer_id", "layer_number"}
"""How layers call their own number, in which those of a kind differ."""

MOST_KINDS = 8
"""Kinds of layers at most: beyond it, layers differ in what graphs would have to be made for one by one."""

SERVED = {LinearAttentionLayer, DynamicLayer, LinearAttentionAndFullAttentionLayer}
"""What keeps the states of the layers that graphs are made of."""


STATELESS = {"mlp", "moe"}
"""Types of layers that keep nothing: two or three products, which entering a graph would not make faster."""


class Unserved(Exception):
    """A model that has no graphs for its layers, and why."""


# ---- what a layer keeps ---------------------------------------------------------------------------------------------


class Held(NamedTuple):
    """What a layer holds of the tokens before a pass, by places of their own: inputs of convolutions (rows, places,
    channels), recurrent states, and keys and values (rows, heads, tokens, width), if it attends."""

    convolved: list[Tensor]
    recurrent: list[Tensor]
    attended: list[Tensor]

    @staticmethod
    def of(layer: Any) -> Held:
        """What transformers' layer of a cache holds, in memory of the form that graphs are made for."""
        convolved = [_settled(each.mT) for each in _there(layer, "conv_states")]
        # In tensors of their own: transformers marks some as lying in one place for ever, which torch believes.
        recurrent = [_settled(each).detach() for each in _there(layer, "recurrent_states")]
        attended = [layer.keys, layer.values] if isinstance(layer, DynamicLayer) else []
        return Held(convolved, recurrent, [_settled(each) for each in attended])


def _there(layer: Any, name: str) -> list[Tensor]:
    """The states of a layer of this name, in their order."""
    return [each for each in getattr(layer, name, {}).values() if each is not None]


class _LayerCache(Cache):
    """transformers' Cache over what one layer holds: what a traced layer can do. It writes to nothing it is given."""

    def __init__(self, held: Held) -> None:
        super().__init__(layers=[])
        self.held = held
        self.convolved, self.attended = list(held.convolved), list(held.attended)

    def is_recording_past(self, layer_idx: int) -> bool:
        return True

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return True

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        return self.convolved[state_idx].mT

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.held.recurrent[state_idx] if self.held.recurrent else None

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        self.convolved[state_idx] = torch.cat([self.convolved[state_idx], conv_states.mT], 1)
        return self.convolved[state_idx].mT

    def update_recurrent_state(self, recurrent_states: Any, layer_idx: int, state_idx: int = 0, **_: Any) -> Any:
        return recurrent_states

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = (torch.cat(each, 2) for each in zip(self.attended, (key_states, value_states), strict=True))
        self.attended = [keys, values]
        return keys, values


# ---- kinds of layers ------------------------------------------------------------------------------------------------


def _settled(tensor: Tensor) -> Tensor:
    """The tensor with its numbers one behind the other, in the steps that follow from its shape."""
    if tensor.is_contiguous():  # whatever the steps are over a size of one
        return tensor.view(-1).view(tensor.shape)
    return tensor.clone(memory_format=torch.contiguous_format)


def _weights(layer: nn.Module) -> dict[str, Tensor]:
    """All tensors of a layer by name, as plain tensors."""
    named = (*layer.named_parameters(remove_duplicate=False), *layer.named_buffers(remove_duplicate=False))
    return {name: tensor.detach() for name, tensor in named}


def _template(layer: nn.Module) -> nn.Module:
    """A copy of a layer without its weights, in whose place any other layer's can be put."""
    held = [*layer.parameters(), *layer.buffers()]
    return copy.deepcopy(layer, {id(each): torch.zeros((), dtype=each.dtype).expand(each.shape) for each in held})


def _likeness(layer: nn.Module) -> tuple[Any, ...]:
    """All that the code of a layer could depend on but the values of its weights and its number."""
    forms = [(name, each.dtype, tuple(each.shape), each.stride()) for name, each in _weights(layer).items()]
    facts = [
        (path, type(part), name, _fact(value))
        for path, part in layer.named_modules()
        for name, value in sorted(vars(part).items())
        if name not in NUMBERS | {"_parameters", "_buffers", "_modules"}
    ]
    return (*forms, *facts)


def _fact(value: Any) -> Any:
    """A value that can be compared: plain ones by what they are, others by whether they are the same thing."""
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, dict | list | tuple | set) and all(isinstance(part, PLAIN) for part in value):
        parts = [(repr(key), _fact(part)) for key, part in value.items()] if isinstance(value, dict) else value
        return type(value), tuple(sorted(map(repr, parts)))
    return id(value)


# ---- graphs ---------------------------------------------------------------------------------------------------------


class Hole(Enum):
    """What stands in the arguments of a layer for what differs from call to call."""

    TENSOR = 1
    CACHE = 2


class Call(NamedTuple):
    """A call of a layer: its arguments and named ones with holes, and the tensors that go there, in their order."""

    args: tuple[Any, ...]
    named: tuple[tuple[str, Any], ...]
    tensors: list[Tensor]

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """From the arguments; the model's cache may be among them by any name."""
        tensors: list[Tensor] = []
        return Call(_with_holes(args, tensors), _with_holes(tuple(kwargs.items()), tensors), tensors)


def _with_holes(given: Any, tensors: list[Tensor]) -> Any:
    """Arguments without their tensors, which are put behind those that were found before."""
    if isinstance(given, Tensor):
        tensors.append(_settled(given))
        return Hole.TENSOR
    if isinstance(given, tuple):
        return tuple([_with_holes(part, tensors) for part in given])
    return Hole.CACHE if isinstance(given, Cache) else given


def _filled(given: Any, tensors: Iterator[Tensor], cache: Cache) -> Any:
    """Arguments with these tensors and this cache in their holes."""
    if isinstance(given, tuple):
        return tuple([_filled(part, tensors, cache) for part in given])
    if given is Hole.TENSOR:
        return next(tensors)
    return cache if given is Hole.CACHE else given


Found = tuple[Any, list[Tensor], list[Tensor], list[list[list[Tensor]]]]
"""What a graph returns: what the layer does, convolutions' inputs, keys and values, and recurrences by their kinds."""


@dataclass
class _Kind:
    """The layers of one kind, and their graphs by what they serve."""

    template: nn.Module
    names: list[str]
    said: Callable[[str], object] | None
    name: str
    graphs: dict[Any, Frozen] = field(default_factory=dict)

    def run(self, weights: list[Tensor], call: Call, held: Held) -> Found:
        """What a layer with these weights returns, by a graph that is made if there is none yet."""
        rows, count = call.tensors[0].shape[:2]
        served = "one text" if rows == 1 else "batches"
        served = f"{served}, a token each" if count == 1 else served
        key = (served, call.args, call.named, *map(len, held))
        if key not in self.graphs:
            sizes = _varying(call.tensors, held, rows, count)
            vary(_sizes(sizes, call.tensors, held))
            on_graph = graph_progress(self.said, f"{self.name} for {served}")
            function = _function(self.template, self.names, call, sizes)
            self.graphs[key] = Frozen(function, ("weights", "tensors", "held"), on_graph)
        found: Found = self.graphs[key](weights, call.tensors, list(held))
        return found


Varying = list[tuple[int, dict[int, str]]]
"""Which dimensions of a graph's inputs vary, by their number, and what these count."""


def _varying(tensors: Sequence[Tensor], held: Held, rows: int, count: int) -> Varying:
    """Rows are first in all inputs; new tokens second, or third where there is one more for heads; masks end with the
    tokens that are looked at. What has a size of one is constant."""
    found: Varying = []
    for number, tensor in enumerate(tensors):
        place = 2 if tensor.dim() == 4 else 1
        named = {0: "rows"} if tensor.shape[0] == rows > 1 else {}
        if tensor.dim() > place and tensor.shape[place] == count > 1:
            named[place] = "new"
        found.append((number, named | ({3: "end"} if tensor.dim() == 4 else {})))
    first = {0: "rows"} if rows > 1 else {}
    states = len(held.convolved) + len(held.recurrent)
    found += [(len(tensors) + number, dict(first)) for number in range(states)]
    return found + [(len(tensors) + states + number, {**first, 2: "past"}) for number in range(len(held.attended))]


def _sizes(varying: Varying, tensors: Sequence[Tensor], held: Held) -> list[tuple[Tensor, dict[int, str]]]:
    inputs = [*tensors, *held.convolved, *held.recurrent, *held.attended]
    return [(inputs[number], named) for number, named in varying]


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors in memory of their own: a graph that returns parts of others could not be kept."""
    return [each.clone(memory_format=torch.contiguous_format) for each in tensors]


def _function(layer: nn.Module, names: Sequence[str], call: Call, varying: Varying) -> Callable[..., Found]:
    """A layer as a function of tensors alone."""
    placed, named = call.args, call.named

    def function(weights: list[Tensor], tensors: list[Tensor], held: list[list[Tensor]]) -> Found:
        parts = Held(*held)
        equate(_sizes(varying, tensors, parts))
        cache = _LayerCache(parts)
        rest = iter(tensors)
        args, kwargs = _filled(placed, rest, cache), dict(_filled(named, rest, cache))
        with recording() as found:
            returned = torch.func.functional_call(layer, dict(zip(names, weights, strict=True)), args, kwargs)
        by_kind = [[_copies(each.read()) for each in found if type(each) is kind] for kind in KINDS]
        return returned, cache.convolved, cache.attended, by_kind

    return function


@dataclass(frozen=True)
class _Layer:
    """A layer's graph in place of its `forward`."""

    number: int
    kind: _Kind
    weights: list[Tensor]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kept = self._kept([*args, *kwargs.values()])
        held = Held.of(kept)
        returned, convolved, attended, recurrences = self.kind.run(self.weights, Call.of(args, kwargs), held)
        for place, each in enumerate(convolved):
            kept.conv_states[place] = each.mT
        if attended:
            kept.keys, kept.values = attended
        for kind, some in zip(KINDS, recurrences, strict=True):
            for start, (first, second, third, fourth) in zip(_there(kept, "recurrent_states"), some, strict=False):
                record(kind(start, first, second, third, fourth))
        return returned

    def _kept(self, given: Sequence[Any]) -> Any:
        """What the model's cache keeps for this layer. Raises Unserved for what no graph can serve."""
        cache = next((each for each in given if isinstance(each, Cache)), None)
        kept = cache and cache.layers[self.number]
        if type(kept) not in SERVED:
            raise Unserved(f"a layer keeps a {type(kept).__name__}")
        return kept


class LayerGraphs:
    """The layers of a model as graphs, for recorded passes of few tokens.

    The first pass of every kind (single texts or batches, a token each or several) is compared with the eager one. If a
    graph cannot be made or gives other logits, one warning says why, and the layers run as they are from then on.
    """

    def __init__(self, model: Any, name: str, progress: Callable[[str], object] | None = None) -> None:
        self._name, self._progress = name, progress
        self._compared: set[tuple[bool, bool]] = set()
        self._failed = False
        self._layers: list[tuple[nn.Module, _Layer]] = []
        try:
            types = getattr(model.config.get_text_config(), "layer_types", None) or ()
            layers = find_layers(model, name)[1]
            self._layers = self._sorted([layer for layer, kind in zip_longest(layers, types) if kind not in STATELESS])
        except (Unserved, ValueError) as error:
            self._give_up(error)

    def _sorted(self, layers: Sequence[nn.Module]) -> list[tuple[nn.Module, _Layer]]:
        """Every layer with what runs in its place."""
        kinds: dict[Any, _Kind] = {}
        found = list[tuple[nn.Module, _Layer]]()
        for layer in layers:
            weights, likeness = _weights(layer), _likeness(layer)
            if likeness not in kinds:
                said = f"layers of {self._name} like number {len(found)}"
                kinds[likeness] = _Kind(_template(layer), list(weights), self._progress, said)
            numbers: list[Any] = [part.layer_idx for part in layer.modules() if hasattr(part, "layer_idx")]
            found.append((layer, _Layer(numbers[0], kinds[likeness], list(weights.values()))))
        if len(kinds) > MOST_KINDS:
            raise Unserved(f"its {len(found)} layers are of {len(kinds)} kinds")
        return found

    def run(self, rows: int, count: int, known: int, once: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
        """What `once` returns, an output with logits and something beside it: it runs a recorded pass of `count` tokens
        for each of so many rows behind `known` ones, and changes nothing, so that it can be repeated."""
        if self._failed or known < LEAST or count > MOST_WIDTH:
            return once()
        served = rows > 1, count > 1
        try:
            eager = None if served in self._compared else once()
            with self._in_place():
                found = once()
            if eager:
                compare(eager[0].logits, found[0].logits)
        except Exception as error:  # whatever dynamo, inductor or the machine's C++ compiler object to
            self._give_up(error)
            return once()
        self._compared.add(served)
        return found

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """Let graphs run in place of the layers."""
        for layer, run in self._layers:
            vars(layer)["forward"] = run
        try:
            yield
        finally:
            for layer, _ in self._layers:
                del vars(layer)["forward"]

    def _give_up(self, error: Exception) -> None:
        self._failed = True
        warn(self._name, f"runs {EAGERLY}", error)
