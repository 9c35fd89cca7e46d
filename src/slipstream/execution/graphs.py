"""Functions of tensors that torch compiles: with sizes that vary, counted, and with a warning if it cannot be done.

A captured pass of a 1.1 B model replays some 700 kernels, and most of them take longer to start than to work: inductor
fuses them to fewer and larger ones, which are then captured as CUDA graphs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
import torch.fx.experimental._config
from torch import Tensor

STATIC = {"automatic_dynamic_shapes": False, "assume_static_by_default": True}

OnGraph = Callable[[], object]  # A callback before a graph is compiled


@dataclass
class GraphCounts:
    """The numbers of graphs that this process has compiled, and captured on a GPU."""

    compiled: int = 0
    captured: int = 0


GRAPHS = GraphCounts()
"""The counts for all models of this process. A warm server should compile no more graphs, since each takes seconds."""


Sizes = Iterable[tuple[Tensor, Mapping[int, str]]]  # inputs, each with the names of the dimensions whose sizes vary


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
    """Return a callback that reports that the graph of `what` is being compiled, which takes long."""

    def report() -> None:
        if progress:
            progress(f"compiling {what}")

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


BACKEND = "inductor"


class Fused:
    """A function of tensors, compiled at its first call; weights in its closure are read where they are.

    If it cannot be compiled, on a machine without Triton or a C compiler for example, one warning says so, and it runs
    with its own kernels.
    """

    def __init__(self, function: Callable[..., Any], constant: Collection[str], name: str, on_graph: OnGraph) -> None:
        """Prepare a function; `name` is for the warning, `on_graph` is called before it is compiled."""
        self._function, self._constant, self._name, self._on_graph = function, constant, name, on_graph
        self._graph: Any = None
        self._failed = False

    def __call__(self, inputs: Sequence[Any], sizes: Sizes) -> Any:
        if self._failed:
            return self._function(*inputs)
        try:
            return self._run(inputs, sizes)
        except Exception as error:  # of any type, from dynamo, inductor, Triton or the machine's C compiler
            self._failed = True
            warn(self._name, "runs with more and smaller kernels, it", error)
            return self._function(*inputs)

    def _run(self, inputs: Sequence[Any], sizes: Sizes) -> Any:
        if self._graph is None:
            GRAPHS.compiled += 1
            self._on_graph()
            vary(sizes, self._constant)
            self._graph = torch.compile(own_code(self._function), fullgraph=True, backend=BACKEND)
        # Torch's warnings are about its own code.
        with (
            torch._dynamo.config.patch(STATIC),
            torch.fx.experimental._config.patch(use_duck_shape=False),  # type: ignore[attr-defined]
            warnings.catch_warnings(action="ignore"),
        ):
            return self._graph(*inputs)
