"""Rounding for what layers are given: less error in what they give, in the codes that the kernel reads, which are kept
for other processes."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import slipstream
from slipstream.kernels.packing import QuantizedLinear, packed, quantized
from slipstream.kernels.quantization import Codes, Precision, quantize
from slipstream.models.loading import kept_codes
from slipstream.models.loading.kept_codes import input_products, own_text, quantize_for, spreading
from slipstream.models.loading.twins import quantized_twin, with_kept_tokens
from slipstream.models.tiny import tiny_config, tiny_model
from toys import FAMILIES, tiny
from toys.kernels import needs_kernel

GPTQ = Precision(4, 32, "gptq")


def correlated(tokens: int, inputs: int, seed: int = 0) -> Tensor:
    """Inputs (tokens, inputs) of a few directions and some noise, as those of layers are."""
    generator = torch.Generator().manual_seed(seed)
    few = torch.randn(tokens, inputs // 8, generator=generator) @ torch.randn(inputs // 8, inputs, generator=generator)
    return few + 0.1 * torch.randn(tokens, inputs, generator=generator)


def error(weight: Tensor, codes: Codes, inputs: Tensor) -> float:
    """The squared error of what a layer gives for inputs."""
    return float((inputs @ (weight - codes.weight()[:, : weight.shape[1]]).T).square().sum())


@pytest.mark.parametrize("inputs", [128, 100], ids=["whole groups", "a group that is filled up"])
@pytest.mark.parametrize("bits", [4, 8])
def test_outputs_are_nearer_than_those_of_the_nearest_codes(bits: int, inputs: int) -> None:
    """On inputs that were not looked at too. The control: inputs that do not go together have nothing to take back."""
    precision = Precision(bits, 32, "gptq")
    weight = torch.randn(48, inputs, generator=torch.Generator().manual_seed(1))
    seen, unseen = correlated(512, inputs).split(256)
    found = quantize_for(weight, precision, spreading(seen.T @ seen))
    assert int(found.codes.max()) < 1 << bits and found.scales.dtype == torch.bfloat16
    for samples in (seen, unseen):
        assert error(weight, found, samples) < 0.5 * error(weight, quantize(weight, precision), samples)
    apart = quantize_for(weight, precision, spreading(torch.eye(inputs)))
    assert torch.equal(apart.weight(), quantize(weight, precision).weight())


def test_inputs_that_were_never_seen_are_rounded_to_the_nearest() -> None:
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(1))
    found = quantize_for(weight, GPTQ, spreading(torch.zeros(64, 64)))
    assert torch.equal(found.weight(), quantize(weight, GPTQ).weight())


@pytest.mark.parametrize(
    ("text", "precision"),
    [
        ("int8", Precision(8, 64)),
        ("int4?group=64", Precision(4, 64)),
        ("int4?rounding=gptq", GPTQ),
        ("int4?group=128&rounding=gptq", Precision(4, 128, "gptq")),
    ],
)
def test_precisions_are_read_as_they_are_written(text: str, precision: Precision) -> None:
    assert Precision.read(text) == precision and str(precision) == text


@pytest.mark.parametrize("text", ["int4?", "int4?group", "int4?group=x", "int4?size=3", "int4?group=32&", "", True])
def test_what_is_no_precision_is_refused_in_a_sentence(text: Any) -> None:
    with pytest.raises(ValueError, match=r"is no precision of weights: .*\.$"):
        Precision.read(text)
    with pytest.raises(ValueError, match="use nearest or gptq"):
        Precision.read("int4?rounding=up")


def test_a_model_writes_the_text_that_it_reads() -> None:
    model = tiny(FAMILIES["llama"])
    text = own_text(model, rows=5, length=9)
    assert text.shape == (5, 9) and torch.equal(text, own_text(model, rows=5, length=9))
    reader = tiny_model(transformers.T5ForConditionalGeneration, tiny_config(transformers.T5Config))
    with pytest.raises(ValueError, match="reads sources, so its rounding cannot be calibrated"):
        own_text(reader)


@torch.inference_mode()
def test_products_are_those_of_what_layers_are_given() -> None:
    """Queries and keys are given the same; a packed layer's are those of the layer that it stands for."""
    model, text = tiny(FAMILIES["llama"]), torch.arange(30).view(5, 6)
    names = [f"model.layers.0.self_attn.{name}_proj" for name in ("q", "k")]
    hidden = model.model.layers[0].input_layernorm(model.get_input_embeddings()(text)).flatten(0, 1)
    for each in (model, packed(model)):
        found = input_products(each, names, text)
        assert found[names[0]] is found[names[1]]
        torch.testing.assert_close(found[names[0]], hidden.T @ hidden, rtol=1e-4, atol=1e-4)


@needs_kernel
def test_a_quantized_model_is_nearer_to_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer by layer, also where the products do not fit in memory at once; every layer of 32 features has
    its codes."""
    monkeypatch.setattr(kept_codes, "MOST_BYTES", 5000)
    model: Any = tiny(FAMILIES["llama"])
    twin, nearest = quantized_twin(model, "toy", GPTQ), quantized(model, Precision(4, 32))
    text = torch.arange(96).view(8, 12)
    with torch.inference_mode():
        want, *found = (each(text).logits for each in (model, twin, nearest))
    gaps = [float((each - want).square().mean()) for each in found]
    assert gaps[0] < gaps[1]
    layers = [each for each in twin.modules() if isinstance(each, QuantizedLinear)]
    assert len(layers) == 11 and {each.precision for each in layers} == {GPTQ}


@needs_kernel
def test_drafts_and_targets_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_codes, "MOST_BYTES", 1 << 20)
    model = tiny(FAMILIES["llama"])
    engine = slipstream.load(model, "int4?group=64&rounding=gptq", quantize="int8?rounding=gptq")
    fast, slow = (engine.generate([[5, 6]], max_new_tokens=8, temperature=0, plain=each) for each in (False, True))
    assert fast[0].tokens == slow[0].tokens and fast[0].stats.accepted


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for codes that is not there yet; they are chosen by a short text."""
    monkeypatch.setenv(kept_codes.PLACE, str(tmp_path / "codes"))
    monkeypatch.setattr(kept_codes, "own_text", partial(own_text, rows=4, length=12))
    return tmp_path / "codes"


