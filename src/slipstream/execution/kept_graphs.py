"""Storing graphs for other processes: inductor's code without the weights, which each process binds to its own."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils._sympy.printers import PythonPrinter

from slipstream.execution.structure import Structure
from slipstream.files import atomic_write, cache_folder, delete_oldest
from slipstream.text.jsontext import json_text

PLACE = "SLIPSTREAM_GRAPHS"  # the environment variable with the folder; "off" stores nothing
MOST_FILES = 256  # of some hundred kilobytes each; the least recently used are deleted first
FORM = 1  # the version of the files' format


class NotKept(Exception):
    """Raised for a graph that other processes could not use, with the reason; it still runs in this one."""


# ---- a graph without its weights --------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredGraph:
    """A graph without its weights, as it is stored.

    `source` is inductor's code, `constants` the index of the weight for each of its constants, and `arguments` Python
    code that makes its arguments of the function's inputs (None for inputs that do not fit).
    """

    source: str
    constants: dict[str, int]
    arguments: str
    outputs: Any  # the form of the function's result: lists that begin with the name of their type, True for tensors

    def bind(self, weights: Sequence[Tensor]) -> BoundGraph:
        """Return the graph bound to these weights, which are not copied."""
        from torch._inductor.codecache import PyCodeCache  # takes long to import

        key, path = PyCodeCache.write(self.source)
        constants = {name: weights[index] for name, index in self.constants.items()}
        code = PyCodeCache.load_by_key_path(key, path, None, constants)
        names: dict[str, Any] = {"torch": torch}
        exec(self.arguments, names)  # code that we wrote, like torch's source: a cache of code is trusted like code
        return BoundGraph(code.call, names["arguments"], self.outputs)


@dataclass(frozen=True)
class BoundGraph:
    """A stored graph that is bound to the weights of this process."""

    call: Callable[[list[Any]], Sequence[Tensor]]
    arguments: Callable[[dict[str, Any]], list[Any] | None]
    outputs: Any

    def run(self, arguments: list[Any]) -> Any:
        """Run the graph, and return its result in the form of the function's."""
        return _filled(self.outputs, iter(self.call(arguments)))


KINDS: dict[str, type[list[Any]] | type[tuple[Any, ...]]] = {"list": list, "tuple": tuple}


def _form(result: Any) -> Any:
    """Return the form of a result without its tensors. Raises NotKept for other types than lists and tuples."""
    if result is None or isinstance(result, Tensor):
        return result is not None
    if type(result) not in KINDS.values():
        raise NotKept(f"it returns a {type(result).__name__}")
    return [type(result).__name__, *map(_form, result)]


def _filled(form: Any, tensors: Iterator[Tensor]) -> Any:
    """Return a result of this form with these tensors, the inverse of `_form`."""
    if not isinstance(form, list):
        return next(tensors) if form else None
    return KINDS[form[0]]([_filled(part, tensors) for part in form[1:]])


class _Read(NamedTuple):
    """The inputs of a graph as Python expressions: tensors, and sizes by their symbols."""

    tensors: list[str]
    sizes: dict[str, str]


class _Made(NamedTuple):
    """A graph of inductor: its inputs, examples of them, tensors `held` before inductor's passes, and the graphs."""

    read: _Read
    examples: Sequence[Any]
    held: list[Tensor]
    traced: Any
    graph: Any


class Recorder:
    """Inductor as a backend of torch.compile that stores the graphs it made."""

    def __init__(self) -> None:
        self.made: list[_Made] = []

    def __call__(self, graph: Any, inputs: Any, **options: Any) -> Any:
        """Compile a graph as inductor does, and record what it made."""
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner

        read = [node.meta["grapharg"].source.name for node in graph.graph.nodes if node.op == "placeholder"]
        tensors = [name for name, value in zip(read, inputs, strict=True) if isinstance(value, Tensor)]
        sizes = {str(value): name for name, value in zip(read, inputs, strict=True) if isinstance(value, torch.SymInt)}

        def inner(traced: Any, examples: Sequence[Any], **settings: Any) -> Any:
            held = [getattr(traced, node.target) for node in traced.graph.find_nodes(op="get_attr")]
            made = compile_fx_inner(traced, examples, **settings)
            self.made.append(_Made(_Read(tensors, sizes), examples, held, traced, made))
            return made

        return compile_fx(graph, inputs, inner_compile=inner)

    def recipe(self, weights: Sequence[Tensor], found: Any) -> StoredGraph:
        """Return the recipe of the one graph that was made, which returned `found`. Raises NotKept if it has none."""
        if len(self.made) != 1:
            raise NotKept(f"{len(self.made)} graphs were made")
        read, examples, held, traced, made = self.made[0]
        places = {_place(weight): index for index, weight in enumerate(weights)}
        bound = {name: getattr(traced, of) for name, of in made.frozen_param_names.items()}
        # Small tensors need not be bound: inductor writes their values into the source, and they are in the key.
        if made.constants or made.torchbind_constants or not {*map(_place, [*held, *bound.values()])} <= set(places):
            raise NotKept("constants were computed out of the weights")
        constants = {name: places[_place(tensor)] for name, tensor in bound.items()}
        return StoredGraph(made.source_code, constants, _arguments(read, examples), _form(found))


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


