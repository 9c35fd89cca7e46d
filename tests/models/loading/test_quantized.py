"""Checkpoints in GPTQ, AWQ and compressed-tensors, packed here as specified, read from their own codes."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

import slipstream
from slipstream.execution.passes import Mode
from slipstream.kernels.packing import QuantizedLinear
from slipstream.kernels.quantization import Precision
from slipstream.models.loading.load import load_model, load_scorer
from slipstream.models.loading.quantized import PACKAGES
from toys import FAMILIES, tiny
from toys.kernels import needs_kernel

pytestmark = needs_kernel

TEXT = torch.tensor([[5, 17, 42, 8, 99, 3]])
NEAR = 0.001
"""Greatest difference of logits, in their standard deviations, beside a model whose inputs are rounded as the kernel's:
one that lies between two numbers of 8 bits may go either way."""


def words(codes: Tensor, bits: int) -> Tensor:
    """(rows, n) -> (rows, n * bits / 32): the lowest bits of a word first, by Python's own whole numbers."""
    step = 32 // bits
    full = torch.nn.functional.pad(codes.long(), (0, -codes.shape[1] % step))
    packed = [
        [
            sum(code << (bits * place) for place, code in enumerate(row[start : start + step]))
            for start in range(0, len(row), step)
        ]
        for row in full.tolist()
    ]
    numbers = torch.tensor(packed)
    return torch.where(numbers >= 1 << 31, numbers - (1 << 32), numbers).to(torch.int32)


