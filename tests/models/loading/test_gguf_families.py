"""Families in .gguf files as llama.cpp's converter lays them out, and, where there is one, as it writes them itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from slipstream.models.loading.gguf_file import GgufFile
from slipstream.models.loading.gguf_tokenizer import SPLITS, tokenizer_of
from slipstream.models.loading.load import load_model
from toys.kernels import needs_kernel

gguf = pytest.importorskip("gguf")
pytestmark = needs_kernel

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 96}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0}
TEXT = torch.tensor([[1, 17, 42, 5, 17, 80, 33, 2, 61, 90, 12, 44, 7, 7, 29, 55, 3, 70, 8, 21]])
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}


def tiny(kind: str, **changes: Any) -> Any:
    """A random model whose norms and biases have an effect too."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | changes)).float().eval()
    for name, weight in model.named_parameters():
        torch.nn.init.normal_(weight, float(name.endswith("norm.weight") and "gemma" not in kind), 0.1)
    return model


def logits(model: Any) -> Tensor:
    with torch.inference_mode():
        return model(TEXT).logits


def same(found: Tensor, want: Tensor) -> bool:
    return float((found - want).abs().max() / want.std()) < 1e-4


Pieces = dict[str, Tensor]


def interleaved(name: str, weight: Tensor, config: Any) -> Pieces:
    """The halves of what is rotated in turns."""
    counts = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    count = counts.get(name.split(".")[-2])
    turned = weight.view(count, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape) if count else weight
    return {name: turned}


def raised(name: str, weight: Tensor, config: Any) -> Pieces:
    return {name: weight + 1 if "norm" in name else weight}


