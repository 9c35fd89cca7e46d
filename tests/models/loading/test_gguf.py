"""Checkpoints of llama.cpp, written by its own package, read from their own codes."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

import slipstream
from slipstream.kernels.cpu import kernel_missing
from slipstream.kernels.packing import QuantizedLinear
from slipstream.models.loading.load import load_model

gguf = pytest.importorskip("gguf")
pytestmark = pytest.mark.skipif(kernel_missing() is not None, reason=f"no kernel here: {kernel_missing()}")

SCALES = 2**-8  # what rounding a scale to bfloat16 changes a weight by, at most
HEADS = {"q_proj": 4, "k_proj": 2}


def plain(tied: bool = False, width: int = 64) -> LlamaForCausalLM:
    """A Llama whose queries have more heads than its keys."""
    torch.manual_seed(0)
    inner = max(96, width)
    sizes: dict[str, Any] = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": 2, "vocab_size": 96}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, initializer_range=0.2, tie_word_embeddings=tied)).eval()


def interleaved(name: str, weight: Tensor) -> Tensor:
    """The rows of a weight as llama.cpp orders them: the rotated halves of queries and keys in turns."""
    count = HEADS.get(name.split(".")[-2])
    return weight if not count else weight.view(count, 2, -1, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)


PLACES_OF_SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)} | {
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}
"""The bytes of a block at which its scales begin, for formats that llama.cpp's package reads and cannot write."""


