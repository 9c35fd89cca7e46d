"""Linear layers that read the same inputs become one call, where nothing but the number of calls changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from slipstream.kernel import fits_panels, into_panels, kernel_missing, panel_bytes, panel_linear
from slipstream.merging import MergeLinear
from slipstream.packing import Columns, PanelLinear, Stretch
from slipstream.tracing import Frozen

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

    def forward(self, given: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(given) * 2, self.right(given) * 3


def merged(function: Callable[[Tensor], Tensor], inputs: Tensor) -> tuple[GraphModule, int]:
    """The function as a graph after the pass, and how many linear layers are left in it."""
    graph = make_fx(function, tracing_mode="symbolic", _allow_non_fake_inputs=True)(inputs)
    MergeLinear()(graph.graph)
    graph.graph.lint()
    graph.recompile()
    return graph, len(graph.graph.find_nodes(op="call_function", target=torch.ops.slipstream.linear.default))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("features", [[64, 32, 32], [96, 40]])
def test_neighbours_become_one_with_the_same_bits(features: list[int], biased: bool, dtype: torch.dtype) -> None:
    """The last of them may end within a panel; and what was found is read as before, also by another layer."""
    layers = Layers([*features, WIDTH], biased, dtype)

    def function(given: Tensor) -> Tensor:
        parts = [layers(place, given) for place in range(len(features))]
        whole = torch.cat([part * (place + 1) for place, part in enumerate(parts)], -1)
        return torch.cat([whole, layers(len(features), whole[..., :WIDTH] + given)], -1)

    for rows in (1, 6, 17):
        given = torch.randn(2, rows, WIDTH, generator=torch.Generator().manual_seed(rows)).to(dtype)
        graph, left = merged(function, given)
        assert left == 2
        assert torch.equal(graph(given), function(given))
        more = torch.cat([given, given + 1])
        assert torch.equal(graph(more), function(more))  # sizes are symbols still


def test_the_weights_are_not_copied() -> None:
    layers = Layers([64, 32])
    graph, left = merged(lambda given: layers(0, given)[..., :32] + layers(1, given), torch.randn(1, 1, WIDTH))
    held = [tensor for name, tensor in graph.named_buffers() if "merged" in name]
    assert left == 1 and [tensor.data_ptr() for tensor in held] == [layers.weights[0].data_ptr()]
    assert held[0].shape[0] == 3  # panels


def test_what_is_not_beside_each_other_stays_apart() -> None:
    """Other inputs, a panel that is not full, another bias, or something between them."""
    layers, others = Layers([64, 40, 64]), Layers([64], biased=True)
    apart: list[Callable[[Tensor], Tensor]] = [
        lambda given: layers(0, given)[..., :40] + layers(1, given + 1),
        lambda given: layers(1, given) + layers(2, given)[..., :40],
        lambda given: layers(0, given) + layers(2, given),
        lambda given: layers(0, given) + others(0, given),
    ]
    given = torch.randn(1, 3, WIDTH)
    for function in apart:
        graph, left = merged(function, given)
        assert left == 2
        assert torch.equal(graph(given), function(given))


def test_only_neighbours_of_many_become_one() -> None:
    layers = Layers([32, 64, 32, 32])
    graph, left = merged(lambda given: torch.cat([layers(i, given) for i in (3, 0, 2)], -1), torch.randn(1, 2, WIDTH))
    assert left == 2
    given = torch.randn(1, 2, WIDTH)
    assert torch.equal(graph(given), torch.cat([layers(i, given) for i in (3, 0, 2)], -1))


def test_another_model_of_the_same_shape_has_its_own_weights() -> None:
    """Graphs that inductor kept would bring the merged weights of the model they were made for."""
    assert MergeLinear().uuid() is None
    given = torch.randn(1, 2, WIDTH)
    for seed in (0, 1):
        pair = Pair(seed)

        def function(given: Tensor, pair: Pair = pair) -> tuple[Tensor, Tensor]:
            return pair(given)

        torch.compiler.reset()  # as a new process: only what lies in files is known
        with torch.inference_mode():
            for found, right in zip(Frozen(function, ["given"])(given), pair(given), strict=True):
                torch.testing.assert_close(found, right)
