"""Quantized weights: what codes stand for, their layout, and products that are right and do not depend on company."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from slipstream.kernels import cpu as kernel
from slipstream.kernels.cpu import kernel_missing, quantized_linear, quantized_rows
from slipstream.kernels.packing import QuantizedLinear, packed, plain_weight, quantized, quantizing_fault
from slipstream.kernels.quantization import Codes, Precision, QuantizedPanels, quantize
from toys import FAMILIES, tiny
from toys.kernels import needs_kernel, noise

PRECISIONS = [Precision(8, 16), Precision(8, 64), Precision(4, 32), Precision(4, 128)]
every = pytest.mark.parametrize("precision", PRECISIONS, ids=str)
SHAPES = [(1, 32), (7, 10), (33, 64), (100, 288), (40, 1000)]
TYPES = [torch.float32, torch.bfloat16]


def with_zeros(codes: Codes) -> Codes:
    """The same codes, each group with a zero of its own."""
    most = 2 * codes.precision.middle
    zeros = torch.randint(0, most, codes.scales.shape, generator=torch.Generator().manual_seed(1))
    return replace(codes, zeros=zeros.to(torch.uint8))


def with_offsets(codes: Codes) -> Codes:
    """The same codes, each group with an offset; scales and offsets are float16."""
    return replace(codes, scales=codes.scales.half(), zeros=noise(*codes.scales.shape, dtype=torch.half, seed=1))


def as_they_are(codes: Codes) -> Codes:
    """The same codes, around the middle of their range."""
    return codes


zeros = pytest.mark.parametrize("shifted", [as_they_are, with_zeros, with_offsets])


def rounded(inputs: Tensor, group: int) -> Tensor:
    """Inputs (rows, n) as the kernel sees them: whole numbers of 8 bits with a scale for each group, in float64."""
    full = torch.nn.functional.pad(inputs.float(), (0, -inputs.shape[1] % group)).unflatten(1, (-1, group))
    greatest = full.abs().amax(2, keepdim=True)
    inverse = torch.full_like(greatest, 127) / greatest  # torch makes a product of 127 / greatest
    codes = (full.double() * torch.where(greatest == 0, 0, inverse)).round()
    return (codes * (greatest / 127).double()).flatten(1)


def best_of_scales(weight: Tensor, precision: Precision) -> tuple[Tensor, Tensor]:
    """Codes around zero and scales of the least squared error, by torch's operations."""
    groups = torch.nn.functional.pad(weight.float(), (0, -weight.shape[1] % precision.group))
    groups = groups.unflatten(1, (-1, precision.group))
    extreme = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    wide = [extreme.abs() / 127] if precision.bits == 8 else [extreme * cut / -8 for cut in (1.0, 0.94, 0.88, 0.82)]
    scales = torch.stack([each.bfloat16() for each in wide])
    inverse = torch.where(scales == 0, 0, 1 / scales.float())
    codes = (groups * inverse).round().clamp(-precision.middle, precision.middle - 1)
    least = (codes * scales.float() - groups).square().sum(3, keepdim=True).argmin(0, keepdim=True)
    best = codes.gather(0, least.expand(1, *codes.shape[1:]))[0]
    return best.flatten(1), scales.gather(0, least)[0, ..., 0]


