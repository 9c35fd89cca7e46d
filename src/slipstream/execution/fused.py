"""Functions of tensors with fewer and larger kernels, fused by inductor, to be captured as CUDA graphs.

A captured pass of a 1.1 B model replays some 700 kernels, and most of them take longer to start than to work.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch.fx.experimental._config

from slipstream.execution.graphs import GRAPHS, STATIC, OnGraph, Sizes, own_code, vary, warn

BACKEND = "inductor"


class Fused:
    """A function of tensors, compiled at its first call; weights in its closure are read where they are.

    If it cannot be compiled, on a machine without Triton or a C compiler for example, one warning says so, and it runs
    with its own kernels.
    """

    def __init__(self, function: Callable[..., Any], constant: Collection[str], name: str, on_graph: OnGraph) -> None:
        """Prepare a function whose sizes vary, except those named in `constant`.

        `name` is the model's, for the warning; `on_graph` is called before the function is compiled.
        """
        self._function, self._constant, self._name, self._on_graph = function, constant, name, on_graph
        self._graph: Any = None
        self._failed = False

    def __call__(self, inputs: Sequence[Any], sizes: Sizes) -> Any:
        """Run the function on inputs, the dimensions of which are named by `sizes`."""
        if self._failed:
            return self._function(*inputs)
        try:
            return self._run(inputs, sizes)
        except Exception as error:  # of any type, from dynamo, inductor, Triton or the machine's C compiler
            self._failed = True
            warn(self._name, "runs with more and smaller kernels, it", error)
            return self._function(*inputs)

    def _run(self, inputs: Sequence[Any], sizes: Sizes) -> Any:
        """Run the compiled function, which is compiled at the first call."""
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