# ---- the arguments of a graph -----------------------------------------------------------------------------------


def _arguments(read: _Read, examples: Sequence[Any]) -> str:
    """Return Python code that makes a graph's arguments, and checks its assumptions about them. Raises NotKept."""
    tensors = [example for example in examples if isinstance(example, Tensor)]
    if len(tensors) != len(read.tensors) or not all(name.startswith("L[") for name in read.tensors):
        raise NotKept("torch reads more than the inputs")
    lines = [f"t{index} = {name}" for index, name in enumerate(read.tensors)]
    symbols = dict(read.sizes)
    for index, tensor in enumerate(tensors):
        for dim, size in enumerate(tensor.shape):
            if isinstance(size, torch.SymInt) and size.node.expr.is_symbol:
                symbols.setdefault(str(size), f"t{index}.shape[{dim}]")
    lines += [f"{symbol} = {size}" for symbol, size in symbols.items()]
    needs = [_needs(f"t{index}", tensor) for index, tensor in enumerate(tensors)]
    needs += _relations(examples, symbols)
    names = iter(range(len(tensors)))
    expressions = [f"t{next(names)}" if isinstance(part, Tensor) else str(part) for part in examples]
    lines += [f"if not ({' and '.join(needs)}): return None", f"return [{', '.join(expressions)}]"]
    return "def arguments(L):\n" + "".join(f"    {line}\n" for line in lines)


def _needs(name: str, tensor: Tensor) -> str:
    """Return a Python condition on a tensor's dtype, sizes and strides."""
    shape, strides = (
        "(" + "".join(f"{_printed(part)}, " for part in parts) + ")" for parts in (tensor.shape, tensor.stride())
    )
    return f"{name}.dtype is {tensor.dtype} and {name}.shape == {shape} and {name}.stride() == {strides}"


def _printed(size: Any) -> str:
    return PythonPrinter().doprint(size.node.expr) if isinstance(size, torch.SymInt) else str(size)


def _relations(examples: Sequence[Any], symbols: dict[str, str]) -> list[str]:
    """Return Python conditions for torch's assumptions about sizes in the graph. Raises NotKept for unknown sizes."""
    sizes = [size for example in examples for size in (example.shape if isinstance(example, Tensor) else [example])]
    symbolic = next((size for size in sizes if isinstance(size, torch.SymInt)), None)
    if symbolic is None:
        return ["True"]
    known = symbolic.node.shape_env
    conditions = [known.simplify(guard.expr) for guard in known.guards]
    unknown = {str(symbol) for expression in conditions for symbol in expression.free_symbols} - set(symbols)
    if unknown:
        raise NotKept(f"its guards name {sorted(unknown)}")
    ranges = ((str(symbol), bounds) for symbol, bounds in known.var_to_range.items() if str(symbol) in symbols)
    return [
        *(f"({PythonPrinter().doprint(expression)})" for expression in conditions),
        *(f"{int(bounds.lower)} <= {symbol}" for symbol, bounds in ranges),
        "torch.is_inference_mode_enabled()",
    ]


# ---- files ------------------------------------------------------------------------------------------------------


def folder() -> Path | None:
    """Return the folder in which graphs are stored; None if they are not."""
    return cache_folder("graphs", PLACE)


def find(structure: Structure) -> BoundGraph | None:
    """Return the graph stored for a function of this structure; None if there is none, or its file is damaged."""
    place = folder()
    if place is None:
        return None
    path = place / f"{structure.key}.json"
    try:
        digest, _, body = path.read_bytes().partition(b"\n")
        if hashlib.sha256(body).hexdigest().encode() != digest:
            return None
        record = json.loads(body)
        if (record.pop("form"), record.pop("key")) != (FORM, structure.key):
            return None
        os.utime(path)
        return StoredGraph(**record).bind(structure.weights)
    except Exception:  # the file or its contents are damaged in some way: the graph is made again
        return None


def keep(structure: Structure, recorder: Recorder, inputs: dict[str, Any], found: Any) -> BoundGraph | None:
    """Store the graph just made if, bound as in another process, it gives the same bits -> the bound graph, or None."""
    place = folder()
    if place is None:
        return None
    try:
        recipe = recorder.recipe(structure.weights, found)
        graph = recipe.bind(structure.weights)
        _try(graph, inputs, found)
        body = json_text({"form": FORM, "key": structure.key, **asdict(recipe)}).encode()
        place.mkdir(parents=True, exist_ok=True)
        with atomic_write(place / f"{structure.key}.json") as part:
            part.write_bytes(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
        delete_oldest(place, "*.json", MOST_FILES)
    except Exception:  # for example a full disk: the graph still serves this process
        return None
    return graph


def _try(graph: BoundGraph, inputs: dict[str, Any], expected: Any) -> None:
    """Raise NotKept unless a stored graph gives the same bits as the one that was just made."""
    arguments = graph.arguments(inputs)
    if arguments is None:
        raise NotKept("it does not take the inputs it was made for")
    for kept, made in zip(tree_leaves(graph.run(arguments)), tree_leaves(expected), strict=True):
        if kept is not made and not torch.equal(kept, made):
            raise NotKept("it gives other results")