@needs_kernel
@every
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("features", "inputs"), SHAPES)
def test_codes_are_those_that_torchs_operations_choose(
    precision: Precision, features: int, inputs: int, dtype: torch.dtype
) -> None:
    weight = noise(features, inputs, dtype=dtype)
    weight[0, :5] = 0.5 * weight.abs().max()  # halves, and equals
    weight[features // 2, precision.group :] = 0  # groups of zeros
    found, (codes, scales) = quantize(weight, precision), best_of_scales(weight, precision)
    assert torch.equal(found.scales, scales)
    assert torch.equal(found.codes.int() - precision.middle, codes.int())


@every
@zeros
def test_panels_hold_the_codes(precision: Precision, shifted: Callable[[Codes], Codes]) -> None:
    codes = shifted(quantize(noise(70, 100), precision))
    rows = quantized_rows(torch.arange(70), codes.into_panels(), precision.bits, 100)
    assert torch.equal(rows, codes.weight()[:, :100])
    some = torch.tensor([69, 3, 3])
    assert torch.equal(quantized_rows(some, codes.into_panels(), precision.bits, 100), rows[some])
    with pytest.raises(RuntimeError, match="no feature 96"):
        quantized_rows(torch.tensor([96]), codes.into_panels(), precision.bits, 100)


def test_precisions_are_named() -> None:
    assert Precision.named("int8") == Precision(8, 64) and Precision.named("int4", 128) == Precision(4, 128)
    assert str(Precision(4, 32)) == "int4" and str(Precision(4, 64)) == "int4?group=64"
    for name, group, said in (
        ("int3", None, "use int8 or int4"),
        ("int4", 0, "group=0"),
        ("int4", 48, "use 16, 32, 64"),
    ):
        with pytest.raises(ValueError, match=said):
            Precision.named(name, group)
    with pytest.raises(ValueError, match="3 bits"):
        Precision(3, 32)


@needs_kernel
@every
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("features", "inputs"), SHAPES)
@zeros
def test_products_are_those_of_float64(
    precision: Precision, dtype: torch.dtype, features: int, inputs: int, shifted: Callable[[Codes], Codes]
) -> None:
    """Of the rounded inputs and what the codes stand for, with a bias; rows that fill a tile, and more of them."""
    codes = shifted(quantize(noise(features, inputs), precision))
    bias = noise(features, dtype=dtype, seed=1)
    for rows in (1, 2, 5, 6, 7, 8, 13, 16, 40):
        activations = noise(rows, inputs, dtype=dtype, seed=rows)
        exact = rounded(activations, precision.group) @ codes.weight().double().T + bias.double()
        found = quantized_linear(activations[:, None], codes.into_panels(), bias, features, precision.bits)
        assert found.shape == (rows, 1, features) and found.dtype == dtype
        rtol = 2**-8 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(found[:, 0].double(), exact, rtol=rtol, atol=1e-3)


@needs_kernel
@every
@pytest.mark.parametrize("dtype", TYPES)
@zeros
def test_a_row_has_the_same_bits_whatever_stands_beside_it(
    precision: Precision, dtype: torch.dtype, shifted: Callable[[Codes], Codes]
) -> None:
    """Rows of 2,048 inputs would share two places in the first cache, so they lie apart."""
    panels = shifted(quantize(noise(100, 2048), precision)).into_panels()
    inputs = noise(50, 2048, dtype=dtype, seed=1)
    alone = torch.cat([quantized_linear(row[None], panels, None, 100, precision.bits) for row in inputs])
    for rows in (2, 5, 6, 7, 8, 9, 12, 13, 16, 17, 33, 50):
        assert torch.equal(quantized_linear(inputs[:rows], panels, None, 100, precision.bits), alone[:rows])


def in_blocks(bits: int, group: int, groups: int, offsets: bool) -> QuantizedPanels:
    """A weight of 100 features and 512 inputs in float16, of which `groups` share numbers that they multiply."""
    blocks, chance = 512 // group // groups, torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (4, 512 * bits // 32, 32, 4), generator=chance, dtype=torch.uint8)
    scales, zeros = torch.randn(2, 4, blocks, 32, generator=chance).half() / 100
    places = (4, blocks * groups, 2 if offsets else 1, 32)
    steps = torch.randint(-128, 128, places, generator=chance, dtype=torch.int8) if groups > 1 else None
    return QuantizedPanels(codes, scales, zeros if offsets else None, steps)


BLOCKS = pytest.mark.parametrize(
    ("bits", "group", "groups", "offsets"),
    [(4, 32, 1, False), (4, 32, 1, True), (8, 16, 16, False), (4, 16, 16, True), (8, 32, 8, True), (4, 256, 1, False)],
)


@needs_kernel
@BLOCKS
@pytest.mark.parametrize("dtype", TYPES)
def test_products_with_numbers_of_blocks_are_those_of_float64(
    bits: int, group: int, groups: int, offsets: bool, dtype: torch.dtype
) -> None:
    """With rounded inputs and with inputs as they are; and a row has the same bits whatever stands beside it."""
    panels = in_blocks(bits, group, groups, offsets)
    weight, inputs = quantized_rows(torch.arange(100), panels, bits, 512).double(), noise(19, 512, dtype=dtype)
    for whole, given in ((True, rounded(inputs, group)), (False, inputs.double())):
        found, exact = quantized_linear(inputs, panels, None, 100, bits, whole), given @ weight.T
        atol = float(exact.std()) * (2**-8 if dtype == torch.bfloat16 else 1e-5)
        torch.testing.assert_close(found.double(), exact, rtol=2**-8 if dtype == torch.bfloat16 else 1e-5, atol=atol)
        for row in (0, 7, 18):
            assert torch.equal(quantized_linear(inputs[row : row + 1], panels, None, 100, bits, whole)[0], found[row])


