"""Decoder layers of models with a state per row as graphs, one for all layers of a kind.

A whole model as one graph would take minutes to make: its layers are written out one after the other, and each brings
states of its own. Here a layer is a function of its weights, its inputs and its state, so that a model of 24 layers of
two kinds has two graphs. The code between the layers runs eagerly.
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
"""The attributes in which layers store their own number, the only difference between layers of a kind."""

MOST_KINDS = 8
"""The most kinds of layers: with more, nearly every layer would need a graph of its own."""

SERVED = {LinearAttentionLayer, DynamicLayer, LinearAttentionAndFullAttentionLayer}
"""The classes of transformers' cache layers whose decoder layers graphs are made for."""


STATELESS = {"mlp", "moe"}
"""The types of layers without a state: two or three matrix products, which a graph would not make faster."""


class Unserved(Exception):
    """Raised for a model whose layers cannot have graphs, with the reason."""


# ---- what a layer keeps ---------------------------------------------------------------------------------------------


class Held(NamedTuple):
    """The state of a layer before a pass.

    It has the inputs of its convolutions (rows, places, channels), its recurrent states, and its keys and values
    (rows, heads, tokens, width) if it attends.
    """

    convolved: list[Tensor]
    recurrent: list[Tensor]
    attended: list[Tensor]

    @staticmethod
    def of(layer: Any) -> Held:
        """Return the state in a layer of transformers' cache, in the memory layout that graphs are made for."""
        convolved = [_settled(each.mT) for each in _states_in(layer, "conv_states")]
        # In new tensor objects: transformers marks some as having a static address, which torch relies on.
        recurrent = [_settled(each).detach() for each in _states_in(layer, "recurrent_states")]
        attended = [layer.keys, layer.values] if isinstance(layer, DynamicLayer) else []
        return Held(convolved, recurrent, [_settled(each) for each in attended])


def _states_in(layer: Any, name: str) -> list[Tensor]:
    """Return the states of a cache layer in the attribute `name`, in their order, without missing ones."""
    return [each for each in getattr(layer, name, {}).values() if each is not None]


class _LayerCache(Cache):
    """A transformers Cache over the state of one layer, for use in a traced layer; it writes to no given tensor."""

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
    """Return the tensor contiguous, with the strides that follow from its shape."""
    if tensor.is_contiguous():  # dimensions of size one may still have other strides
        return tensor.view(-1).view(tensor.shape)
    return tensor.clone(memory_format=torch.contiguous_format)


def _weights(layer: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and buffers of a layer by name, as plain tensors."""
    named = (*layer.named_parameters(remove_duplicate=False), *layer.named_buffers(remove_duplicate=False))
    return {name: tensor.detach() for name, tensor in named}


def _template(layer: nn.Module) -> nn.Module:
    """Return a copy of a layer without its weights, which can be called with the weights of any other layer."""
    held = [*layer.parameters(), *layer.buffers()]
    return copy.deepcopy(layer, {id(each): torch.zeros((), dtype=each.dtype).expand(each.shape) for each in held})


def _likeness(layer: nn.Module) -> tuple[Any, ...]:
    """Return all that a layer's code could depend on, except the values of its weights and its number."""
    forms = [(name, each.dtype, tuple(each.shape), each.stride()) for name, each in _weights(layer).items()]
    facts = [
        (path, type(part), name, _comparable(value))
        for path, part in layer.named_modules()
        for name, value in sorted(vars(part).items())
        if name not in NUMBERS | {"_parameters", "_buffers", "_modules"}
    ]
    return (*forms, *facts)


def _comparable(value: Any) -> Any:
    """Return a comparable form of a value: plain values compare by value, others by identity."""
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, dict | list | tuple | set) and all(isinstance(part, PLAIN) for part in value):
        parts = [(repr(key), _comparable(part)) for key, part in value.items()] if isinstance(value, dict) else value
        return type(value), tuple(sorted(map(repr, parts)))
    return id(value)


# ---- graphs ---------------------------------------------------------------------------------------------------------


