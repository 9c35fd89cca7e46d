"""Activations that graphs compute in fewer steps: a pass of inductor over the graphs that it compiles.

GELU by tanh (T5 v1.1, GPT-2, Gemma) takes as long as a tenth of the products around it, and of that tanh the most.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, Node

aten = torch.ops.aten


class TanhBySigmoid(CustomGraphPass):
    """1 + tanh(x) becomes 2 sigmoid(2 x), which is the same and has one exponential instead of a long polynomial."""

    def __call__(self, graph: Graph) -> None:
        """Change the graph."""
        for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
            if (x := _under_tanh(node)) is not None:
                _replace(graph, node, x)
        graph.eliminate_dead_code()

    def uuid(self) -> None:
        """No graph is kept for other processes, as in `merging`."""
        return None


def _under_tanh(node: Node) -> Node | None:
    """x, if the node is 1 + tanh(x) in floating point; the tanh may have other readers."""
    tanh: Any = node.args[0]
    if node.kwargs or node.args[1] != 1 or not isinstance(tanh, Node) or tanh.target != aten.tanh.default:
        return None
    x: Any = tanh.args[0]
    return x if x.meta["val"].is_floating_point() else None  # of whole numbers 2 x would be another type


def _replace(graph: Graph, node: Node, x: Node) -> None:
    value = node.meta["val"]
    with graph.inserting_before(node):
        for function, *factor in ((aten.mul.Tensor, 2), (aten.sigmoid.default,), (aten.mul.Tensor, 2)):
            x = graph.call_function(function, (x, *factor))
            x.meta["val"] = value
    node.replace_all_uses_with(x)
    graph.erase_node(node)