def grouped(name: str, weight: Tensor, config: Any) -> Pieces:
    """All queries, then all keys, then all values."""
    if "attn_qkv" not in name:
        return {name: weight}
    groups = getattr(config, "num_kv_heads", config.num_attention_heads)
    heads = weight.view(groups, -1, config.hidden_size // config.num_attention_heads, *weight.shape[1:])
    parts = (heads[:, :-2], heads[:, -2], heads[:, -1])
    return {name: torch.cat([part.reshape(-1, *weight.shape[1:]) for part in parts])}


def as_it_is(name: str, weight: Tensor, config: Any) -> Pieces:
    return {name: weight}


@dataclass(frozen=True)
class Case:
    """A model, and how llama.cpp names and writes it: its family, metadata beside the usual, and its weights."""

    family: str
    kind: str
    written: Callable[[str, Tensor, Any], Pieces] = as_it_is
    changes: dict[str, Any] = field(default_factory=dict)
    told: dict[str, Any] = field(default_factory=dict)


CASES = {
    "biases": Case("llama", "llama", interleaved, {"attention_bias": True, "mlp_bias": True}),
    "mixtral": Case("llama", "mixtral", interleaved, EXPERTS, {"expert_count": 4, "expert_used_count": 2}),
    "qwen3moe": Case(
        "qwen3moe",
        "qwen3_moe",
        changes=EXPERTS | {"moe_intermediate_size": 32, "head_dim": 32, "norm_topk_prob": True},
        told={"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32, "attention.key_length": 32},
    ),
    "gemma2": Case(
        "gemma2",
        "gemma2",
        raised,
        {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8, "tie_word_embeddings": True},
        {"attention.key_length": 32, "attention.sliding_window": 8},
    ),
    "granitemoe": Case(
        "granitemoe",
        "granitemoe",
        interleaved,
        {**EXPERTS, "embedding_multiplier": 2.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5},
        {
            "expert_count": 4,
            "expert_used_count": 2,
            "embedding_scale": 2.0,
            "attention.scale": 0.2,
            "residual_scale": 0.5,
        },
    ),
    "granite": Case("granite", "granite", interleaved, {"logits_scaling": 3.0}, {"logit_scale": 3.0}),
    "falcon": Case(
        "falcon",
        "falcon",
        grouped,
        {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 96},
    ),
    "gptneox": Case(
        "gptneox",
        "gpt_neox",
        grouped,
        {"num_key_value_heads": 4},
        {"rope.dimension_count": 4, "use_parallel_residual": True},
    ),
    "olmo3": Case(
        "olmo2",
        "olmo3",
        changes={"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
        told={"attention.sliding_window": 8, "attention.sliding_window_pattern": [True, False]},
    ),
    "gemma4": Case(
        "gemma4",
        "gemma4_text",
        changes={"head_dim": 32, "global_head_dim": 64, "sliding_window": 8, "hidden_size_per_layer_input": 32}
        | {"layer_types": ["sliding_attention", "full_attention"], "vocab_size_per_layer_input": 96}
        | {"use_double_wide_mlp": True, "num_kv_shared_layers": 0},
        told={"attention.key_length": 64, "attention.key_length_swa": 32, "attention.sliding_window": 8}
        | {"attention.sliding_window_pattern": [True, False], "embedding_length_per_layer_input": 32}
        | {"rope.freq_base_swa": 10000.0},
    ),
    "cohere": Case("command-r", "cohere", told={"logit_scale": 0.0625}),
    "glm4": Case("glm4", "glm4", changes={"head_dim": 16}, told={"rope.dimension_count": 8}),
}


def write(case: Case, model: Any, file: Path) -> None:
    """Write a model as llama.cpp's converter does."""
    config, names = model.config, {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    writer = gguf.GGUFWriter(file, case.family)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(96)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(getattr(config, "num_kv_heads", getattr(config, "num_key_value_heads", 4)))
    epsilons = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon")
    epsilon = next(getattr(config, name) for name in epsilons if hasattr(config, name))
    (writer.add_layer_norm_rms_eps if hasattr(config, "rms_norm_eps") else writer.add_layer_norm_eps)(epsilon)
    rotation = config.rope_parameters
    writer.add_rope_freq_base(rotation.get("full_attention", rotation)["rope_theta"])
    for key, value in case.told.items():
        kinds: dict[type, Any] = {int: writer.add_uint32, float: writer.add_float32, bool: writer.add_bool}
        kinds[list] = writer.add_array
        kinds[type(value)](f"{case.family}.{key}", value)
    known = gguf.get_tensor_name_map(names[case.family], config.num_hidden_layers)
    for full, weight in model.state_dict().items():
        if full == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, _, part = full.rpartition(".")
        if "experts.gate_up_proj" in full or "input_linear" in full:
            gate, up = weight.chunk(2, 1)
            block = full.split(".")[2]
            pieces = {f"blk.{block}.ffn_gate_exps.weight": gate, f"blk.{block}.ffn_up_exps.weight": up}
        else:
            stem, part = (stem, part) if part in ("weight", "bias") else (full, "weight")
            stem = stem.replace("block_sparse_moe.router", "mlp.gate").replace("block_sparse_moe", "mlp")
            name = known.get_name(stem) or known.get_name(stem.partition(".")[2]) or f"none.{full}"
            pieces = case.written(f"{name}.{part}", weight, config)
        for name, piece in pieces.items():
            writer.add_tensor(name, piece.contiguous().numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_model_that_was_written(name: str, tmp_path: Path) -> None:
    case, file = CASES[name], tmp_path / "tiny.gguf"
    model = tiny(case.kind, **case.changes)
    write(case, model, file)
    assert same(logits(load_model(file)), logits(model))


@pytest.mark.parametrize(("name", "wrong"), [("biases", as_it_is), ("gemma2", as_it_is), ("falcon", as_it_is)])
def test_control_other_rows_and_norms_give_other_logits(name: str, wrong: Any, tmp_path: Path) -> None:
    case, file = CASES[name], tmp_path / "tiny.gguf"
    model = tiny(case.kind, **case.changes)
    write(Case(case.family, case.kind, wrong, case.changes, case.told), model, file)
    assert not same(logits(load_model(file)), logits(model))


def test_tensors_that_have_no_place_are_refused(tmp_path: Path) -> None:
    """Instead of being left out, as biases that a configuration does not tell."""
    model, file = tiny("granite", attention_bias=False), tmp_path / "odd.gguf"

    def twice(name: str, weight: Tensor, config: Any) -> Pieces:
        more = {"blk.0.attn_sinks.weight": torch.zeros(4)} if name == "blk.0.attn_q.weight" else {}
        return interleaved(name, weight, config) | more

    write(Case("granite", "granite", twice), model, file)
    with pytest.raises(
        ValueError, match=r"differs from the models of its family \(granite\) in 1 tensors \(blk\.0\.attn"
    ):
        load_model(file)


def test_layers_that_differ_are_refused(tmp_path: Path) -> None:
    told = {"expert_count": 4, "expert_used_count": [1, 2]}
    write(Case("llama", "mixtral", interleaved, told=told), tiny("mixtral", **EXPERTS), tmp_path / "odd.gguf")
    with pytest.raises(ValueError, match=r"its layers differ in num_experts_per_tok \(1, 2\)"):
        load_model(tmp_path / "odd.gguf")


def test_factors_that_the_family_does_not_have_are_refused(tmp_path: Path) -> None:
    write(Case("llama", "llama", interleaved, told={"residual_scale": 0.5}), tiny("llama"), tmp_path / "odd.gguf")
    with pytest.raises(ValueError, match=r"tells residual_multiplier \(0.5\), which models of its family \(llama\)"):
        load_model(tmp_path / "odd.gguf")


# ---- tokenizers -----------------------------------------------------------------------------------------------------


def words(*merged: str, **more: Any) -> GgufFile:
    """A file that holds a byte-level vocabulary: the bytes of ASCII, and these tokens, merged in turn."""
    tokens = [*("Ġ" if each == " " else each for each in map(chr, range(32, 127))), *merged]
    record = {"model": "gpt2", "tokens": tokens, "merges": [], "token_type": [1] * len(tokens)} | more
    return vocabulary(record)


def vocabulary(record: dict[str, Any]) -> GgufFile:
    metadata = {f"tokenizer.ggml.{name}": value for name, value in record.items()}
    return GgufFile(Path("/no/words.gguf"), {"general.architecture": "llama", **metadata}, {}, ())


def spelled(file: GgufFile, text: str) -> list[str]:
    tokenizer = tokenizer_of(file)
    return list(tokenizer.convert_ids_to_tokens(tokenizer(text, add_special_tokens=False)["input_ids"]))


@pytest.mark.parametrize(
    ("way", "pieces"),
    [("gpt-2", ["12"]), ("smollm", ["1", "2"]), ("llama-bpe", ["12"]), ("qwen2", ["1", "2"]), ("deepseek-v3", ["12"])],
)
def test_texts_are_split_as_the_vocabulary_was_made(way: str, pieces: list[str]) -> None:
    assert spelled(words("12", merges=["1 2"], pre=way), "12") == pieces


def test_an_unknown_way_of_splitting_is_refused() -> None:
    assert "own" not in SPLITS
    with pytest.raises(ValueError, match="splits texts by 'own', which is not known: pass tokenizer="):
        tokenizer_of(words(pre="own"))


def test_whole_words_come_before_merges_where_the_vocabulary_was_made_so() -> None:
    assert spelled(words("abc", "ab", merges=["a b"], pre="llama-bpe"), "abc") == ["abc"]
    assert spelled(words("abc", "ab", merges=["a b"], pre="gpt-2"), "abc") == ["ab", "c"]


def test_spaces_that_are_found_first_are_other_tokens_than_merged_ones() -> None:
    kinds = [1] * 95 + [1, 4]
    file = words("ĠĠ", "  ", merges=["Ġ Ġ"], token_type=kinds)
    tokenizer = tokenizer_of(file)
    assert tokenizer("a  b", add_special_tokens=False)["input_ids"][1] == 96
    assert tokenizer.decode(tokenizer("a  b", add_special_tokens=False)["input_ids"]) == "a  b"


@pytest.mark.parametrize(("prefix", "first"), [(True, "▁▁a"), (False, "▁a")])
def test_a_space_is_put_before_texts_unless_the_file_says_otherwise(prefix: bool, first: str) -> None:
    tokens = ["<unk>", "<s>", "</s>", "▁", "a", "▁a", "▁▁a"]
    record = {"model": "llama", "tokens": tokens, "scores": [0.0, 0.0, 0.0, -9.0, -8.0, -1.0, -2.0]}
    record |= {"token_type": [2, 3, 3, 1, 1, 1, 1], "add_space_prefix": prefix}
    assert spelled(vocabulary(record), " a") == [first]


# ---- with llama.cpp's own converter ---------------------------------------------------------------------------------

REAL = {
    **{
        name: {} for name in ("llama", "qwen2", "starcoder2", "granite", "olmo", "olmo2", "cohere", "ernie4_5", "arcee")
    },
    **{name: {"head_dim": 16} for name in ("glm4", "hunyuan_v1_dense", "seed_oss")},
    **{name: {"head_dim": 32} for name in ("qwen3", "gemma")},
    "mixtral": EXPERTS,
    "granitemoe": EXPERTS,
    "olmoe": EXPERTS,
    "qwen2_moe": EXPERTS | {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64},
    "qwen3_moe": EXPERTS | {"moe_intermediate_size": 32, "head_dim": 32, "norm_topk_prob": True},
    "gemma2": {"head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 32},
    "olmo3": {"sliding_window": 8},
    "exaone4": {"sliding_window": 8},
    "gemma4_text": {"num_hidden_layers": 4, "head_dim": 32, "global_head_dim": 64, "sliding_window": 8}
    | {"layer_types": ["sliding_attention", "full_attention"] * 2, "hidden_size_per_layer_input": 32}
    | {"vocab_size_per_layer_input": 96, "num_kv_shared_layers": 2, "use_double_wide_mlp": True},
    "phi": {"intermediate_size": 256, "num_key_value_heads": 4},
    "phi3": {"eos_token_id": 1, "bos_token_id": 1},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": False},
    "bloom": {"n_layer": 2, "n_head": 4},
    "stablelm": {},
    "nemotron": {},
    "smollm3": {"num_hidden_layers": 4},
}
CONVERT = """  # convert a folder without a tokenizer: python -c CONVERT CHECKOUT FOLDER FILE
import sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/gguf-py"]
import convert_hf_to_gguf as converter
from conversion import base
kind_of = converter.get_model_class
def without_words(*names, **more):
    kind = kind_of(*names, **more)
    kind.set_vocab = lambda self: self.gguf_writer.add_tokenizer_model("none")
    return kind
converter.get_model_class = without_words
sys.argv = ["convert", sys.argv[2], "--outfile", sys.argv[3], "--outtype", "f32"]
converter.main()
"""


@pytest.mark.slow
@pytest.mark.skipif("LLAMA_CPP" not in os.environ, reason="LLAMA_CPP names no checkout of llama.cpp")
@pytest.mark.parametrize("kind", REAL)
def test_files_of_the_converter_give_the_logits_of_the_model(kind: str, tmp_path: Path) -> None:
    model = tiny(kind, **REAL[kind])
    model.save_pretrained(tmp_path)
    known = {"model": {"vocab": {str(number): number for number in range(96)}}, "added_tokens": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps(known))
    file = tmp_path / "model.gguf"
    command = [sys.executable, "-W", "ignore", "-c", CONVERT, os.environ["LLAMA_CPP"], str(tmp_path), str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert same(logits(load_model(file)), logits(model))


@pytest.mark.slow
@pytest.mark.skipif("LLAMA_CPP" not in os.environ, reason="LLAMA_CPP names no checkout of llama.cpp")
def test_vocabularies_of_llama_cpp_give_its_tokens() -> None:
    tried = 0
    for file in sorted(Path(os.environ["LLAMA_CPP"], "models").glob("ggml-vocab-*.gguf")):
        texts, expected = Path(f"{file}.inp"), Path(f"{file}.out")
        if "bert" in file.name or not texts.exists():
            continue
        tokenizer = tokenizer_of(GgufFile.read(file))
        inputs = texts.read_bytes().decode().split("\n__ggml_vocab_test__\n")
        for text, line in zip(inputs, expected.read_text().split("\n"), strict=False):
            assert tokenizer(text, add_special_tokens=False)["input_ids"] == [*map(int, line.split())], (
                file.name,
                text,
            )
            tried += 1
    assert tried > 500
