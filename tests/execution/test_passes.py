"""Packed weights and passes compiled for CPUs: the same logits, the user's model untouched, eager where need be."""

import copy
from typing import Any

import pytest
import torch

from scripted import drive, grow_and_branch, run_before_others
from slipstream import load
from slipstream.execution import instructions
from slipstream.execution.backends import Native
from slipstream.execution.instructions import number_words
from slipstream.execution.passes import Mode, compare
from slipstream.kernels.packing import PackedLinear, can_pack, packed, quantized
from slipstream.kernels.quantization import Precision
from slipstream.models.causal import CausalScorer
from slipstream.models.loading.load import load_scorer
from toys import FAMILIES, tiny

packs = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="oneDNN is not part of this torch")
NAMES = [name for name in FAMILIES if name != "gpt_neox_alibi"]


@packs
@pytest.mark.parametrize("name", NAMES)
def test_a_packed_twin_gives_the_same_logits_and_leaves_the_model_alone(name: str) -> None:
    model = tiny(FAMILIES[name])
    before, modules = copy.deepcopy(model.state_dict()), {path: type(part) for path, part in model.named_modules()}
    twin = packed(model)
    assert any(isinstance(part, PackedLinear) for part in twin.modules())
    tokens = torch.arange(12).view(2, 6)
    with torch.inference_mode():
        torch.testing.assert_close(twin(tokens).logits, model(tokens).logits, atol=1e-5, rtol=1e-4)
    assert {path: type(part) for path, part in model.named_modules()} == modules
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    shared = {parameter.data_ptr() for parameter in model.parameters()}
    assert {parameter.data_ptr() for parameter in twin.parameters()} <= shared


@packs
def test_models_loaded_by_name_are_packed_and_loaded_models_are_not(tmp_path: Any) -> None:
    model = tiny(FAMILIES["llama"])
    model.save_pretrained(tmp_path)

    def has_packed(scorer: CausalScorer) -> bool:
        return any(isinstance(part, PackedLinear) for part in scorer.model.modules())

    assert has_packed(load_scorer(tmp_path, device="cpu"))
    assert not has_packed(load_scorer(tmp_path, device="cpu", mode=Mode(packed=False)))
    assert not has_packed(load_scorer(model))
    assert has_packed(load_scorer(model, mode=Mode(packed=True)))
    assert has_packed(load_scorer(tmp_path, device="cpu", mode=Mode(compiled=True)))


def test_what_cannot_be_packed_is_refused_in_a_sentence() -> None:
    model = tiny(FAMILIES["llama"]).double()
    assert not can_pack(model)
    with pytest.raises(ValueError, match=r"cannot be packed on cpu in torch\.float64"):
        packed(model)


@packs
@pytest.mark.parametrize("name", NAMES)
def test_programs_give_the_eager_logits(name: str) -> None:
    """In every shape that decoding meets: several rows and tokens, trees, and rows that lie behind those that run."""
    model = packed(tiny(FAMILIES[name]))
    eager, fast = CausalScorer(model), CausalScorer(model, execution=Native(model, "toy"))
    for rows in (1, 3, 2):
        for left, right in zip(drive(eager, rows), drive(fast, rows), strict=True):
            torch.testing.assert_close(left, right, atol=1e-4, rtol=1e-3)
    grow_and_branch(eager, fast)
    run_before_others(eager, fast)
    assert isinstance(fast.execution, Native) and fast.execution.fault is None


@packs
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3", "gemma3"])
@pytest.mark.parametrize("precision", [None, "int8", "int4"])
def test_programs_in_bfloat16_give_the_eager_bits(name: str, precision: str | None) -> None:
    """What a program computes it rounds where the model does."""
    model = tiny(FAMILIES[name]).bfloat16()
    model = quantized(model, Precision.named(precision)) if precision else packed(model)
    eager, fast = CausalScorer(model), CausalScorer(model, execution=Native(model, "toy"))
    for left, right in zip(drive(eager, 3), drive(fast, 3), strict=True):
        torch.testing.assert_close(left, right, atol=0.1, rtol=0.05)
        assert name == "gpt2" or torch.equal(left, right)  # torch's norm over a layer adds in another order


