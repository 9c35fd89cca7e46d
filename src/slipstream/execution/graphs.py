"""Graphs of torch.compile with the weights frozen into them, on CPUs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from inspect import CO_VARARGS
from types import FunctionType
from typing import Any

import torch.fx.experimental._config
from torch import Tensor

from slipstream.execution import kept_graphs
from slipstream.execution.structure import Structure, Unknown

STATIC = {"automatic_dynamic_shapes": False, "assume_static_by_default": True}
LEAST_SHARE = 1 << 14
"""The elements that are worth a thread in a loop that inductor writes: half of what torch's own operations share."""

OnGraph = Callable[[bool], object]
"""A callback with True before a graph is compiled, and with False when one of an earlier process is loaded."""

LEAST = 2  # the least size that varies: torch takes a size of one for a constant, and makes another graph for it


@dataclass
class GraphCounts:
    """The numbers of graphs that this process has compiled, loaded from earlier processes, and captured on a GPU."""

    compiled: int = 0
    loaded: int = 0
    captured: int = 0


GRAPHS = GraphCounts()
"""The counts for all models of this process. A warm server should compile no more graphs, since each takes seconds."""


class Frozen:
    """A function of tensors as a graph, made at its first call; weights in its closure become constants.

    Sizes are constant, except those that `vary` names. A graph that another process made and stored is loaded and bound
    to this process's weights. Calls raise any error of dynamo, inductor or the machine's C++ compiler.
    """

    def __init__(
        self, function: Callable[..., Any], inputs: Sequence[str], on_graph: OnGraph = lambda made: None
    ) -> None:
        """Prepare a function whose parameters are `inputs`; `on_graph` is called when its graph is made or loaded."""
        self._inputs, self._on_graph, self._function = tuple(inputs), on_graph, function
        self._starred = bool(function.__code__.co_flags & CO_VARARGS)
        self._stored: kept_graphs.BoundGraph | None = None  # calling it costs less than entering torch.compile's graph
        self._graph: Any = None

    def __call__(self, *inputs: Any) -> Any:
        """Run the function by its graph, which the first call makes or loads."""
        named = self._named(inputs)
        structure = None if self._stored or self._graph else self._structure(inputs)
        if structure:
            self._stored = kept_graphs.find(structure)
            if self._stored:
                GRAPHS.loaded += 1
                self._on_graph(False)
        if self._stored:
            arguments = self._stored.arguments(named)
            if arguments is not None:
                return self._stored.run(arguments)
            self._stored = None  # the stored graph does not fit these inputs
        return self._graph(*inputs) if self._graph else self._make(structure, inputs)

    def _structure(self, inputs: Sequence[Any]) -> Structure | None:
        """Return the structure that the graph depends on; None if the graph cannot be stored."""
        if kept_graphs.folder() is None:
            return None
        try:
            return Structure(self._function, inputs)
        except Unknown:
            return None

    def _make(self, structure: Structure | None, inputs: Sequence[Any]) -> Any:
        """Compile the graph at its first call, store it for other processes if possible, and return its result."""
        GRAPHS.compiled += 1
        self._on_graph(True)
        recorder = kept_graphs.Recorder()
        options: Any = {"guard_filter_fn": self._of_inputs}
        graph = torch.compile(own_code(self._function), fullgraph=True, backend=recorder, options=options)
        # `options` of compile would come too late for freezing, and its `dynamic=False` would set STATIC before every
        # call. Torch's warnings here are about its own code.
        with (
            torch._dynamo.config.patch(STATIC),
            torch._inductor.config.patch(frozen_settings()),
            torch.fx.experimental._config.patch(use_duck_shape=False),  # type: ignore[attr-defined]
            warnings.catch_warnings(action="ignore"),
        ):
            result = graph(*inputs)
            if structure:
                self._stored = kept_graphs.keep(structure, recorder, self._named(inputs), result)
        self._graph = graph
        return result

    def _named(self, inputs: Sequence[Any]) -> dict[str, Any]:
        return {self._inputs[0]: inputs} if self._starred else dict(zip(self._inputs, inputs, strict=True))

    def _of_inputs(self, guards: Sequence[Any]) -> list[bool]:
        """Return which guards of a graph to check before every pass: those on sizes and inputs.

        The other five hundred, on a model that does not change, would cost as much as a small draft's pass.
        """
        return [guard.guard_type == "SHAPE_ENV" or guard.name.startswith(self._inputs) for guard in guards]


def frozen_settings() -> dict[str, Any]:
    """Return inductor's settings: weights are constants, C++ calls the kernels, and our passes rewrite the graph."""
    # Inductor takes longer to import than our whole package, so it is imported only for compiling.
    from slipstream.execution.rewrites import MergeLinear, TanhBySigmoid

    return {
        "freezing": True,
        "cpp_wrapper": True,
        "cpp.min_chunk_size": LEAST_SHARE,
        "post_grad_custom_pre_pass": TanhBySigmoid(),
        "post_grad_custom_post_pass": MergeLinear(),
    }


Sizes = Iterable[tuple[Tensor, Mapping[int, str]]]
"""Inputs, each with the names of the dimensions whose sizes vary."""


def vary(sizes: Sizes, constant: Collection[str] = ()) -> None:
    """Mark the sizes of these dimensions as varying, except those named in `constant`, before a graph's first call."""
    for tensor, counted in sizes:
        for dim, what in counted.items():
            if what not in constant:
                torch._dynamo.mark_dynamic(tensor, dim)


def equate(sizes: Sizes) -> None:
    """Declare, inside a traced function, that dimensions of the same name have the same size, one symbol.

    Python passes every symbol at every call, and a model's cache alone has two for each of its layers' tensors.
    """
    by_name: dict[str, Any] = {}
    for tensor, counted in sizes:
        for dim, what in counted.items():
            torch._check(tensor.shape[dim] == by_name.setdefault(what, tensor.shape[dim]))


def graph_progress(progress: Callable[[str], object] | None, what: str) -> OnGraph:
    """Return a callback that reports that the graph of `what` is being compiled, which takes long, or was loaded."""

    def report(made: bool) -> None:
        if progress:
            progress(f"compiling {what}" if made else f"loading the graph of {what}")

    return report


def own_code(function: Any) -> Any:
    """Copy a function with its code: dynamo counts recompilations by code object, and models must not share one."""
    code = function.__code__.replace()
    return FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)


def warn(name: str, what: str, error: Exception) -> None:
    """Warn that `name` runs another way, as `what` says, because it cannot be compiled, with the reason."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and not line.endswith("raised:")]
    reason = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    warnings.warn(f"{name} {what} cannot be compiled: {reason}", RuntimeWarning, stacklevel=4)
