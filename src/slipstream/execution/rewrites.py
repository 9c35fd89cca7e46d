"""Rewrites of compiled graphs: layers with the same inputs become one product, and GELU takes one exponential."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, Node

aten = torch.ops.aten


class TanhBySigmoid(CustomGraphPass):
    """Replaces 1 + tanh(x) by 2 sigmoid(2 x), which is equal and has one exponential instead of a long polynomial."""

    def __call__(self, graph: Graph) -> None:
        """Change the graph."""
        for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
            if (x := _under_tanh(node)) is not None:
                _replace(graph, node, x)
        graph.eliminate_dead_code()

    def uuid(self) -> None:
        """Return None, so that torch stores no graph for other processes (see `MergeLinear`)."""
        return None


def _under_tanh(node: Node) -> Node | None:
    """Return x if the node is 1 + tanh(x) in floating point, else None; the tanh may have other readers."""
    tanh: Any = node.args[0]
    if node.kwargs or node.args[1] != 1 or not isinstance(tanh, Node) or tanh.target != aten.tanh.default:
        return None
    x: Any = tanh.args[0]
    return x if x.meta["val"].is_floating_point() else None  # for integers 2 x would have another dtype


def _replace(graph: Graph, node: Node, x: Node) -> None:
    value = node.meta["val"]
    with graph.inserting_before(node):
        for function, *factor in ((aten.mul.Tensor, 2), (aten.sigmoid.default,), (aten.mul.Tensor, 2)):
            x = graph.call_function(function, (x, *factor))
            x.meta["val"] = value
    node.replace_all_uses_with(x)
    graph.erase_node(node)


MOST = 3  # the most layers that one `slipstream::linears` computes
ABSENT = (None, None, 0)  # weight, bias and features of an absent layer


class MergeLinear(CustomGraphPass):
    """Replaces calls of `slipstream::linear` on the same inputs by one of `slipstream::linears`."""

    def __call__(self, graph: Graph) -> None:
        """Change the graph."""
        for nodes in list(_together(graph)):
            _merge(graph, nodes)

    def uuid(self) -> None:
        """Return None, so that torch stores no graph for other processes: its cache would hold the weights' values.

        `kept_graphs` stores graphs without weights.
        """
        return None


def _together(graph: Graph) -> Iterator[list[Node]]:
    """Yield groups of two or three calls that can be merged into one, in their order."""
    if not hasattr(torch.ops.slipstream, "linear"):  # the kernel was not built
        return
    readers: dict[Any, list[Node]] = {}
    for node in graph.find_nodes(op="call_function", target=torch.ops.slipstream.linear.default):
        if all(constant.op in {"get_attr", "placeholder"} for constant in _constants(node)):
            readers.setdefault(node.args[0], []).append(node)
    for nodes in readers.values():
        runs = (nodes[start : start + MOST] for start in range(0, len(nodes), MOST))
        yield from (run for run in runs if len(run) > 1)


def _merge(graph: Graph, nodes: list[Node]) -> None:
    """Replace several calls by one, and their results by parts of its result."""
    inputs: Any = nodes[0].args[0]
    layers = [*(node.args[1:] for node in nodes), *[ABSENT] * (MOST - len(nodes))]
    for constant in chain.from_iterable(map(_constants, nodes[1:])):
        if constant.op == "get_attr":
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
    """Return the nodes of the weight and of the bias, if there is one."""
    return [argument for argument in node.args[1:3] if isinstance(argument, Node)]


def _features(node: Node) -> int:
    features: Any = node.args[3]
    return int(features)
