"""Families in .gguf files as llama.cpp's converter lays them out, and, where there is one, as it writes them itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.models.loading.gguf_file import GgufFile
from slipstream.models.loading.gguf_tokenizer import SPLITS, tokenizer_of
from slipstream.models.loading.load import load_model
from toys.gguf_files import Rows, as_it_is, gap, grouped, interleaved, logits, raised, tiny, write
from toys.kernels import needs_kernel

pytest.importorskip("gguf")
pytestmark = needs_kernel

EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
FALCON = {"new_decoder_architecture": True, "num_kv_heads": 2}
NEOX = {"rope.dimension_count": 4, "use_parallel_residual": True}
EXPERTS_TOLD = {"expert_count": 4, "expert_used_count": 2}


@dataclass(frozen=True)
class Case:
    """A model, and how llama.cpp names and writes it: its family, metadata beside the usual, and its weights."""

    family: str
    kind: str
    rows: Rows = as_it_is
    changes: dict[str, Any] = field(default_factory=dict)
    told: dict[str, Any] = field(default_factory=dict)


CASES = {
    "biases": Case("llama", "llama", interleaved, {"attention_bias": True, "mlp_bias": True}),
    "mixtral": Case("llama", "mixtral", interleaved, EXPERTS, EXPERTS_TOLD),
    "qwen3moe": Case(
        "qwen3moe",
        "qwen3_moe",
        changes=EXPERTS | {"moe_intermediate_size": 32, "head_dim": 32, "norm_topk_prob": True},
        told=EXPERTS_TOLD | {"expert_feed_forward_length": 32, "attention.key_length": 32},
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
        EXPERTS_TOLD | {"embedding_scale": 2.0, "attention.scale": 0.2, "residual_scale": 0.5},
    ),
    "lists": Case("llama", "llama", interleaved, told={"attention.head_count": [4, 4], "block_count": [2]}),
    "granite": Case("granite", "granite", interleaved, {"logits_scaling": 3.0}, {"logit_scale": 3.0}),
    "falcon": Case("falcon", "falcon", grouped, FALCON | {"ffn_hidden_size": 96}),
    "gptneox": Case("gptneox", "gpt_neox", grouped, {"num_key_value_heads": 4}, NEOX),
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


def put(case: Case, model: Any, folder: Path, **more: Any) -> Path:
    """The file of a model as the case has it."""
    write(model, folder / "odd.gguf", case.family, case.rows, case.told, **more)
    return folder / "odd.gguf"


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_model_that_was_written(name: str, tmp_path: Path) -> None:
    model = tiny(CASES[name].kind, **CASES[name].changes)
    assert gap(logits(load_model(put(CASES[name], model, tmp_path))), logits(model)) < 1e-4


@pytest.mark.parametrize("name", ["biases", "gemma2", "falcon"])
def test_control_other_rows_and_norms_give_other_logits(name: str, tmp_path: Path) -> None:
    model = tiny(CASES[name].kind, **CASES[name].changes)
    assert gap(logits(load_model(put(replace(CASES[name], rows=as_it_is), model, tmp_path))), logits(model)) > 1e-2


def test_tensors_that_have_no_place_are_refused(tmp_path: Path) -> None:
    """Instead of being left out, as biases that a configuration does not tell."""
    case, sinks = Case("granite", "granite", interleaved), np.zeros(4, np.float32)
    file = put(case, tiny("granite"), tmp_path, more=lambda writer: writer.add_tensor("blk.0.attn_sinks.weight", sinks))
    with pytest.raises(ValueError, match=r"models of its family \(granite\) in 1 tensors \(blk\.0\.attn"):
        load_model(file)


@pytest.mark.parametrize(
    ("kind", "told", "sentence"),
    [
        ("mixtral", {"expert_count": 4, "expert_used_count": [1, 2]}, r"differ in num_experts_per_tok \(1, 2\)"),
        ("llama", {"residual_scale": 0.5}, r"tells residual_multiplier \(0.5\), which models of its family \(llama\)"),
        ("llama", {"feed_forward_length": 95}, "its weights have other shapes than its configuration says"),
        ("llama", {"attention.head_count": 0}, r"no model of its configuration \(integer division"),
        ("llama", {"block_count": None}, r"do not tell llama\.block_count: take another copy"),
    ],
)
def test_layers_that_differ_and_factors_of_other_families_are_refused(
    kind: str, told: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    file = put(Case("llama", kind, interleaved, told=told), tiny(kind, **EXPERTS), tmp_path)
    with pytest.raises(ValueError, match=sentence):
        load_model(file)


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
    tokenizer = tokenizer_of(words("ĠĠ", "  ", merges=["Ġ Ġ"], token_type=[1] * 96 + [4]))
    found = tokenizer("a  b", add_special_tokens=False)["input_ids"]
    assert found[1] == 96 and tokenizer.decode(found) == "a  b"


@pytest.mark.parametrize(("prefix", "first"), [(True, "▁▁a"), (False, "▁a")])
def test_a_space_is_put_before_texts_unless_the_file_says_otherwise(prefix: bool, first: str) -> None:
    tokens = ["<unk>", "<s>", "</s>", "▁", "a", "▁a", "▁▁a"]
    record = {"model": "llama", "tokens": tokens, "scores": [0.0, 0.0, 0.0, -9.0, -8.0, -1.0, -2.0]}
    record |= {"token_type": [2, 3, 3, 1, 1, 1, 1], "add_space_prefix": prefix}
    assert spelled(vocabulary(record), " a") == [first]
    assert tokenizer_of(vocabulary(record)).all_special_tokens == ["<s>", "</s>", "<unk>"]  # as usual, for none is told


# ---- with llama.cpp's own converter ---------------------------------------------------------------------------------

ALIKE = ("llama", "qwen2", "starcoder2", "granite", "olmo", "olmo2", "cohere", "ernie4_5", "arcee", "stablelm")
REAL: dict[str, dict[str, Any]] = {
    **{name: {} for name in (*ALIKE, "nemotron")},
    **{name: {"head_dim": 16} for name in ("glm4", "hunyuan_v1_dense", "seed_oss")},
    **{name: {"head_dim": 32} for name in ("qwen3", "gemma")},
    **dict.fromkeys(("mixtral", "granitemoe", "olmoe"), EXPERTS),
    "qwen2_moe": EXPERTS | {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64},
    "qwen3_moe": EXPERTS | {"moe_intermediate_size": 32, "head_dim": 32, "norm_topk_prob": True},
    "gemma2": {"head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 32},
    **{name: {"sliding_window": 8} for name in ("olmo3", "exaone4")},
    "gemma4_text": {"num_hidden_layers": 4, "head_dim": 32, "global_head_dim": 64, "sliding_window": 8}
    | {"layer_types": ["sliding_attention", "full_attention"] * 2, "hidden_size_per_layer_input": 32}
    | {"vocab_size_per_layer_input": 96, "num_kv_shared_layers": 2, "use_double_wide_mlp": True},
    "phi": {"intermediate_size": 256, "num_key_value_heads": 4},
    "phi3": {"eos_token_id": 1, "bos_token_id": 1},
    "falcon": FALCON | {"bias": False},
    "bloom": {"n_layer": 2, "n_head": 4},
    "smollm3": {"num_hidden_layers": 4},
    "gpt2": {"n_ctx": 128},
    "mamba": {"intermediate_size": 128},
}
needs_llama_cpp = pytest.mark.skipif("LLAMA_CPP" not in os.environ, reason="LLAMA_CPP names no checkout of llama.cpp")
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
@needs_llama_cpp
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
    assert gap(logits(load_model(file)), logits(model)) < 1e-4


@pytest.mark.slow
@needs_llama_cpp
def test_vocabularies_of_llama_cpp_give_its_tokens() -> None:
    tried = 0
    for file in sorted(Path(os.environ["LLAMA_CPP"], "models").glob("ggml-vocab-*.gguf")):
        texts, expected = Path(f"{file}.inp"), Path(f"{file}.out")
        if "bert" in file.name or not texts.exists():
            continue
        tokenizer = tokenizer_of(GgufFile.read(file))
        inputs = texts.read_bytes().decode().split("\n__ggml_vocab_test__\n")
        for text, line in zip(inputs, expected.read_text().split("\n"), strict=False):
            found = tokenizer(text, add_special_tokens=False)["input_ids"]
            assert found == [*map(int, line.split())], (file.name, text)
            tried += 1
    assert tried > 500
