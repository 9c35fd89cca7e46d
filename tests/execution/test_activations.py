"""GELU by tanh is computed by a sigmoid in graphs: the same values, and nothing else is touched."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from transformers.activations import NewGELUActivation

from slipstream.execution.graphs import Frozen, vary
from slipstream.execution.rewrites import TanhBySigmoid

aten = torch.ops.aten
WIDE = torch.linspace(-20, 20, 8 * 321).view(8, 321)


def after(function: Callable[[Tensor], Tensor], inputs: Tensor) -> tuple[Callable[[Tensor], Tensor], dict[str, int]]:
    """The function as a graph after the pass, and how many steps of each kind it has."""
    decomposed = torch._decomp.get_decompositions([aten.gelu])
    graph = make_fx(function, decomposition_table=decomposed, tracing_mode="symbolic")(inputs)
    TanhBySigmoid()(graph.graph)
    graph.graph.lint()
    graph.recompile()
    kinds = {"tanh": aten.tanh.default, "sigmoid": aten.sigmoid.default}
    return graph, {name: len(graph.graph.find_nodes(op="call_function", target=kind)) for name, kind in kinds.items()}


def tanh_gelu(inputs: Tensor) -> Tensor:
    return functional.gelu(inputs, approximate="tanh")


@pytest.mark.parametrize("gelu", [NewGELUActivation(), tanh_gelu], ids=["gelu_new", "gelu_pytorch_tanh"])
def test_gelu_has_a_sigmoid_and_the_same_values(gelu: Callable[[Tensor], Tensor]) -> None:
    """As near to GELU in double precision as a few roundings let be, also far out, where tanh itself is 1 or -1."""
    graph, steps = after(gelu, WIDE)
    assert steps == {"tanh": 0, "sigmoid": 1}
    assert torch.allclose(graph(WIDE).double(), gelu(WIDE.double()), rtol=1e-6, atol=1e-6)
    assert (graph(WIDE) - WIDE.relu()).abs().max() > 0.1, "it is no relu, so that the comparison can fail"


@pytest.mark.slow
def test_what_is_no_one_plus_tanh_stays() -> None:
    """Another addend, a multiple of it, soft caps of logits, whole numbers, and a tanh that others read."""
    for other in (
        lambda x: 2 + x.tanh(),
        lambda x: torch.add(x.tanh(), 1, alpha=2),
        lambda x: 30 * (x / 30).tanh(),
        lambda x: x.tanh() + x,
    ):
        graph, steps = after(other, WIDE)
        assert steps == {"tanh": 1, "sigmoid": 0}
        assert torch.equal(graph(WIDE), other(WIDE))

    whole = torch.arange(-3, 4)
    graph, steps = after(lambda x: x.tanh() + 1, whole)
    assert steps == {"tanh": 1, "sigmoid": 0} and torch.equal(graph(whole), whole.tanh() + 1)

    def both(x: Tensor) -> Tensor:
        tanh = x.tanh()
        return tanh * (1 + tanh)

    graph, steps = after(both, WIDE)
    assert steps == {"tanh": 1, "sigmoid": 1}
    assert torch.allclose(graph(WIDE), both(WIDE), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_graphs_have_it(dtype: torch.dtype) -> None:
    """Inductor runs the pass, and every row has the same bits beside others as alone."""
    gelu, width = NewGELUActivation(), 320

    def function(inputs: Tensor) -> Tensor:
        return gelu(inputs)

    frozen = Frozen(function, ("inputs",))
    with torch.inference_mode():
        inputs = torch.randn(6, width, generator=torch.Generator().manual_seed(0)).to(dtype)
        vary([(inputs, {0: "rows"})])
        found = frozen(inputs)
        loose = torch.finfo(dtype).eps  # a rounding at the end, and none on the way
        assert torch.allclose(found.double(), gelu(inputs.double()), rtol=loose, atol=loose)
        assert dtype == torch.bfloat16 or not torch.equal(found, gelu(inputs)), "the pass did not run"
        for rows in (2, 3):
            assert torch.equal(frozen(inputs[:rows].clone()), found[:rows])