class Hole(Enum):
    """The placeholders in the arguments of a layer for values that differ from call to call."""

    TENSOR = 1
    CACHE = 2


class Call(NamedTuple):
    """A call of a layer: its positional and named arguments with holes, and the tensors of the holes, in order."""

    args: tuple[Any, ...]
    named: tuple[tuple[str, Any], ...]
    tensors: list[Tensor]

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Make a call of the arguments of a layer; the model's cache may be among them under any name."""
        tensors: list[Tensor] = []
        return Call(_with_holes(args, tensors), _with_holes(tuple(kwargs.items()), tensors), tensors)


def _with_holes(value: Any, tensors: list[Tensor]) -> Any:
    """Return arguments with holes in place of the cache and the tensors, which are appended to `tensors`."""
    if isinstance(value, Tensor):
        tensors.append(_settled(value))
        return Hole.TENSOR
    if isinstance(value, tuple):
        return tuple([_with_holes(part, tensors) for part in value])
    return Hole.CACHE if isinstance(value, Cache) else value


def _filled(value: Any, tensors: Iterator[Tensor], cache: Cache) -> Any:
    """Return arguments with these tensors and this cache in their holes."""
    if isinstance(value, tuple):
        return tuple([_filled(part, tensors, cache) for part in value])
    if value is Hole.TENSOR:
        return next(tensors)
    return cache if value is Hole.CACHE else value


Found = tuple[Any, list[Tensor], list[Tensor], list[list[list[Tensor]]]]
"""The outputs of a graph: those of the layer, inputs of convolutions, keys and values, and recurrences by kind."""


@dataclass
class _Kind:
    """The layers of one kind, which share graphs, and these graphs by the calls that they serve."""

    template: nn.Module
    names: list[str]
    progress: Callable[[str], object] | None
    name: str
    graphs: dict[Any, Frozen] = field(default_factory=dict)

    def run(self, weights: list[Tensor], call: Call, held: Held) -> Found:
        """Run a layer with these weights by a graph, which is made if there is none yet."""
        rows, count = call.tensors[0].shape[:2]
        served = "one text" if rows == 1 else "batches"
        served = f"{served}, a token each" if count == 1 else served
        key = (served, call.args, call.named, *map(len, held))
        if key not in self.graphs:
            sizes = _varying(call.tensors, held, rows, count)
            vary(_sizes(sizes, call.tensors, held))
            on_graph = graph_progress(self.progress, f"{self.name} for {served}")
            function = _function(self.template, self.names, call, sizes)
            self.graphs[key] = Frozen(function, ("weights", "tensors", "held"), on_graph)
        outputs: Found = self.graphs[key](weights, call.tensors, list(held))
        return outputs


Varying = list[tuple[int, dict[int, str]]]
"""The dimensions of a graph's inputs that vary: the number of each input, with the names of its varying dimensions."""


def _varying(tensors: Sequence[Tensor], held: Held, rows: int, count: int) -> Varying:
    """Return the varying dimensions of the inputs.

    Rows are the first dimension of all inputs; new tokens the second, or the third if there is one for heads; the last
    one of masks is the tokens that are attended to. Rows and new tokens of size one are constant.
    """
    varying: Varying = []
    for number, tensor in enumerate(tensors):
        place = 2 if tensor.dim() == 4 else 1
        named = {0: "rows"} if tensor.shape[0] == rows > 1 else {}
        if tensor.dim() > place and tensor.shape[place] == count > 1:
            named[place] = "new"
        varying.append((number, named | ({3: "end"} if tensor.dim() == 4 else {})))
    first = {0: "rows"} if rows > 1 else {}
    states = len(held.convolved) + len(held.recurrent)
    varying += [(len(tensors) + number, dict(first)) for number in range(states)]
    return varying + [(len(tensors) + states + number, {**first, 2: "past"}) for number in range(len(held.attended))]


