"""benchmarks/cost_padded.py: a larger model with the same function."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, LlamaForCausalLM

from scripts import script
from slipstream.models.loading.pairings import EMBEDDED
from toys import FAMILIES, tiny

cost_padded = script("benchmarks/cost_padded.py")
Size = cost_padded.Size

TEXT = torch.arange(2 * 20).view(2, 20) * 7 % 101
# Every direction alone, and all together; no ratio of widths is a power of four, where the rescaling is exact.
SIZES = {
    "wider": Size(hidden=96),
    "deeper": Size(layers=5),
    "heads": Size(heads=8),
    "units": Size(intermediate=80),
    "vocabulary": Size(hidden=72, vocab=150),
    "all": Size(96, 4, 80, 12, 300),
}


def model(dtype: torch.dtype = torch.float32, tied: bool = True) -> LlamaForCausalLM:
    """A random Llama whose norms have weights of their own."""
    small = tiny(FAMILIES["llama"], dtype=dtype, tie_word_embeddings=tied)
    for name, weight in small.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.uniform_(weight, 0.5, 2.0)
    return small


@torch.inference_mode()
def spread(small: LlamaForCausalLM) -> float:
    return float(small(TEXT).logits.std())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_logits_stay(size: Any, tied: bool, dtype: torch.dtype) -> None:
    small = model(dtype, tied)
    large = cost_padded.enlarge(small, size)
    # The norms compute in float32, whatever the dtype of the model.
    assert cost_padded.difference(small, large, TEXT) < 2e-5 * spread(small)
    assert large.config.tie_word_embeddings == (tied and not size.vocab)
    assert large.dtype == dtype


def test_steps_with_a_cache_stay_too() -> None:
    small = model()
    large = cost_padded.enlarge(small, SIZES["all"])
    texts = [one.generate(TEXT, max_new_tokens=30, do_sample=False, pad_token_id=0) for one in (small, large)]
    assert torch.equal(*texts)


def break_norms(large: LlamaForCausalLM) -> None:
    for name, weight in large.named_parameters():
        if name.endswith("norm.weight"):
            weight.mul_(3**0.5)


def break_new_layers(large: LlamaForCausalLM) -> None:
    large.model.layers[3].mlp.down_proj.weight.normal_(0, 0.02)


def break_new_heads(large: LlamaForCausalLM) -> None:
    large.model.layers[0].self_attn.o_proj.weight[:, 32:].normal_(0, 0.02)


def break_stream(large: LlamaForCausalLM) -> None:
    large.model.layers[0].mlp.down_proj.weight[32:].normal_(0, 0.02)


@pytest.mark.parametrize("damage", [break_norms, break_new_layers, break_new_heads, break_stream])
def test_controls_are_noticed(damage: Callable[[LlamaForCausalLM], None]) -> None:
    small = model()
    large = cost_padded.enlarge(small, replace(SIZES["all"], vocab=None))
    with torch.no_grad():
        damage(large)
    assert cost_padded.difference(small, large, TEXT) > 1e-3 * spread(small)


def test_eps_is_part_of_the_function() -> None:
    small = model()
    small.model.embed_tokens.weight.data *= 1e-3  # so small that eps matters
    large = cost_padded.enlarge(small, SIZES["vocabulary"])
    assert cost_padded.difference(small, large, TEXT) < 1e-4 * spread(small)
    for layer in [module for module in large.modules() if hasattr(module, "variance_epsilon")]:
        layer.variance_epsilon = small.config.rms_norm_eps
    assert cost_padded.difference(small, large, TEXT) > 1e-3 * spread(small)


def test_added_ids_are_impossible_and_noticed_if_not() -> None:
    small = model()
    large = cost_padded.enlarge(small, SIZES["vocabulary"])
    chances = large(TEXT).logits.softmax(-1)
    assert chances.shape[-1] == 150 and chances[..., 101:].count_nonzero() == 0
    with torch.no_grad():
        large.lm_head.weight[140] = 0
    with pytest.raises(ArithmeticError, match="added id"):
        cost_padded.difference(small, large, TEXT)


def test_nothing_is_cheaper_for_being_zero() -> None:
    large = cost_padded.enlarge(model(), SIZES["all"])
    for name, weight in large.named_parameters():
        least = torch.finfo(weight.dtype).tiny
        assert bool(((weight == 0) | (weight.abs() >= least)).all()), name
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight")):
            assert weight.count_nonzero() == weight.numel(), name


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (Size(hidden=16), "hidden=16 is smaller than the model's 32"),
        (Size(heads=7), "multiple of 2"),
        (Size(hidden=100, heads=8), "no multiple of the heads"),
        (Size(vocab=200), "hidden size above 32"),
    ],
)
def test_impossible_sizes(size: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        cost_padded.enlarge(model(), size)


def test_other_families_are_refused() -> None:
    with pytest.raises(ValueError, match="qwen2 model cannot be enlarged"):
        cost_padded.enlarge(tiny(FAMILIES["qwen2"], attention_bias=False, mlp_bias=False), SIZES["wider"])


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*sizes: str) -> str:
        monkeypatch.setattr(sys, "argv", ["cost_padded.py", str(EMBEDDED / "draft"), str(tmp_path / "large"), *sizes])
        cost_padded.main()
        return capsys.readouterr().err

    said = run("--hidden", "160", "--vocab", "5000")
    assert "now " in said and "largest difference" in said
    config = AutoConfig.from_pretrained(tmp_path / "large")
    assert (config.hidden_size, config.vocab_size, config.num_hidden_layers) == (160, 5000, 2)
    assert {"tokenizer.json", "model.safetensors"} <= {path.name for path in (tmp_path / "large").iterdir()}
    with pytest.raises(SystemExit, match=r"^error: hidden=64 is smaller .* give 128 or more\.$"):
        run("--hidden", "64")


def test_presets_have_the_cost_they_name() -> None:
    for name, parameters in {"target-134m": 134.2e6, "draft-24m": 24.4e6, "target-1b": 1.14e9}.items():
        source = "draft" if name.startswith("draft") else "target"
        own = AutoConfig.from_pretrained(EMBEDDED / source)
        with torch.device("meta"):
            large = LlamaForCausalLM(cost_padded.enlarged_config(own, cost_padded.PRESETS[name])[0])
        assert large.num_parameters() == pytest.approx(parameters, rel=0.01)
