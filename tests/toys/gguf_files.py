"""Tiny models, and .gguf files of them as llama.cpp's converter lays them out."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 96}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0}
TEXT = torch.tensor([[1, 17, 42, 5, 17, 80, 33, 2, 61, 90, 12, 44]])

Rows = Callable[[str, Tensor, Any], Tensor]


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


def gap(found: Tensor, want: Tensor) -> float:
    """How far logits are from others, in standard deviations."""
    return float((found - want).abs().max() / want.std())


def as_it_is(name: str, weight: Tensor, config: Any) -> Tensor:
    return weight


def interleaved(name: str, weight: Tensor, config: Any, halves: tuple[int, int] = (2, -1)) -> Tensor:
    """The rotated halves of queries and keys in turns; with `halves` (-1, 2) one after the other again."""
    counts = {"q_proj": config.num_attention_heads, "k_proj": getattr(config, "num_key_value_heads", 0)}
    count = counts.get(name.split(".")[-2])
    return weight.view(count, *halves, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape) if count else weight


def raised(name: str, weight: Tensor, config: Any) -> Tensor:
    return weight + 1 if "norm" in name else weight


def grouped(name: str, weight: Tensor, config: Any) -> Tensor:
    """All queries, then all keys, then all values."""
    if "query_key_value" not in name:
        return weight
    groups = getattr(config, "num_kv_heads", config.num_attention_heads)
    heads = weight.view(groups, -1, config.hidden_size // config.num_attention_heads, *weight.shape[1:])
    return torch.cat([part.reshape(-1, *weight.shape[1:]) for part in (heads[:, :-2], heads[:, -2], heads[:, -1])])


PLACES_OF_SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
PLACES_OF_SCALES |= {"IQ4_NL": (0,), "IQ4_XS": (0,), "TQ1_0": (52,), "TQ2_0": (64,), "MXFP4": (), "IQ2_XS": (0,)}
"""The bytes of a block at which its scales begin, for formats whose blocks are made of random bytes."""


def blocks_of(weight: NDArray[np.float32], kind: Any) -> NDArray[np.uint8]:
    """Blocks of a weight; of any weight, with random bytes for its codes, in a format that cannot be written."""
    import gguf

    if kind.name not in PLACES_OF_SCALES:
        found: NDArray[np.uint8] = gguf.quantize(weight, kind)
        return found
    random, (inputs, size) = np.random.default_rng(len(weight)), gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (len(weight), weight.shape[1] // inputs, size), dtype=np.uint8)
    for place in PLACES_OF_SCALES[kind.name]:
        scales = random.uniform(1e-4, 1e-3, (*blocks.shape[:2], 1)).astype(np.float16)
        blocks[..., place : place + 2] = scales.view(np.uint8)
    if kind.name == "MXFP4":  # powers of two, the two least of which are written otherwise in bfloat16
        blocks[..., 0] = random.integers(100, 125, blocks.shape[:2])
        blocks[0, :, 0] = [0, 1] * (blocks.shape[1] // 2)
    return blocks.reshape(len(weight), -1)


def add_metadata(writer: Any, config: Any, family: str, told: dict[str, Any]) -> None:
    """What every family tells, and what is told besides."""
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(getattr(config, "num_kv_heads", getattr(config, "num_key_value_heads", 4)))
    epsilons = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon")
    epsilon = next(getattr(config, name) for name in epsilons if hasattr(config, name))
    (writer.add_layer_norm_rms_eps if hasattr(config, "rms_norm_eps") else writer.add_layer_norm_eps)(epsilon)
    writer.add_rope_freq_base(config.rope_parameters.get("full_attention", config.rope_parameters)["rope_theta"])
    kinds: dict[type, Any] = {int: writer.add_uint32, float: writer.add_float32, bool: writer.add_bool}
    kinds |= {list: writer.add_array, type(None): lambda key, value: None}
    for key, value in told.items():
        writer.kv_data[0].pop(f"{family}.{key}", None)
        kinds[type(value)](f"{family}.{key}", value)


def finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write(
    model: Any, file: Path, family: str, rows: Rows, told: Any, format: str = "F32", more: Any = None, **split: Any
) -> dict[str, Tensor]:
    """Write a file, with what `more` adds -> what the matrices in it stand for, by the names of transformers."""
    import gguf

    config, kind = model.config, gguf.GGMLQuantizationType[format]
    writer = gguf.GGUFWriter(file, family, **split)
    add_metadata(writer, config, family, told)
    if more:
        more(writer)
    architectures = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    known = gguf.get_tensor_name_map(architectures[family], config.num_hidden_layers)
    found = dict[str, Tensor]()
    for full, weight in model.state_dict().items():
        if full == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if "experts.gate_up_proj" in full or "input_linear" in full:
            names = [f"blk.{full.split('.')[2]}.ffn_{part}_exps.weight" for part in ("gate", "up")]
            pieces = dict(zip(names, weight.chunk(2, 1), strict=True))
        else:
            stem, _, part = full.rpartition(".")
            stem, part = (stem, part) if part in ("weight", "bias") else (full, "weight")
            stem = stem.replace("block_sparse_moe.router", "mlp.gate").replace("block_sparse_moe", "mlp")
            name = known.get_name(stem) or known.get_name(stem.partition(".")[2]) or f"none.{full}"
            pieces = {f"{name}.{part}": rows(full, weight, config)}
        for name, piece in pieces.items():
            numbers = piece.contiguous().numpy().astype(np.float32)
            if piece.dim() < 2:
                writer.add_tensor(name, numbers)
                continue
            blocks = blocks_of(numbers, kind)
            writer.add_tensor(name, blocks, raw_dtype=kind)
            found[full] = torch.from_numpy(gguf.dequantize(blocks, kind))
    finish(writer)
    return found
