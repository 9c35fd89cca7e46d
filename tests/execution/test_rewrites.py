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
from slipstream.kernels.cpu import kernel_missing, panel_linear, quantized_linear
from slipstream.kernels.packing import Columns, PanelLinear, Stretch
from slipstream.kernels.panels import fits_panels, into_panels, panel_bytes
from slipstream.kernels.quantization import Codes, Precision, QuantizedPanels, quantize

pytestmark = pytest.mark.skipif(kernel_missing() is not None, reason=f"no kernel here: {kernel_missing()}")
WIDTH = 64
INT4 = Precision(4, 32)


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


class QuantizedLayers:
    """Quantized linear layers; each may have other groups, zeros and a bias."""

    def __init__(self, features: list[int], precision: Precision = INT4, dtype: torch.dtype = torch.float32) -> None:
        chance = torch.Generator().manual_seed(0)
        self.dtype, self.codes = dtype, list[Codes]()
        for count in features:
            self.codes.append(quantize(torch.randn(count, WIDTH, generator=chance), precision))
        self.biases: list[Tensor | None] = [torch.randn(count, generator=chance).to(dtype) for count in features]
        self.panels = [codes.into_panels() for codes in self.codes]

    def __call__(self, place: int, inputs: Tensor) -> Tensor:
        codes = self.codes[place]
        bits, features = codes.precision.bits, len(codes.scales)
        return quantized_linear(inputs, self.panels[place], self.biases[place], features, bits)


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
    names = ("linear", "linears", "quantized_linear", "quantized_linears")
    kinds = {name: getattr(torch.ops.slipstream, name).default for name in names}
    calls = {name: len(graph.graph.find_nodes(op="call_function", target=kind)) for name, kind in kinds.items()}
    return graph, {name: count for name, count in calls.items() if count}


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
    assert calls == {"linears": 1}
    assert torch.equal(graph(inputs), layers(0, inputs) + others(0, inputs))


def test_layers_over_other_inputs_stay_apart() -> None:
    layers = Layers([64, 40])
    inputs = torch.randn(1, 3, WIDTH)
    graph, calls = merged(lambda inputs: layers(0, inputs)[..., :40] + layers(1, inputs + 1), inputs)
    assert calls == {"linear": 2}
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("precision", [Precision(8, 64), INT4, Precision(4, 16), Precision(8, 16)], ids=str)
@pytest.mark.parametrize("features", [[64, 32], [40, 64, 33], [32, 64, 32, 96]])
def test_quantized_layers_become_one_with_the_same_bits(
    features: list[int], precision: Precision, dtype: torch.dtype
) -> None:
    layers = QuantizedLayers(features, precision, dtype)
    layers.biases[1] = None

    def function(inputs: Tensor) -> Tensor:
        return torch.cat([layers(place, inputs) * (place + 1) for place in range(len(features))], -1)

    for rows in (1, 6, 17):
        inputs = torch.randn(2, rows, WIDTH, generator=torch.Generator().manual_seed(rows)).to(dtype)
        graph, calls = merged(function, inputs)
        assert calls == ({"quantized_linears": 1} | ({"quantized_linear": 1} if len(features) > 3 else {}))
        assert torch.equal(graph(inputs), function(inputs))


@pytest.mark.parametrize("zeros", ["codes", "offsets"])
def test_quantized_layers_with_zeros_become_one(zeros: str) -> None:
    layers, chance = QuantizedLayers([64, 32]), torch.Generator().manual_seed(1)
    for place, (codes, scales, *_) in enumerate(layers.panels):
        whole = torch.randint(0, 16, scales.shape, generator=chance, dtype=torch.uint8)
        offsets = (scales.half(), (whole / 8 - 1).half())
        layers.panels[place] = QuantizedPanels(codes, *((scales, whole) if zeros == "codes" else offsets))
    inputs = torch.randn(1, 3, WIDTH, generator=chance)
    graph, calls = merged(lambda inputs: torch.cat([layers(0, inputs), layers(1, inputs)], -1), inputs)
    assert calls == {"quantized_linears": 1}
    assert torch.equal(graph(inputs), torch.cat([layers(0, inputs), layers(1, inputs)], -1))


@pytest.mark.parametrize("other", ["bits", "group", "zeros"])
def test_quantized_layers_of_other_forms_stay_apart(other: str) -> None:
    first = QuantizedLayers([64])
    second = QuantizedLayers([64], {"bits": Precision(8, 32), "group": Precision(4, 64), "zeros": INT4}[other])
    if other == "zeros":
        codes, scales, *_ = second.panels[0]
        second.panels[0] = QuantizedPanels(codes, scales, torch.full(scales.shape, 7, dtype=torch.uint8))
    inputs = torch.randn(1, 3, WIDTH)
    graph, calls = merged(lambda inputs: first(0, inputs) + second(0, inputs), inputs)
    assert calls == {"quantized_linear": 2}
    assert torch.equal(graph(inputs), first(0, inputs) + second(0, inputs))


def test_quantized_layers_that_do_not_fit_are_refused() -> None:
    first, second = QuantizedLayers([64]), QuantizedLayers([64], Precision(4, 64))
    layers = [(*each.panels[0], None, 64) for each in (first, second)]
    with pytest.raises(RuntimeError, match="different groups"):
        torch.ops.slipstream.quantized_linears(torch.randn(1, WIDTH), *layers[0], *layers[1], *[None] * 5, 0, 4)


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
