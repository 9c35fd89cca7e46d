"""Checkpoints in all forms: in several files, spread over devices, quantized, with code of their own, in one .gguf."""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from slipstream.models.loading.load import find_tokenizer, load_model

TEXT = torch.tensor([[5, 17, 42, 8]])

CODE = """
from transformers import LlamaConfig, LlamaForCausalLM


class OwnConfig(LlamaConfig):
    model_type = "own_code"


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    return LlamaForCausalLM(
        LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, vocab_size=101, max_position_embeddings=64)
    ).eval()


@pytest.fixture
def folder(model: LlamaForCausalLM, tmp_path: Path) -> Path:
    model.save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


def said(folder: Path, **changes: Any) -> Path:
    """The folder, whose config.json says more."""
    record = folder / "config.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), **changes}))
    return folder


@torch.inference_mode()
def same(one: Any, other: Any) -> bool:
    return bool(torch.equal(one(TEXT).logits, other(TEXT).logits))


def test_shards_are_put_together_and_a_missing_one_is_told(model: LlamaForCausalLM, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2 and (tmp_path / "model.safetensors.index.json").is_file()
    assert same(load_model(tmp_path), model)
    shards[1].unlink()
    with pytest.raises(ValueError, match=r"^cannot load the model .* a file of its weights is missing .*: copy"):
        load_model(tmp_path)


def test_code_that_comes_with_a_model_runs_only_when_asked(model: LlamaForCausalLM, folder: Path) -> None:
    (folder / "own_code.py").write_text(CODE)
    classes = {"AutoConfig": "own_code.OwnConfig", "AutoModelForCausalLM": "own_code.OwnForCausalLM"}
    said(folder, model_type="own_code", architectures=["OwnForCausalLM"], auto_map=classes)
    with pytest.raises(ValueError, match=r"Python code of its own, which runs only if you ask .*--trust-remote-code"):
        load_model(folder)
    loaded = load_model(folder, trust_remote_code=True)
    assert type(loaded).__name__ == "OwnForCausalLM" and same(loaded, model)


@pytest.mark.parametrize(
    ("method", "package", "settings"),
    [
        ("bitsandbytes", "accelerate", {"load_in_4bit": True}),
        ("fp8", "accelerate", {}),
        ("torchao", "torchao", {"quant_type": "int4_weight_only"}),
    ],
)
def test_quantized_weights_name_the_package_they_need(
    folder: Path, method: str, package: str, settings: dict[str, Any]
) -> None:
    if find_spec(package):
        pytest.skip(f"{package} is installed")
    said(folder, quantization_config={"quant_method": method, **settings})
    with pytest.raises(ValueError, match=rf"^cannot load the model .*pip install .*{package.replace('_', '-')}"):
        load_model(folder)


def test_what_is_unknown_is_refused_and_weights_of_it_are_not_read_as_plain_ones(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"")  # which is not read beside safetensors
    for name, value, fault in (
        ("hidden_act", "loud", r"no model of its configuration \('loud' is missing or unknown\): correct"),
        ("quantization_config", {"quant_method": "squeezed"}, "by 'squeezed', which transformers does not know"),
    ):
        with pytest.raises(ValueError, match=fault):
            load_model(said(folder, **{name: value}))


@pytest.mark.parametrize("kind", ["qwen2", "gemma"])
def test_a_tokenizer_without_its_vocabulary_is_none(kind: str, folder: Path) -> None:
    """And not one that reads every text as nothing, which transformers makes of some families."""
    assert find_tokenizer(said(folder, model_type=kind)) is None
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    with pytest.raises(ValueError, match=r"the files of its vocabulary are missing \(.*\): copy .*, or pass"):
        find_tokenizer(folder)


def test_a_device_map_spreads_a_model_or_names_what_it_needs(model: LlamaForCausalLM, folder: Path) -> None:
    if not find_spec("accelerate"):
        with pytest.raises(ValueError, match="pip install accelerate"):
            load_model(folder, device_map="auto")
        return
    loaded = load_model(folder, device_map="auto")
    assert same(loaded.to("cpu"), model)


@pytest.mark.skipif(find_spec("gguf") is not None, reason="the package is installed")
def test_a_gguf_file_names_what_it_needs(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=r"cannot load the model .*tiny\.gguf.* needs .*: pip install"):
        load_model(tmp_path / "tiny.gguf")


def test_a_file_that_is_no_model_is_told_from_a_folder(folder: Path) -> None:
    other = Path(shutil.copy(folder / "config.json", folder / "weights.bin"))
    with pytest.raises(ValueError, match="that is a file: name the folder that it lies in"):
        load_model(other)
