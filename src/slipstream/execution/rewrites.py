"""Rewrites of compiled graphs: layers with the same inputs become one product, and GELU takes one exponential."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, Node

aten = torch.ops.aten


class TanhBySigmoid(CustomGraphPass):
    """Replaces 1 + tanh(x) by 2 sigmoid(2 x), which is equal and has one exponential instead of a long polynomial."""

    def __call__(self, graph: Graph) -> None:
        """Replace all such terms in a graph."""
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
    """Replace a node of the graph, which computes 1 + tanh(x), by 2 sigmoid(2 x)."""
    value = node.meta["val"]
    with graph.inserting_before(node):
        for function, *factor in ((aten.mul.Tensor, 2), (aten.sigmoid.default,), (aten.mul.Tensor, 2)):
            x = graph.call_function(function, (x, *factor))
            x.meta["val"] = value
    node.replace_all_uses_with(x)
    graph.erase_node(node)


MOST = 3  # the most layers that one call computes


@dataclass(frozen=True)
class Mergeable:
    """An operator of one layer, and the operator that computes two or three such layers from the same inputs.

    A call has the inputs, the layer's `arguments`, of which the last two are a bias and a number of features, and
    settings.
    """

    single: str
    several: str
    arguments: int

    def settings(self, node: Node) -> tuple[Any, ...]:
        """Return the arguments of a call behind those of its layer."""
        return node.args[1 + self.arguments :]

    def layer(self, node: Node) -> tuple[Any, ...]:
        """Return the arguments of a call that describe its layer."""
        return node.args[1 : 1 + self.arguments]

    def features(self, node: Node) -> int:
        """Return the number of features of a call's layer."""
        return int(self.layer(node)[-1])

    def constants(self, node: Node) -> list[Node]:
        """Return the nodes of a layer's tensors."""
        return [argument for argument in self.layer(node) if isinstance(argument, Node)]

    def form(self, node: Node) -> tuple[Any, ...]:
        """Return what has to be equal in layers that are merged: settings, and forms of all tensors but the bias."""
        return (self.settings(node), *map(_form, self.layer(node)[:-2]))

    @property
    def absent(self) -> tuple[Any, ...]:
        """The arguments of a layer that is not there."""
        return (*[None] * (self.arguments - 1), 0)


MERGEABLE = (Mergeable("linear", "linears", 3), Mergeable("quantized_linear", "quantized_linears", 6))


class MergeLinear(CustomGraphPass):
    """Replaces calls of a `Mergeable` operator on the same inputs by one call of the operator for several layers."""

    def __call__(self, graph: Graph) -> None:
        """Merge all such calls in a graph."""
        for kind in MERGEABLE:
            for nodes in list(_together(graph, kind)):
                _merge(graph, kind, nodes)

    def uuid(self) -> None:
        """Return None, so that torch stores no graph for other processes: its cache would hold the weights' values.

        `kept_graphs` stores graphs without weights.
        """
        return None


def _together(graph: Graph, kind: Mergeable) -> Iterator[list[Node]]:
    """Yield groups of two or three calls that can be merged into one, in their order."""
    if not hasattr(torch.ops.slipstream, kind.single):  # the kernel was not built
        return
    readers: dict[Any, list[Node]] = {}
    for node in graph.find_nodes(op="call_function", target=getattr(torch.ops.slipstream, kind.single).default):
        if all(constant.op in {"get_attr", "placeholder"} for constant in kind.constants(node)):
            readers.setdefault((node.args[0], kind.form(node)), []).append(node)
    for nodes in readers.values():
        runs = (nodes[start : start + MOST] for start in range(0, len(nodes), MOST))
        yield from (run for run in runs if len(run) > 1)


def _form(constant: Node | None) -> tuple[Any, ...] | None:
    """Return dtype and shape, but for the number of panels, of a tensor of a layer; None for one that is not there."""
    if constant is None:
        return None
    value = constant.meta["val"]
    return value.dtype, tuple(value.shape[1:])


def _merge(graph: Graph, kind: Mergeable, nodes: list[Node]) -> None:
    """Replace several calls by one, and their results by parts of its result."""
    inputs: Any = nodes[0].args[0]
    layers = [*map(kind.layer, nodes), *[kind.absent] * (MOST - len(nodes))]
    for constant in chain.from_iterable(map(kind.constants, nodes[1:])):
        if constant.op == "get_attr":
            nodes[0].prepend(constant)
    several = getattr(torch.ops.slipstream, kind.several).default
    with graph.inserting_before(nodes[0]):
        whole = graph.call_function(several, (inputs, *chain.from_iterable(layers), *kind.settings(nodes[0])))
        shape = inputs.meta["val"].shape
        whole.meta["val"] = inputs.meta["val"].new_empty((*shape[:-1], sum(map(kind.features, nodes))))
        start = 0
        for node in nodes:
            end = start + kind.features(node)
            part = graph.call_function(torch.ops.aten.slice.Tensor, (whole, len(shape) - 1, start, end))
            part.meta["val"] = whole.meta["val"][..., start:end]
            node.replace_all_uses_with(part)
            start = end
    for node in nodes:
        graph.erase_node(node)
