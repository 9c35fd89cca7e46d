"""Functions of tensors, compiled by torch (`Fused`) and captured as CUDA graphs, which are replayed without Python.

A captured pass of a 1.1 B model replays some 700 kernels, and most of them take longer to start than to work: inductor
fuses them to fewer and larger ones, which are then captured as CUDA graphs.
"""

import warnings
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import accumulate
from types import FunctionType
from typing import Any

import torch
import torch.fx.experimental._config
from torch import Tensor

from slipstream.cache.stores import Stores

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
    Python passes every symbol at every call, and a model's cache alone has two for each of its layers' tensors."""
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
        except Exception as error:  # of any type, from dynamo, inductor, Triton or the machine's C compiler
            self._failed = True
            warn(self._name, "runs with more and smaller kernels, it", error)
            return self._function(*inputs)


Function = Callable[[Sequence[Tensor | None]], list[Tensor]]
"""A function of tensors that can be captured: it reads nothing else but weights and caches, and waits for nothing."""

ALIGNED = 16  # the bytes that every input from the host is aligned to


class Staging:
    """Inputs of a graph that come from the host: one copy brings all of them, and does not wait for the GPU."""

    def __init__(self, given: Sequence[Tensor], device: torch.device) -> None:
        sizes = [-(-each.nbytes // ALIGNED) * ALIGNED for each in given]
        on_gpu, starts = device.type == "cuda", [0, *accumulate(sizes)]
        self._host = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=on_gpu)
        self._device = torch.empty(starts[-1], dtype=torch.uint8, device=device)
        self._from, self.places = (
            [
                memory[start : start + each.nbytes].view(each.dtype).view(each.shape)
                for start, each in zip(starts, given, strict=False)
            ]
            for memory in (self._host, self._device)
        )
        self._copied = torch.cuda.Event() if on_gpu else None

    def fill(self, given: Sequence[Tensor]) -> None:
        if self._copied:
            self._copied.synchronize()  # the last copy reads the same memory of the host
        for place, each in zip(self._from, given, strict=True):
            place.copy_(each)
        self._device.copy_(self._host, non_blocking=True)
        if self._copied:
            self._copied.record()


@dataclass
class Graph:
    """A captured function; the staging brings the inputs of the indices `from_host` to the device."""

    inputs: Sequence[Tensor | None]
    outputs: list[Tensor]
    replay: Callable[[], object]
    staging: Staging
    from_host: Sequence[int]

    def run(self, inputs: Sequence[Tensor | None]) -> list[Tensor]:
        """Run it on inputs of the same shapes, from the same devices -> outputs that later runs leave as they are."""
        with current(self.outputs[0].device):
            self.staging.fill([given for index in self.from_host if (given := inputs[index]) is not None])
            for index, (place, given) in enumerate(zip(self.inputs, inputs, strict=True)):
                if place is not None and given is not None and index not in self.from_host:
                    place.copy_(given)
            self.replay()
            return [output.clone() for output in self.outputs]


@dataclass
class Graphs:
    """The graphs of functions that work on the same caches, by any key.

    A graph contains addresses, so all are dropped when the caches have moved. The graphs share their memory, since
    only one of them runs at a time, but for their inputs and outputs: of more than `most` graphs, the one that ran
    longest ago is dropped (None: none is).
    """

    most: int | None = None
    _graphs: dict[Hashable, Graph] = field(default_factory=dict)
    _caches: Sequence[Any] = ()
    _pool: Any = None

    @property
    def keys(self) -> list[Any]:
        return list(self._graphs)

    def find(self, key: Hashable, caches: Sequence[Stores] = ()) -> Graph | None:
        """Return the graph with this key; None if there is none that works on these caches."""
        # All layers of a cache are allocated together, so the first stands for all.
        now = [[(tensor.data_ptr(), tensor.stride()) for tensor in stores[0]] for stores in caches]
        if self._caches != now:
            self._caches, self._graphs, self._pool = now, {}, None
        if (graph := self._graphs.pop(key, None)) is not None:
            self._graphs[key] = graph  # the last one is the one that ran last
        return graph

    def capture(
        self, key: Hashable, function: Function, inputs: Sequence[Tensor | None], device: torch.device
    ) -> Graph:
        if self._pool is None and device.type == "cuda":
            self._pool = torch.cuda.graph_pool_handle()
        from_host = [index for index, each in enumerate(inputs) if each is not None and each.device.type == "cpu"]
        hosted = [each for index in from_host if (each := inputs[index]) is not None]
        with current(device):
            staging = Staging(hosted, device)
            staging.fill(hosted)
            places = dict(zip(from_host, staging.places, strict=True))
            copies = [
                None if each is None else places[index] if index in places else each.to(device, copy=True)
                for index, each in enumerate(inputs)
            ]
            graph = Graph(copies, *record(lambda: function(copies), self._pool), staging, from_host)
        self._graphs[key] = graph
        if self.most is not None and len(self._graphs) > self.most:
            del self._graphs[next(iter(self._graphs))]
        return graph


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which a GPU is the current one, on whose stream work is captured and replayed."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def shapes(inputs: Sequence[Tensor | None]) -> Hashable:
    """Return the shapes of inputs, and the devices they come from, as a key."""
    return tuple(None if each is None else (each.shape, each.device.type) for each in inputs)


def record(function: Callable[[], list[Tensor]], pool: Any = None) -> tuple[list[Tensor], Callable[[], object]]:
    """Capture a function's work on the GPU -> the tensors it writes, and a function that repeats the work on them.
    `pool` is the memory that graphs share. Other threads may use the GPU meanwhile."""
    GRAPHS.captured += 1
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # the first runs choose kernels and allocate, which cannot be captured
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        outputs = function()
    return outputs, graph.replay
