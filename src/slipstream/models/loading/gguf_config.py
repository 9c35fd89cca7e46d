"""What the metadata of a .gguf file say of a model: its configuration, its generation settings and its tokenizer."""

import math
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedTokenizerFast
from transformers.integrations import GGUF_CONFIG_DEFAULTS_MAPPING, GGUF_CONFIG_MAPPING
from transformers.integrations.gguf import GGUF_CONFIG_ARCHS, GGUF_TOKENIZER_MAPPING, convert_gguf_tokenizer

from slipstream.models.loading.gguf_file import GgufFile

FAMILIES = {  # llama.cpp's families whose metadata are read here, by transformers' names
    **{name: name for name in ("llama", "mistral", "qwen2", "qwen3", "falcon", "phi3", "bloom", "gpt2", "starcoder2")},
    **{name: name for name in ("mamba", "nemotron", "gemma2", "stablelm", "deci")},
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "gemma3": "gemma3_text",
}
OTHERS = {"t5", "t5encoder", "gpt-oss", "gpt_oss", "gemma4", "minimax-m2", *GGUF_CONFIG_ARCHS}
"""Families that are left to transformers."""

ENDS = (  # Tokens that end an answer wherever they are in a vocabulary, as llama.cpp has it
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
    *("<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>", "<|end_of_text|>", "<end_of_utterance>"),
)
SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"} | {
    "penalty_repeat": "repetition_penalty"
}
SPECIAL = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
"""Special tokens: llama.cpp's names and transformers'."""

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""How all Llamas since 3.1 stretch their rotations; a file stores only what follows from it."""


def config_of(file: GgufFile) -> PreTrainedConfig:
    name, place = file.architecture, file.path
    if name in OTHERS:
        config = AutoConfig.from_pretrained(place.parent, gguf_file=place.name)
    elif name in FAMILIES:
        config = AutoConfig.for_model(FAMILIES[name], **_values(file))
    else:
        raise ValueError(
            f"it is of the family {name!r}, which transformers does not read from .gguf files: take the model in "
            "safetensors, and quantize='int4' if it is to be small"
        )
    config.name_or_path = str(place)
    return config


def _values(file: GgufFile) -> dict[str, Any]:
    family, kind = file.architecture, FAMILIES[file.architecture]
    tensors, names = file.tensors, GGUF_CONFIG_MAPPING.get(kind) or GGUF_CONFIG_MAPPING[family]
    values = {name: file.value(key) for key, name in names.items() if name and file.value(key) is not None}
    values |= {
        name: value
        for key, name in GGUF_CONFIG_MAPPING["tokenizer"].items()
        if (value := file.metadata.get(f"tokenizer.{key}")) is not None
    }
    values = dict(GGUF_CONFIG_DEFAULTS_MAPPING.get(kind) or {}) | values
    values.setdefault(
        "vocab_size", len(file.metadata.get("tokenizer.ggml.tokens", ())) or file.tensors["token_embd.weight"].shape[0]
    )
    values["tie_word_embeddings"] = "output.weight" not in tensors or family in ("falcon", "bloom")
    if "head_dim" in values or family in ("qwen2", "qwen3", "phi3", "gemma3"):
        values |= {"head_dim": width} if (width := file.value("attention.key_length")) else {}
    caps = {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"}
    caps |= {"attention.sliding_window": "sliding_window"} if family == "phi3" else {}
    values |= {name: found for key, name in caps.items() if (found := file.value(key)) is not None}
    if family == "stablelm":
        values["use_qkv_bias"] = any(each.endswith("attn_q.bias") for each in tensors)
        values["use_parallel_residual"] = not any("ffn_norm" in each for each in tensors)
    if rotation := _rotation(file):
        base = values.pop("rope_theta", 10000.0)
        values["rope_parameters"] = {"rope_theta": base, **rotation}
    return values


def _rotation(file: GgufFile) -> dict[str, Any]:
    """Return how a model's rotations are stretched for long texts, by transformers' names; nothing if they are not."""
    if "rope_freqs.weight" in file.tensors:
        return _llama3(_floats(file, "rope_freqs.weight"), float(file.value("rope.freq_base", 10000.0)))
    original = file.value("rope.scaling.original_context_length")
    if "rope_factors_long.weight" in file.tensors:
        factors = {
            f"{each}_factor": _floats(file, f"rope_factors_{each}.weight").tolist() for each in ("long", "short")
        }
        attention = file.value("rope.scaling.attn_factor")
        return {
            "rope_type": "longrope",
            **factors,
            "original_max_position_embeddings": original,
            **({"attention_factor": attention} if attention else {}),
        }
    kind, factor = file.value("rope.scaling.type", "none"), file.value("rope.scaling.factor")
    if kind == "none" or not factor:
        return {}
    if kind not in ("linear", "yarn"):
        raise ValueError(f"its rotations are stretched by {kind!r}, and linear, yarn and longrope are known")
    return {"rope_type": kind, "factor": factor} | ({"original_max_position_embeddings": original} if original else {})


def _llama3(factors: Tensor, base: float) -> dict[str, Any]:
    most, count = float(factors.max()), len(factors)
    turns = LLAMA3["original_max_position_embeddings"] / (2 * math.pi * base ** (torch.arange(count) / count))
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    if not torch.allclose(1 / ((1 - smooth) / most + smooth), factors, rtol=1e-3):
        raise ValueError("its rotations are stretched in a way that transformers has no name for (rope_freqs)")
    return {"rope_type": "llama3", "factor": most, **LLAMA3}


def _floats(file: GgufFile, name: str) -> Tensor:
    return file.tensors[name].data.flatten().view(torch.float32)


def generation_config_of(file: GgufFile) -> GenerationConfig:
    """Return the generation settings of a model: the tokens that begin and end texts, and how it is to be sampled."""
    metadata = file.metadata
    special = {role: metadata.get(f"tokenizer.ggml.{key}_token_id") for key, role in SPECIAL.items()}
    settings: dict[str, Any] = {f"{role}_token_id": special[role] for role in ("bos", "pad")}
    ends = {special["eos"], *(metadata.get(f"tokenizer.ggml.{each}_token_id") for each in ("eot", "eom"))}
    ends |= {number for number, token in enumerate(metadata.get("tokenizer.ggml.tokens", ())) if token in ENDS}
    settings["eos_token_id"] = sorted(each for each in ends if each is not None) or None
    sampling = {name: metadata.get(f"general.sampling.{key}") for key, name in SAMPLING.items()}
    sampling = {name: value for name, value in sampling.items() if value is not None}
    return GenerationConfig(**settings, **sampling, **({"do_sample": True} if sampling else {}))


def tokenizer_of(file: GgufFile) -> PreTrainedTokenizerFast:
    parts = {
        part: {
            name: file.metadata[f"tokenizer.{key}"]
            for key, name in names.items()
            if f"tokenizer.{key}" in file.metadata
        }
        for part, names in GGUF_TOKENIZER_MAPPING.items()
    }
    words, settings = parts["tokenizer"], parts["tokenizer_config"]
    if "tokens" not in words:
        raise ValueError("the file holds no tokenizer: pass tokenizer=... as well")
    flags = {name: file.metadata.get(f"tokenizer.ggml.{name}") for name in ("add_bos_token", "add_eos_token")}
    settings.update({name: flag for name, flag in flags.items() if flag is not None})  # older transformers reads none
    if words.get("tokenizer_type") == "llama":
        settings.setdefault("add_bos_token", True)  # as llama.cpp does
    if words.get("tokenizer_type") == "gemma4":
        settings["add_bos_token"] = False  # its chat template begins with the token
    for key, role in SPECIAL.items():
        number = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        settings[f"{role}_token"] = None if number is None else words["tokens"][number]
    backend, more = convert_gguf_tokenizer(file.architecture, words)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **settings, **more)
    tokenizer.name_or_path = str(file.path)  # not before: where there are many tokens, the hub would be asked about it
    return tokenizer