def blocks_of(weight: NDArray[np.float32], kind: Any) -> NDArray[np.uint8]:
    """Blocks of a weight; of any weight, with random bytes for its codes, in a format that cannot be written."""
    if kind.name not in PLACES_OF_SCALES:
        found: NDArray[np.uint8] = gguf.quantize(weight, kind)
        return found
    random, (inputs, size) = np.random.default_rng(len(weight)), gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (len(weight), weight.shape[1] // inputs, size), dtype=np.uint8)
    for place in PLACES_OF_SCALES[kind.name]:
        scales = random.uniform(1e-4, 1e-3, (*blocks.shape[:2], 1)).astype(np.float16)
        blocks[..., place : place + 2] = scales.view(np.uint8)
    return blocks.reshape(len(weight), -1)


def written(model: Any, file: Path, format: str) -> dict[str, Tensor]:
    """Write a file -> what the matrices in it stand for, by the names of transformers."""
    config, kind, llama = model.config, gguf.GGMLQuantizationType[format], model.config.model_type == "llama"
    writer = gguf.GGUFWriter(file, config.model_type)
    writer.add_context_length(64)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    architecture = gguf.MODEL_ARCH[config.model_type.upper()]
    names, found = gguf.get_tensor_name_map(architecture, config.num_hidden_layers), dict[str, Tensor]()
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, _, part = name.rpartition(".")
        there = f"{names.get_name(stem)}.{part}"
        numbers = (interleaved(name, weight) if llama else weight).contiguous().numpy()
        if weight.dim() < 2:
            writer.add_tensor(there, numbers)
            continue
        blocks = blocks_of(numbers, kind)
        writer.add_tensor(there, blocks, raw_dtype=kind)
        found[name] = torch.from_numpy(gguf.dequantize(blocks, kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return found


def layers(model: Any) -> dict[str, QuantizedLinear]:
    """The quantized layers by the names of their weights."""
    return {f"{name}.weight": each for name, each in model.named_modules() if isinstance(each, QuantizedLinear)}


@pytest.mark.parametrize(
    ("format", "precision"),
    [
        *(("Q8_0", "int8?group=32"), ("Q5_0", "int8?group=32"), ("Q5_1", "int8?group=32"), ("Q4_0", "int4")),
        *(("Q4_1", "int4"), ("Q2_K", "int4?group=16"), ("Q3_K", "int4?group=16"), ("Q4_K", "int4")),
        *(("Q5_K", "int8?group=32"), ("Q6_K", "int8?group=16"), ("IQ4_XS", "int8?group=32")),
        ("IQ4_NL", "int8?group=32"),
    ],
)
def test_layers_are_what_their_blocks_stand_for(format: str, precision: str, tmp_path: Path) -> None:
    """Offsets are rounded to bfloat16 as scales are, so a weight that an offset brings near zero has their error."""
    stands_for = written(plain(width=256), tmp_path / "tiny.gguf", format)
    loaded = load_model(tmp_path / "tiny.gguf")
    found = layers(loaded)
    assert found.keys() == stands_for.keys() - {"model.embed_tokens.weight"} and len(found) == 15
    for name, layer in found.items():
        assert str(layer.precision) == precision
        atol = 2 * SCALES * float(stands_for[name].abs().max()) if layer.zeros is not None else 1e-9
        torch.testing.assert_close(interleaved(name, layer.plain_weight()), stands_for[name], rtol=SCALES, atol=atol)
    embeddings = loaded.get_input_embeddings().weight
    torch.testing.assert_close(embeddings, stands_for["model.embed_tokens.weight"], rtol=0, atol=0)


def test_rows_of_other_families_stay_where_they_are(tmp_path: Path) -> None:
    """Qwen 2 has biases beside, which llama.cpp stores as they are too."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 96}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, tie_word_embeddings=False)).eval()
    torch.nn.init.normal_(model.model.layers[0].self_attn.q_proj.bias)
    stands_for = written(model, tmp_path / "tiny.gguf", "Q4_0")
    found = layers(load_model(tmp_path / "tiny.gguf"))
    assert len(found) == 15
    for name, layer in found.items():
        torch.testing.assert_close(layer.plain_weight(), stands_for[name], rtol=SCALES, atol=1e-9)
    layer = found["model.layers.0.self_attn.q_proj.weight"]
    torch.testing.assert_close(layer.bias, model.model.layers[0].self_attn.q_proj.bias)


def test_rows_that_stayed_as_llama_cpp_orders_them_are_seen(tmp_path: Path) -> None:
    """The control of the comparison above: queries, of which half the rows would be elsewhere."""
    stands_for = written(plain(), tmp_path / "tiny.gguf", "Q8_0")
    name = "model.layers.0.self_attn.q_proj.weight"
    weight = layers(load_model(tmp_path / "tiny.gguf"))[name].plain_weight()
    assert float((weight - stands_for[name]).abs().max()) > 100 * SCALES * float(weight.abs().mean())


def test_a_tied_head_reads_the_codes_of_the_embeddings(tmp_path: Path) -> None:
    stands_for = written(plain(tied=True), tmp_path / "tiny.gguf", "Q8_0")
    head = layers(load_model(tmp_path / "tiny.gguf"))["lm_head.weight"]
    torch.testing.assert_close(head.plain_weight(), stands_for["model.embed_tokens.weight"], rtol=SCALES, atol=1e-9)


def test_its_logits_are_near_those_of_the_weights(tmp_path: Path) -> None:
    model, text = plain(), torch.tensor([[5, 17, 42, 8, 90, 3]])
    stands_for = written(model, tmp_path / "tiny.gguf", "Q8_0")
    restored = {name: interleaved_back(name, weight) for name, weight in stands_for.items()}
    model.load_state_dict(restored, strict=False)
    with torch.inference_mode():
        want, got = model(text).logits, load_model(tmp_path / "tiny.gguf")(text).logits
    assert float((got - want).abs().max() / want.std()) < 0.1  # the kernel rounds inputs to 8 bits


def interleaved_back(name: str, weight: Tensor) -> Tensor:
    """The inverse of `interleaved`."""
    count = HEADS.get(name.split(".")[-2])
    return weight if not count else weight.view(count, -1, 2, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)


def test_plain_and_speculative_texts_of_it_are_equal(tmp_path: Path) -> None:
    written(plain(), tmp_path / "tiny.gguf", "Q4_0")
    engine = slipstream.load(tmp_path / "tiny.gguf", plain(), dtype="float32")
    prompts = [[5, 17, 42], [8, 90, 3, 1]]
    fast, slow = (engine.generate(prompts, max_new_tokens=12, temperature=0, plain=each) for each in (False, True))
    assert [each.tokens for each in fast] == [each.tokens for each in slow]
    with pytest.raises(ValueError, match="are quantized already: leave quantize=int8 out"):
        slipstream.load(tmp_path / "tiny.gguf", quantize="int8")


@pytest.mark.parametrize("format", ["Q4_K", "Q6_K"])
def test_logits_of_blocks_of_256_are_near_those_of_their_weights(format: str, tmp_path: Path) -> None:
    """Through the kernel, whose inputs have 8 bits; with the offsets left out they are far away."""
    model, text = plain(width=256), torch.tensor([[5, 17, 42, 8, 90, 3]])
    stands_for = written(model, tmp_path / "tiny.gguf", format)
    model.load_state_dict({name: interleaved_back(name, each) for name, each in stands_for.items()}, strict=False)
    loaded: Any = load_model(tmp_path / "tiny.gguf")
    with torch.inference_mode():
        want, got = model(text).logits, loaded(text).logits
        assert float((got - want).abs().max() / want.std()) < 0.1
        for layer in layers(loaded).values():
            if layer.zeros is not None:
                layer.zeros.zero_()
        without = float((loaded(text).logits - want).abs().max() / want.std())
    assert (without > 0.5) == (format == "Q4_K")


def test_a_format_that_is_not_known_is_left_to_transformers(tmp_path: Path) -> None:
    stands_for = written(plain(), tmp_path / "tiny.gguf", "F16")
    if not find_spec("accelerate"):
        with pytest.raises(ValueError, match=r"tiny\.gguf.*pip install accelerate"):
            load_model(tmp_path / "tiny.gguf")
        return
    loaded: Any = load_model(tmp_path / "tiny.gguf")
    name = "model.layers.0.mlp.up_proj.weight"
    assert not layers(loaded)
    torch.testing.assert_close(loaded.get_parameter(name), stands_for[name], rtol=0, atol=0)
