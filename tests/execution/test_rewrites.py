"""Linear layers that read the same inputs become one call, where nothing but the number of calls changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from slipstream.execution.graphs import Frozen
from slipstream.execution.rewrites import MergeLinear
from slipstream.kernels.cpu import kernel_missing, panel_linear
from slipstream.kernels.packing import Columns, PanelLinear, Stretch
from slipstream.kernels.panels import fits_panels, into_panels, panel_bytes

pytestmark = pytest.mark.skipif(kernel_missing() is not None, reason=f"no kernel here: {kernel_missing()}")
WIDTH = 64


class Layers:
    """Linear layers one behind the other in memory, of so many features each."""

    def __init__(self, features: list[int], biased: bool = False, dtype: torch.dtype = torch.float32) -> None:
        chance = torch.Generator().manual_seed(0)
        weights = [torch.randn(count, WIDTH, generator=chance).to(dtype) for count in features]
        assert all(map(fits_panels, weights))
        stretch = Stretch(sum(map(panel_bytes, weights)))
        self.features = features
        self.weights = [stretch.hold(into_panels(weight)) for weight in weights]
        self.biases = [torch.randn(count, generator=chance).to(dtype) if biased else None for count in features]

    def __call__(self, place: int, inputs: Tensor) -> Tensor:
        return panel_linear(inputs, self.weights[place], self.biases[place], self.features[place])


class Pair(nn.Module):
    """Two layers over the same inputs, as packed models have them."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        chance, stretch, columns = torch.Generator().manual_seed(seed), Stretch(1 << 20), Columns()
        weights = [torch.randn(count, WIDTH, generator=chance) for count in (64, 32)]
        self.left, self.right = (PanelLinear(weight, None, columns, stretch) for weight in weights)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(inputs) * 2, self.right(inputs) * 3


def merged(function: Callable[[Tensor], Tensor], inputs: Tensor) -> tuple[GraphModule, dict[str, int]]:
    """The function as a graph after the pass, and how many calls of each kind it has."""
    graph = make_fx(function, tracing_mode="symbolic", _allow_non_fake_inputs=True)(inputs)
    MergeLinear()(graph.graph)
    graph.graph.lint()
    graph.recompile()
    kinds = {"linear": torch.ops.slipstream.linear, "linears": torch.ops.slipstream.linears}
    return graph, {
        name: len(graph.graph.find_nodes(op="call_function", target=kind.default)) for name, kind in kinds.items()
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("features", [[64, 32], [40, 64, 32], [96, 5, 40]])
def test_layers_over_the_same_inputs_become_one_with_the_same_bits(
    features: list[int], biased: bool, dtype: torch.dtype
) -> None:
    """Each may end within a panel; and what was found is read as before, also by another layer."""
    layers = Layers([*features, WIDTH], biased, dtype)

    def function(inputs: Tensor) -> Tensor:
        parts = [layers(place, inputs) for place in range(len(features))]
        whole = torch.cat([part * (place + 1) for place, part in enumerate(parts)], -1)
        return torch.cat([whole, layers(len(features), whole[..., :WIDTH] + inputs)], -1)

    for rows in (1, 6, 17):
        inputs = torch.randn(2, rows, WIDTH, generator=torch.Generator().manual_seed(rows)).to(dtype)
        graph, calls = merged(function, inputs)
        assert calls == {"linear": 1, "linears": 1}
        assert torch.equal(graph(inputs), function(inputs))
        more = torch.cat([inputs, inputs + 1])
        assert torch.equal(graph(more), function(more))  # sizes are symbols still


def test_more_than_three_become_several() -> None:
    layers = Layers([32, 64, 32, 64, 32, 32, 64])
    inputs = torch.randn(1, 2, WIDTH)

    def function(inputs: Tensor) -> Tensor:
        return torch.cat([layers(place, inputs) for place in (3, 0, 2, 6, 1, 5, 4)], -1)

    graph, calls = merged(function, inputs)
    assert calls == {"linear": 1, "linears": 2}
    assert torch.equal(graph(inputs), function(inputs))


def test_some_with_a_bias_and_some_without_become_one() -> None:
    layers, others = Layers([64]), Layers([64], biased=True)
    inputs = torch.randn(1, 3, WIDTH)
    graph, calls = merged(lambda inputs: layers(0, inputs) + others(0, inputs), inputs)
    assert calls == {"linear": 0, "linears": 1}
    assert torch.equal(graph(inputs), layers(0, inputs) + others(0, inputs))


def test_layers_over_other_inputs_stay_apart() -> None:
    layers = Layers([64, 40])
    inputs = torch.randn(1, 3, WIDTH)
    graph, calls = merged(lambda inputs: layers(0, inputs)[..., :40] + layers(1, inputs + 1), inputs)
    assert calls == {"linear": 2, "linears": 0}
    assert torch.equal(graph(inputs), layers(0, inputs)[..., :40] + layers(1, inputs + 1))


@pytest.mark.parametrize("wrong", ["weight", "bias", "dtype", "features"])
def test_layers_that_do_not_fit_are_refused(wrong: str) -> None:
    """Every layer of a product is looked at, not the first alone."""
    layers = Layers([64, 32], biased=True)
    (first, second), (bias, other) = layers.weights, layers.biases
    arguments = {
        "weight": (first, bias, 64, second[:, 1:], other, 32),
        "bias": (first, bias, 64, second, bias, 32),
        "dtype": (first, bias, 64, second.bfloat16(), other, 32),
        "features": (first, bias, 64, second, None, 65),
    }
    with pytest.raises(RuntimeError, match="slipstream::linear"):
        torch.ops.slipstream.linears(torch.randn(1, WIDTH), *arguments[wrong], None, None, 0)


@pytest.mark.slow
def test_another_model_of_the_same_shape_has_its_own_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever inductor keeps in files must not bring the first one's weights; and merged graphs are not kept."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    inputs = torch.randn(1, 2, WIDTH)
    for seed in (0, 1):
        pair = Pair(seed)

        def function(inputs: Tensor, pair: Pair = pair) -> tuple[Tensor, Tensor]:
            return pair(inputs)

        torch.compiler.reset()  # as a new process: only what lies in files is known
        torch._dynamo.utils.counters.clear()
        with torch.inference_mode():
            for found, right in zip(Frozen(function, ["inputs"])(inputs), pair(inputs), strict=True):
                torch.testing.assert_close(found, right)
    assert torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"] == 0