@dataclass
class Layer:
    """A weight: codes (features, inputs), scales and zeros (features, groups), the group of every input."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    groups: Tensor
    bits: int

    @property
    def weight(self) -> Tensor:
        return (self.codes - self.zeros[:, self.groups]).float() * self.scales[:, self.groups]


@dataclass(frozen=True)
class Case:
    """A format: how it is spoken of in config.json, and how it stores a layer."""

    name: str
    settings: dict[str, Any]
    store: Callable[[Layer], dict[str, Tensor]]
    bits: int = 4
    group: int = 32
    symmetric: bool = False
    act_order: bool = False
    changes: dict[str, Any] = field(default_factory=dict)

    def layer(self, weight: Tensor, seed: int) -> Layer:
        """The weight in codes; scales are numbers of bfloat16, so that nothing is rounded again."""
        inputs, size = weight.shape[1], self.group if self.group > 0 else weight.shape[1]
        groups = torch.arange(inputs) // size
        if self.act_order:
            groups = groups[torch.randperm(inputs, generator=torch.Generator().manual_seed(seed))]
        parts = [weight[:, groups == each] for each in range(int(groups.max()) + 1)]
        most, middle = (1 << self.bits) - 1, 1 << (self.bits - 1)
        low, high = (torch.stack([find(part, 1) for part in parts], 1) for find in (torch.amin, torch.amax))
        if self.symmetric:
            scales = (torch.maximum(high, -low) / (middle - 1)).bfloat16().float()
            zeros = torch.full_like(scales, middle)
        else:
            scales = ((high - low) / most).bfloat16().float()
            zeros = (-low / scales).round().clamp(0, most)
        codes = (weight / scales[:, groups] + zeros[:, groups]).round().clamp(0, most)
        return Layer(codes.int(), scales, zeros.int(), groups.int(), self.bits)


def gptq(version: int) -> Callable[[Layer], dict[str, Tensor]]:
    def store(layer: Layer) -> dict[str, Tensor]:
        zeros = (layer.zeros - int(version == 1)) % (1 << layer.bits)
        return {
            "qweight": words(layer.codes, layer.bits).T,
            "qzeros": words(zeros.T, layer.bits),
            "scales": layer.scales.T,
            "g_idx": layer.groups,
        }

    return store


def awq(layer: Layer) -> dict[str, Tensor]:
    def interleaved(rows: Tensor) -> Tensor:
        return words(rows.unflatten(1, (-1, 8))[..., [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1), 4)

    return {"qweight": interleaved(layer.codes.T), "qzeros": interleaved(layer.zeros.T), "scales": layer.scales.T}


def compressed(zeros: bool, groups: bool = False) -> Callable[[Layer], dict[str, Tensor]]:
    def store(layer: Layer) -> dict[str, Tensor]:
        found = {
            "weight_packed": words(layer.codes, layer.bits),
            "weight_scale": layer.scales,
            "weight_shape": torch.tensor(layer.codes.shape),
        }
        if zeros:
            found["weight_zero_point"] = words(layer.zeros.T, layer.bits).T
        return found | ({"weight_g_idx": layer.groups} if groups else {})

    return store


def packs(bits: int, group: int | None) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "group_size": group, "strategy": "group" if group else "channel"}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}},
    }


GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
CASES = [
    Case("gptq", GPTQ, gptq(1)),
    Case("gptq-v2", {**GPTQ, "checkpoint_format": "gptq_v2"}, gptq(2)),
    Case("gptq-order", {**GPTQ, "desc_act": True}, gptq(1), act_order=True),
    Case("gptq-8", {**GPTQ, "bits": 8, "sym": True}, gptq(1), bits=8, symmetric=True),
    Case("gptq-channel", {**GPTQ, "group_size": -1}, gptq(1), group=-1),
    Case("gptq-96", {**GPTQ, "group_size": 96}, gptq(1), group=96),
    Case("awq", AWQ, awq),
    Case("compressed", packs(4, 32), compressed(False), symmetric=True),
    Case("compressed-zeros", packs(4, 64), compressed(True), group=64),
    Case("compressed-order", packs(4, 32), compressed(True, True), act_order=True),
    Case("compressed-channel-8", packs(8, None), compressed(False), bits=8, group=-1, symmetric=True),
]
every = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def plain() -> PreTrainedModel:
    """A random model whose layers have inputs that are no multiple of every group."""
    return tiny(FAMILIES["llama"], hidden_size=96, intermediate_size=160, max_position_embeddings=64)


def written(folder: Path, case: Case) -> PreTrainedModel:
    """Write a checkpoint in the format; the model with the weights that its codes stand for."""
    model = plain()
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for seed, name in enumerate(sorted(name for name in tensors if name.endswith("_proj.weight"))):
        layer = case.layer(tensors.pop(name), seed)
        model.get_parameter(name).data.copy_(layer.weight)
        stored = case.store(layer)
        tensors |= {name.removesuffix("weight") + part: each.contiguous() for part, each in stored.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    says(folder, **case.settings)
    return model


def says(folder: Path, **settings: Any) -> None:
    record = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**record, "quantization_config": settings}))


def rounded(inputs: Tensor, layer: QuantizedLinear) -> Tensor:
    """Inputs as the kernel sees them: whole numbers of 8 bits each group with a scale, in the order of the codes."""
    order = torch.arange(inputs.shape[-1]) if layer.order is None else layer.order
    group = layer.precision.group
    parts = torch.nn.functional.pad(inputs[..., order], (0, -len(order) % group)).unflatten(-1, (-1, group))
    scales = parts.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
    return ((parts / scales).round() * scales).flatten(-2)[..., : len(order)][..., order.argsort()]


@torch.inference_mode()
def gap(plainly: PreTrainedModel, loaded: Any) -> float:
    """How far the logits of a loaded checkpoint are from those of a plain model with inputs rounded alike."""
    layers = [(name, each) for name, each in loaded.named_modules() if isinstance(each, QuantizedLinear)]
    hooks = [
        plainly.get_submodule(name).register_forward_pre_hook(lambda _, args, layer=layer: (rounded(args[0], layer),))
        for name, layer in layers
    ]
    want, got = plainly(TEXT).logits, loaded(TEXT).logits
    for hook in hooks:
        hook.remove()
    return float((want - got).abs().max() / want.std())


@every
def test_a_checkpoint_says_what_its_codes_stand_for(case: Case, tmp_path: Path) -> None:
    want = written(tmp_path, case)
    got = load_model(tmp_path)
    layers = {name: each for name, each in got.named_modules() if isinstance(each, QuantizedLinear)}
    assert len(layers) == 14
    for name, layer in layers.items():
        assert torch.equal(layer.plain_weight(), want.get_submodule(name).weight), name  # by bits
    assert gap(want, got) < NEAR
    assert gap(plain(), got) > NEAR  # the weights before they were quantized
    numbers = load_model(tmp_path, dequantize=True)
    assert all(torch.equal(numbers.get_parameter(name), weight) for name, weight in want.named_parameters())


@every
def test_codes_that_are_read_wrongly_are_seen(case: Case, tmp_path: Path) -> None:
    """Controls: scales off by one group (or feature), zeros off by one."""
    want = written(tmp_path, case)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    rolled = {name: each.roll(1) for name, each in tensors.items() if "scale" in name}
    save_file(tensors | rolled, file, {"format": "pt"})
    assert gap(want, load_model(tmp_path)) > NEAR
    if zeros := {name: each + 1 for name, each in tensors.items() if name.endswith(("qzeros", "zero_point"))}:
        save_file(tensors | zeros, file, {"format": "pt"})
        assert gap(want, load_model(tmp_path)) > NEAR


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_plain_and_speculative_texts_of_it_are_equal(dtype: str, tmp_path: Path) -> None:
    written(tmp_path, CASES[2])
    prompts = [[5, 17, 42], [8, 99, 3, 4, 5, 6]]
    texts = [
        slipstream.load(tmp_path, draft, dtype=dtype).generate(prompts, max_new_tokens=12, temperature=0)
        for draft in (None, "int4", "lookup")
    ]
    first, *others = [[list(result.tokens) for result in results] for results in texts]
    assert others == [first, first] and len(first[0]) == 12


def test_half_precision_runs_in_bfloat16(tmp_path: Path) -> None:
    written(tmp_path, CASES[0])
    record = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**record, "dtype": "float16"}))
    assert load_model(tmp_path).dtype == torch.bfloat16
    assert load_model(tmp_path, "float32").dtype == torch.float32
    with pytest.raises(ValueError, match=r"compute in float32 or bfloat16 on a CPU, not in torch.float16\.$"):
        load_model(tmp_path, "float16")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({**GPTQ, "bits": 3}, r"have 3 bits, and only 4 or 8 can be read from its own codes; transformers .*gptqmodel"),
        ({**GPTQ, "checkpoint_format": "marlin"}, r"laid out as 'marlin', and only gptq or gptq_v2 can be read"),
        ({**GPTQ, "group_size": 64}, r"other shapes than its config\.json says"),
        ({**AWQ, "version": "gemv"}, r"laid out as 'gemv'"),
        ({**packs(4, 32), "format": "float-quantized"}, r"compressed as 'float-quantized'"),
        (packs(4, 32), r"none are stored"),
    ],
)
def test_what_is_not_read_is_refused_in_a_sentence(settings: dict[str, Any], reason: str, tmp_path: Path) -> None:
    written(tmp_path, CASES[0])
    says(tmp_path, **settings)
    with pytest.raises(ValueError, match=rf"^cannot load the model .*{reason}.*\.$"):
        load_model(tmp_path)


def test_what_is_not_read_here_is_left_to_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own words follow where it cannot read it either."""
    monkeypatch.setitem(PACKAGES, "gptq", {"torch": "torch"})
    written(tmp_path, CASES[0])
    says(tmp_path, **{**GPTQ, "bits": 3})
    with (
        pytest.warns(RuntimeWarning, match="is read by transformers, with torch: its weights have 3 bits"),
        pytest.raises(ValueError, match=r"cannot load the model .*GPTQ"),
    ):
        load_model(tmp_path)


def test_a_checkpoint_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    written(tmp_path, CASES[0])
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.scales"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj has no scales"):
        load_model(tmp_path)


def test_it_is_not_quantized_again(tmp_path: Path) -> None:
    written(tmp_path, CASES[0])
    with pytest.raises(ValueError, match="are quantized already: leave quantize=int4 out"):
        load_scorer(tmp_path, mode=Mode(precision=Precision(4, 32)))