@needs_kernel
def test_control_a_step_of_another_group_is_seen() -> None:
    panels, inputs = in_blocks(8, 32, 8, True), noise(2, 512)
    assert panels.steps is not None
    other = QuantizedPanels(panels.codes, panels.scales, panels.zeros, panels.steps.roll(1, 1))
    found, wrong = (quantized_linear(inputs, each, None, 100, 8, whole=False) for each in (panels, other))
    assert float((found - wrong).std()) > 0.1 * float(found.std())


@needs_kernel
@every
def test_inputs_that_are_no_numbers_spoil_their_own_row_only(precision: Precision) -> None:
    inputs = noise(4, 256)
    inputs[1, 200], inputs[2, 3], inputs[3] = torch.nan, torch.inf, 0
    found = quantized_linear(inputs, quantize(noise(40, 256), precision).into_panels(), None, 40, precision.bits)
    assert bool(found[0].isfinite().all()) and bool(found[1:3].isnan().all()) and not found[3].count_nonzero()


@needs_kernel
def test_what_does_not_fit_is_refused() -> None:
    codes, scales, *_ = quantize(noise(40, 64), Precision(8, 32)).into_panels()
    zeros, half = None, scales.half()
    steps = torch.ones(2, 4, 1, 32, dtype=torch.int8)
    for inputs, parts, features, bits, said in (
        (torch.zeros(1, 20), (codes, scales, zeros), 40, 8, "inputs of 20 for groups of 32"),
        (torch.zeros(1, 65), (codes, scales, zeros), 40, 8, "inputs of 65"),
        (torch.zeros(1, 64), (codes, scales, zeros), 65, 8, "not packed for 65 features"),
        (torch.zeros(1, 64), (codes, scales, zeros), 40, 3, "codes of 3 bits"),
        (torch.zeros(1, 64), (codes, scales[:1], zeros), 40, 8, "the scales do not fit"),
        (torch.zeros(1, 64).double(), (codes, scales, zeros), 40, 8, "float32 or bfloat16"),
        (torch.zeros(1, 64), (codes, scales.float(), zeros), 40, 8, "the scales do not fit"),
        (torch.zeros(1, 64), (codes, scales, half), 40, 8, "the zeros do not fit"),
        (torch.zeros(1, 64), (codes, half, zeros, steps[:, :3]), 40, 8, "64 inputs in 3 groups"),
        (torch.zeros(1, 64), (codes, half, half, steps), 40, 8, "the steps do not fit"),
    ):
        with pytest.raises(RuntimeError, match=said):
            quantized_linear(inputs, QuantizedPanels(*parts), None, features, bits)


@needs_kernel
def test_control_a_scale_off_by_one_group_is_caught_by_the_kernels_own_check(
    forgotten: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = kernel.quantize

    class Shifted(Codes):
        def into_panels(self) -> QuantizedPanels:
            codes, scales, *others = super().into_panels()
            return QuantizedPanels(codes, scales.roll(1, 1), *others)

    def shifted(weight: Tensor, precision: Precision) -> Codes:
        right = real(weight, precision)
        return Shifted(right.precision, right.codes, right.scales)

    monkeypatch.setattr(kernel, "quantize", shifted)
    with pytest.warns(RuntimeWarning, match="computes something else"):
        assert kernel_missing()


@needs_kernel
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("packs", [False, True])
def test_a_quantized_twin_shares_all_but_its_linear_layers(family: str, packs: bool) -> None:
    model = tiny(FAMILIES[family])
    source = packed(model) if packs else model
    twin = quantized(source, Precision(8, 32))
    layers = {name: part for name, part in twin.named_modules() if isinstance(part, QuantizedLinear)}
    assert layers and not any(part.out_features >= 32 for part in twin.modules() if type(part) is nn.Linear)
    for name, layer in layers.items():
        want = plain_weight(source.get_submodule(name)).detach()
        assert float((layer.plain_weight() - want).abs().max()) <= 0.02 * float(want.abs().max())
    embedding = model.get_input_embeddings().weight
    assert twin.get_input_embeddings().weight.data_ptr() == embedding.data_ptr()
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    with torch.inference_mode():
        gap = (twin(tokens).logits - model(tokens).logits).std() / model(tokens).logits.std()
    assert 0 < float(gap) < 0.2


@needs_kernel
def test_what_cannot_be_quantized_says_why() -> None:
    model = tiny(FAMILIES["llama"])
    assert quantizing_fault(model) is None
    assert "float32 and bfloat16, not torch.float16" in str(quantizing_fault(model.half()))