def _sizes(varying: Varying, tensors: Sequence[Tensor], held: Held) -> list[tuple[Tensor, dict[int, str]]]:
    """Return a graph's inputs with the names of their varying dimensions."""
    inputs = [*tensors, *held.convolved, *held.recurrent, *held.attended]
    return [(inputs[number], named) for number, named in varying]


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of tensors: a graph that returns views of other tensors could not be stored."""
    return [each.clone(memory_format=torch.contiguous_format) for each in tensors]


def _function(layer: nn.Module, names: Sequence[str], call: Call, varying: Varying) -> Callable[..., Found]:
    """Return a layer as a function of its weights, the tensors of a call and its state."""
    placed, named = call.args, call.named

    def function(weights: list[Tensor], tensors: list[Tensor], held: list[list[Tensor]]) -> Found:
        parts = Held(*held)
        equate(_sizes(varying, tensors, parts))
        cache = _LayerCache(parts)
        rest = iter(tensors)
        args, kwargs = _filled(placed, rest, cache), dict(_filled(named, rest, cache))
        with recording() as recurrences:
            returned = torch.func.functional_call(layer, dict(zip(names, weights, strict=True)), args, kwargs)
        by_kind = [[_copies(each.read()) for each in recurrences if type(each) is kind] for kind in KINDS]
        return returned, cache.convolved, cache.attended, by_kind

    return function


@dataclass(frozen=True)
class _Layer:
    """A callable that replaces the `forward` of a layer by its graph."""

    number: int
    kind: _Kind
    weights: list[Tensor]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        cache = next((each for each in (*args, *kwargs.values()) if isinstance(each, Cache)), None)
        kept: Any = cache and cache.layers[self.number]
        if type(kept) not in SERVED:
            raise Unserved(f"a layer keeps a {type(kept).__name__}")
        held = Held.of(kept)
        returned, convolved, attended, recurrences = self.kind.run(self.weights, Call.of(args, kwargs), held)
        for place, each in enumerate(convolved):
            kept.conv_states[place] = each.mT
        if attended:
            kept.keys, kept.values = attended
        for kind, some in zip(KINDS, recurrences, strict=True):
            for start, (first, second, third, fourth) in zip(_states_in(kept, "recurrent_states"), some, strict=False):
                record(kind(start, first, second, third, fourth))
        return returned


class LayerGraphs:
    """The layers of a model as graphs, for recorded passes of few tokens.

    The first pass of every kind (single texts or batches, a token each or several) is compared with the eager one. If a
    graph cannot be made or gives other logits, one warning says why, and the layers run eagerly from then on.
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
        """Return every layer with the callable that replaces it. Raises Unserved if there are too many kinds."""
        kinds: dict[Any, _Kind] = {}
        replaced = list[tuple[nn.Module, _Layer]]()
        for layer in layers:
            weights, likeness = _weights(layer), _likeness(layer)
            if likeness not in kinds:
                name = f"layers of {self._name} like number {len(replaced)}"
                kinds[likeness] = _Kind(_template(layer), list(weights), self._progress, name)
            numbers: list[Any] = [part.layer_idx for part in layer.modules() if hasattr(part, "layer_idx")]
            replaced.append((layer, _Layer(numbers[0], kinds[likeness], list(weights.values()))))
        if len(kinds) > MOST_KINDS:
            raise Unserved(f"its {len(replaced)} layers are of {len(kinds)} kinds")
        return replaced

    def run(self, rows: int, count: int, known: int, once: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
        """Return the result of `once`, an output with logits and a further value, run by graphs if possible.

        `once` runs a recorded pass of `count` tokens for each of `rows` rows after `known` tokens. It changes nothing,
        so it can be repeated.
        """
        if self._failed or known < LEAST or count > MOST_WIDTH:
            return once()
        served = rows > 1, count > 1
        try:
            eager = None if served in self._compared else once()
            with self._in_place():
                result = once()
            if eager:
                compare(eager[0].logits, result[0].logits)
        except Exception as error:  # of any type, from dynamo, inductor or the machine's C++ compiler
            self._give_up(error)
            return once()
        self._compared.add(served)
        return result

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """Replace the layers by their graphs within the block."""
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