def twin_of(model: Any, precision: Precision = GPTQ) -> tuple[list[QuantizedLinear], bool]:
    """The layers of a model's quantized twin, and whether their codes were chosen now, as the user is told."""
    said = list[str]()
    twin = quantized_twin(model, "toy", precision, progress=said.append)
    assert len(said) == 1 and f"the codes of toy in {precision}" in said[0]
    return [each for each in twin.modules() if isinstance(each, QuantizedLinear)], said[0].startswith("choosing")


def same(these: list[QuantizedLinear], others: list[QuantizedLinear]) -> bool:
    """Whether codes and scales are equal by bits."""
    return all(
        torch.equal(a.codes, b.codes) and torch.equal(a.scales, b.scales) for a, b in zip(these, others, strict=True)
    )


@needs_kernel
@pytest.mark.parametrize("precision", [GPTQ, Precision(8, 64, "gptq")], ids=str)
def test_codes_are_chosen_once(precision: Precision, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time no text is written, and the codes have the same bits, as they have where none are kept."""
    first, chosen = twin_of(tiny(FAMILIES["llama"]), precision)
    (file,) = place.iterdir()
    assert chosen and file.suffix == ".codes"
    with monkeypatch.context() as without_text:
        without_text.delattr(kept_codes, "own_text")
        again, chosen = twin_of(tiny(FAMILIES["llama"]), precision)
    assert not chosen and same(first, again) and list(place.iterdir()) == [file]
    monkeypatch.setenv(kept_codes.PLACE, "off")
    alone, chosen = twin_of(tiny(FAMILIES["llama"]), precision)
    assert chosen and same(first, alone)


@needs_kernel
def test_what_codes_depend_on_has_codes_of_its_own(place: Path) -> None:
    """Another weight, precision, setting of the model, or part of its head; a use of the model changes nothing."""
    model: Any = tiny(FAMILIES["llama"])
    assert twin_of(model)[1]
    model(torch.tensor([[5, 6]]))
    assert not twin_of(model)[1]
    assert twin_of(model, Precision(4, 64, "gptq"))[1]
    assert twin_of(with_kept_tokens(model, "toy", torch.arange(40)))[1]
    other: Any = tiny(FAMILIES["llama"], rms_norm_eps=1e-3)
    assert twin_of(other)[1]
    model.model.norm.weight.data[7] += 1e-3
    assert twin_of(model)[1] and len(list(place.iterdir())) == 5


def cut_short(file: Path, other: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def one_bit(file: Path, other: Path) -> None:
    found = bytearray(file.read_bytes())
    found[-1] ^= 1
    file.write_bytes(found)


def no_tensors(file: Path, other: Path) -> None:
    file.write_text("codes")


def of_other_weights(file: Path, other: Path) -> None:
    shutil.copy(other, file)


@needs_kernel
@pytest.mark.parametrize("spoil", [cut_short, one_bit, no_tensors, of_other_weights])
def test_a_file_that_is_no_use_is_made_anew(spoil: Any, place: Path) -> None:
    model, other = tiny(FAMILIES["llama"]), tiny(FAMILIES["llama"], 1)
    twin_of(other)
    (others,) = place.iterdir()
    first, _ = twin_of(model)
    (file,) = set(place.iterdir()) - {others}
    spoil(file, others)
    with pytest.warns(RuntimeWarning, match=r"the codes are chosen again\.$"):
        again, chosen = twin_of(model)
    assert chosen and same(first, again)
    kept, chosen = twin_of(model)
    assert not chosen and same(first, kept)


@needs_kernel
def test_a_write_that_is_interrupted_leaves_nothing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As while codes are chosen; then all is as if it had not been tried."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    for name in ("os.fsync", "slipstream.models.loading.kept_codes.save_tensors"):
        with monkeypatch.context() as stopped, pytest.raises(KeyboardInterrupt):
            stopped.setattr(name, interrupted)
            twin_of(tiny(FAMILIES["llama"]))
        assert list(place.iterdir()) == []
    assert twin_of(tiny(FAMILIES["llama"]))[1] and not twin_of(tiny(FAMILIES["llama"]))[1]


@needs_kernel
def test_a_folder_that_cannot_be_written_is_no_error(place: Path) -> None:
    place.write_text("a file where the folder would be")
    first, chosen = twin_of(tiny(FAMILIES["llama"]))
    again, chosen_again = twin_of(tiny(FAMILIES["llama"]))
    assert chosen and chosen_again and same(first, again) and place.is_file()


@needs_kernel
def test_the_codes_used_last_stay(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_codes, "MOST_FILES", 2)
    models = [tiny(FAMILIES["llama"], seed) for seed in range(3)]
    chosen = [twin_of(models[index])[1] for index in (0, 1, 0, 2, 0, 1)]
    assert chosen == [True, True, False, True, False, True]
    assert len(list(place.iterdir())) == 2
