"""Linear layers that read the same inputs, as one: a pass of inductor over the graphs that it compiles.

Queries, keys and values, or the gate beside what it lets through: for a few tokens, most of what a small layer costs is
to begin it on all threads. Packed weights lie one behind the other in the order of their use (`packing.Stretch`), so
that several of them are one weight without any copy; and every feature is summed as before, so that no bit changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, Node

from slipstream.kernel import PANEL


class MergeLinear(CustomGraphPass):
    """Calls of `slipstream::linear` on the same inputs become one, where their weights are neighbours in memory."""

    def __call__(self, graph: Graph) -> None:
        """Change the graph."""
        for nodes in list(_neighbours(graph)):
            _merge(graph, nodes)

    def uuid(self) -> None:
        """No graph is kept for other processes: one with merged weights would bring those of the model it was made for,
        also to another model of the same shape. (The machine code is kept.)"""
        return None


def _neighbours(graph: Graph) -> Iterator[list[Node]]:
    """Calls that can be one, two or more at a time, in the order of their weights."""
    if not hasattr(torch.ops.slipstream, "linear"):  # the kernel was not built
        return
    calls = graph.find_nodes(op="call_function", target=torch.ops.slipstream.linear.default)
    together: dict[tuple[Any, bool], list[Node]] = {}
    for node in calls:
        inputs, weight, bias, _ = node.args
        if isinstance(weight, Node) and weight.op == "get_attr":
            together.setdefault((inputs, bias is None), []).append(node)
    for nodes in together.values():
        runs: list[list[Node]] = []
        for node in sorted(nodes, key=lambda node: _constant(node, 1).data_ptr()):
            if runs and _beside(runs[-1][-1], node):
                runs[-1].append(node)
            else:
                runs.append([node])
        yield from (run for run in runs if len(run) > 1)


def _beside(left: Node, right: Node) -> bool:
    """Whether the second weight begins where the first ends, without a panel that is filled up between them."""
    one, other = _constant(left, 1), _constant(right, 1)
    same = one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() and one.shape[1:] == other.shape[1:]
    return same and one.data_ptr() + one.nbytes == other.data_ptr() and _features(left) % PANEL == 0


def _merge(graph: Graph, nodes: list[Node]) -> None:
    """One call in place of several, and parts of what it returns in place of what they returned."""
    first = min(nodes)
    inputs, bias = first.args[0], first.args[2]
    weights = [_constant(node, 1) for node in nodes]
    whole = weights[0].as_strided((sum(map(len, weights)), *weights[0].shape[1:]), weights[0].stride())
    with graph.inserting_before(first):
        weight = _held(graph, whole)
        added = None if bias is None else _held(graph, torch.cat([_constant(node, 2) for node in nodes]))
        found = _call(graph, torch.ops.slipstream.linear.default, inputs, weight, added, sum(map(_features, nodes)))
        start = 0
        for node in nodes:
            end = start + _features(node)
            part = _call(graph, torch.ops.aten.slice.Tensor, found, found.meta["val"].dim() - 1, start, end)
            node.replace_all_uses_with(part)
            start = end
    for node in nodes:  # the place to insert at was before one of them
        constants = [given for given in node.args[1:3] if isinstance(given, Node)]
        graph.erase_node(node)
        for constant in constants:
            if not constant.users:
                graph.erase_node(constant)


def _call(graph: Graph, target: Any, *given: Any) -> Node:
    """A call in the graph that knows what it returns."""
    node = graph.call_function(target, given)
    values = [one.meta["val"] if isinstance(one, Node) else one for one in given]
    mode = values[0].fake_mode
    values = [mode.from_tensor(one) if type(one) is Tensor else one for one in values]
    node.meta["val"] = target(*values)
    return node


def _held(graph: Graph, tensor: Tensor) -> Node:
    """A constant of the graph."""
    module: Any = graph.owning_module
    name = f"_merged_{sum(1 for known in module._buffers if known.startswith('_merged_'))}"
    module.register_buffer(name, tensor, persistent=False)
    node = graph.get_attr(name)
    node.meta["val"] = tensor
    return node


def _constant(node: Node, place: int) -> Tensor:
    """The tensor that a call is given there."""
    given: Any = node.args[place]
    return getattr(node.graph.owning_module, given.target)


def _features(node: Node) -> int:
    features: Any = node.args[3]
    return int(features)
