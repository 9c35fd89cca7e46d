"""Linear layers that read the same inputs, as one: a pass of inductor over the graphs that it compiles.

Queries, keys and values, or the gate beside what it lets through: for a few tokens, most of what a small layer costs is
to begin it on all threads. Every feature is summed as before, so that no bit changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, Node

MOST = 3  # layers of a product, as `slipstream::linears` takes them
ABSENT = (None, None, 0)  # weight, bias and features of a layer that is not there


class MergeLinear(CustomGraphPass):
    """Calls of `slipstream::linear` on the same inputs become one of `slipstream::linears`."""

    def __call__(self, graph: Graph) -> None:
        """Change the graph."""
        for nodes in list(_together(graph)):
            _merge(graph, nodes)

    def uuid(self) -> None:
        """No graph is kept for other processes: those from the cache of torch run slower (docs/execution.md)."""
        return None


def _together(graph: Graph) -> Iterator[list[Node]]:
    """Calls that can be one, two or three at a time, in their order."""
    if not hasattr(torch.ops.slipstream, "linear"):  # the kernel was not built
        return
    readers: dict[Any, list[Node]] = {}
    for node in graph.find_nodes(op="call_function", target=torch.ops.slipstream.linear.default):
        if all(constant.op == "get_attr" for constant in _constants(node)):
            readers.setdefault(node.args[0], []).append(node)
    for nodes in readers.values():
        runs = (nodes[start : start + MOST] for start in range(0, len(nodes), MOST))
        yield from (run for run in runs if len(run) > 1)


def _merge(graph: Graph, nodes: list[Node]) -> None:
    """One call in place of several, and parts of what it returns in place of what they returned."""
    inputs: Any = nodes[0].args[0]
    layers = [*(node.args[1:] for node in nodes), *[ABSENT] * (MOST - len(nodes))]
    for constant in chain.from_iterable(map(_constants, nodes[1:])):
        nodes[0].prepend(constant)
    with graph.inserting_before(nodes[0]):
        whole = graph.call_function(torch.ops.slipstream.linears.default, (inputs, *chain.from_iterable(layers)))
        shape = inputs.meta["val"].shape
        whole.meta["val"] = inputs.meta["val"].new_empty((*shape[:-1], sum(map(_features, nodes))))
        start = 0
        for node in nodes:
            end = start + _features(node)
            part = graph.call_function(torch.ops.aten.slice.Tensor, (whole, len(shape) - 1, start, end))
            part.meta["val"] = whole.meta["val"][..., start:end]
            node.replace_all_uses_with(part)
            start = end
    for node in nodes:
        graph.erase_node(node)


def _constants(node: Node) -> list[Node]:
    """The weight and, where there is one, the bias."""
    return [given for given in node.args[1:3] if isinstance(given, Node)]


def _features(node: Node) -> int:
    features: Any = node.args[3]
    return int(features)