@packs
def test_tokens_have_the_same_bits_however_they_are_divided_into_passes() -> None:
    model = packed(tiny(FAMILIES["llama"]))
    scorer = CausalScorer(model, execution=Native(model, "toy"))
    text = [3 + 7 * place % 90 for place in range(24)]
    scorer.add(3)
    scorer.prefill([text[:16], text[:20], text[:23]])
    found = [scorer.extend(torch.tensor([text[16:20]] * 3), [4, 0, 0])[0, -1]]
    found += [scorer.extend(torch.tensor([[each, 1, 2]] * 3), [1, 0, 0])[0, 0] for each in text[20:]]
    scorer.free([0])
    scorer.rollback([19, 22])
    other = scorer.extend(torch.tensor([text[19:23], text[22:23] * 4]), [4, 1])
    assert torch.equal(found[0], other[0, 0])
    assert torch.equal(found[3], other[0, 3]) and torch.equal(found[3], other[1, 0])


def test_a_model_that_reads_its_own_numbers_runs_eagerly() -> None:
    model = tiny(FAMILIES["llama"])
    model.lm_head.register_forward_hook(lambda _, args, scores: scores * scores.sum().sign().item())
    fast = CausalScorer(model, execution=Native(model, "toy"))
    for left, right in zip(drive(CausalScorer(model), 2), drive(fast, 2), strict=True):
        torch.testing.assert_close(left, right)
    assert isinstance(fast.execution, Native)
    assert fast.execution.fault == "toy runs without a program: what it does depends on the contents of tensors"


@packs
@pytest.mark.parametrize(("right", "wrong"), [("silu", "sigmoid"), ("mul", "add"), ("mean", "sum"), ("attend", None)])
def test_control_a_program_with_a_wrong_instruction_is_not_used(
    monkeypatch: pytest.MonkeyPatch, right: str, wrong: str | None
) -> None:
    model = packed(tiny(FAMILIES["llama"]))
    if wrong:
        monkeypatch.setitem(instructions.CODE, right, instructions.CODE[wrong])
    else:  # attention scaled by another number
        monkeypatch.setattr(instructions, "number_words", lambda numbers: number_words([2 * each for each in numbers]))
    fast = CausalScorer(model, execution=Native(model, "toy"))
    for left, found in zip(drive(CausalScorer(model), 1), drive(fast, 1), strict=True):
        torch.testing.assert_close(left, found)
    assert isinstance(fast.execution, Native) and "gives other logits" in str(fast.execution.fault)


def test_inputs_of_8_bits_explain_twice_what_their_rounding_moves() -> None:
    """And no more, nor what is beyond half precision."""
    eager = torch.randn(1, 3, 50, generator=torch.Generator().manual_seed(0))
    compare(eager, eager + 0.05, unrounded=eager - 0.03)
    for moved, unrounded in ((0.05, None), (0.05, eager - 0.02), (4.0, eager - 3.0)):
        with pytest.raises(ValueError, match="gives other logits"):
            compare(eager, eager + moved, unrounded=unrounded)


def test_load_refuses_to_compile_a_fixed_shape() -> None:
    with pytest.raises(ValueError, match="without compile=True"):
        load(exact_shape=True, compile=True)
    engine = load(tiny(FAMILIES["llama"]), tiny(FAMILIES["llama"], seed=1), compile=True)
    prompts = [[1, 2, 3], [4, 5, 6, 7]]
    fast = engine.generate(prompts, max_new_tokens=8)
    slow = load(tiny(FAMILIES["llama"]), tiny(FAMILIES["llama"], seed=1)).generate(prompts, max_new_tokens=8)
    assert [each.tokens for each in fast] == [each.tokens for each in slow]
