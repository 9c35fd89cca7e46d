"""What the metadata of a .gguf file say of a model: its configuration and its generation settings."""

import math
import re
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig
from transformers.integrations.gguf import GGUF_CONFIG_ARCHS

from slipstream.models.loading.gguf_file import EMBEDDINGS, TOKENS, GgufFile


class Family(NamedTuple):
    """A family of llama.cpp: its `kind` in transformers, and what llama.cpp's `layout` of its weights changes.
    Without a kind, its configuration is what transformers reads of the file."""

    kind: str = ""
    layout: str = ""


SAME = ("qwen2", "qwen3", "phi3", "starcoder2", "stablelm", "mistral", "olmo2", "olmoe", "cohere2", "glm4")
ROTATED = "rotated"  # interleaves the halves of what is rotated
GROUPED = "grouped"  # stores queries, keys and values one after another, where transformers groups them by heads
TRANSPOSED, RAISED = "transposed", "raised"  # stores matrices the other way round; the weights of norms plus one
FAMILIES = {  # the families that are read here
    **{name: Family(name) for name in (*SAME, "ernie4_5", "seed_oss", "exaone4", "mamba")},
    **{name: Family(name, ROTATED) for name in ("llama", "granite", "granitemoe", "olmo", "arcee", "smollm3")},
    "gpt2": Family("gpt2", TRANSPOSED),
    **{name: Family(name, RAISED) for name in ("nemotron", "gemma", "gemma2")},
    "gemma3": Family("gemma3_text", RAISED),
    "qwen2moe": Family("qwen2_moe"),
    "qwen3moe": Family("qwen3_moe"),
    "command-r": Family("cohere"),
    "chatglm": Family("glm"),
    "falcon": Family("falcon", GROUPED),
    "bloom": Family("bloom", GROUPED),
    "gptneox": Family("gpt_neox", GROUPED),
    "hunyuan-dense": Family("hunyuan_v1_dense"),
    "phi2": Family("phi"),
    "gemma4": Family("gemma4_text"),
    **dict.fromkeys(("lfm2", "minimax-m2"), Family()),
}
OTHERS = {"t5", "t5encoder", *GGUF_CONFIG_ARCHS} - FAMILIES.keys()
"""Families that are left to transformers."""

SETTINGS = {  # what the metadata tell: llama.cpp's name, and those that the setting has in transformers' families
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size n_inner ffn_hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads num_kv_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps norm_eps layer_norm_epsilon",
    "attention.layer_norm_epsilon": "layer_norm_eps layer_norm_epsilon norm_epsilon norm_eps",
    "attention.sliding_window": "sliding_window",  # 0: none
    "attention.scale": "attention_multiplier",
    "attention.clamp_kqv": "clip_qkv",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling logit_scale",
    "use_parallel_residual": "use_parallel_residual",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "expert_count": "num_local_experts num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "ssm.conv_kernel": "conv_kernel",
    "ssm.inner_size": "intermediate_size",
    "ssm.state_size": "state_size",
    "ssm.time_step_rank": "time_step_rank",
}
FACTORS = {"clip_qkv", "logits_scaling logit_scale"}
FACTORS |= {f"{each}_multiplier" for each in ("attention", "embedding", "residual")}
"""Settings that no model may be read without that has them."""

PARTS = {  # what the tensors tell: an expression that one of their names matches, and the settings that this switches
    r"attn_q(kv)?\.bias": "attention_bias use_qkv_bias use_bias bias",
    r"attn_output\.bias": "attention_out_bias",
    r"ffn_up\.bias": "mlp_bias",
    r"attn_q_norm\.": "use_qk_norm",
    r"attn_norm_2\.": "new_decoder_architecture",
}

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
    if name in OTHERS or FAMILIES.get(name) == Family():
        config = AutoConfig.from_pretrained(place.parent, gguf_file=place.name)
    elif name in FAMILIES:
        kind = _kind(file)
        config = AutoConfig.for_model(kind, **_values(file, AutoConfig.for_model(kind)))
    else:
        raise ValueError(
            f"it is of the family {name!r}, which is not read from .gguf files: take the model in safetensors, and "
            "quantize='int4' if it is to be small"
        )
    config.name_or_path = str(place)
    return config


def _kind(file: GgufFile) -> str:
    """Return transformers' name of a model's family, of which llama.cpp has one for some that differ in a part."""
    if file.architecture == "llama" and file.value("expert_count"):
        return "mixtral"
    if file.architecture == "olmo2" and file.value("attention.sliding_window"):
        return "olmo3"
    return FAMILIES[file.architecture].kind


def _values(file: GgufFile, usual: PreTrainedConfig) -> dict[str, Any]:
    """Return the settings that a file gives its model, by their names in the `usual` configuration of its family."""
    family, tensors = file.architecture, file.tensors
    if EMBEDDINGS not in tensors:
        raise ValueError("it has no embeddings of tokens: it holds a vocabulary, or a part of a model")
    for key in ("block_count", "embedding_length", "attention.head_count"):
        if file.value(key) is None:
            raise ValueError(f"its metadata do not tell {family}.{key}: take another copy, or convert it again")
    given = {names: file.value(key) for key, names in SETTINGS.items() if file.value(key) not in (None, [])}
    given |= {"sliding_window": None} if given.get("sliding_window") == 0 else {}
    given |= {names: any(re.search(part, each) for each in tensors) for part, names in PARTS.items()}
    values: dict[str, Any] = {"vocab_size": tensors[EMBEDDINGS].shape[0]}
    values["tie_word_embeddings"] = "output.weight" not in tensors
    wide = file.value("feed_forward_length")
    if family == "gemma4" and isinstance(wide, list) and set(wide) == {min(wide), 2 * min(wide)}:
        given[SETTINGS["feed_forward_length"]], values["use_double_wide_mlp"] = min(wide), True
    for names, value in given.items():  # of the names that a setting may have, the family has one, or none
        known = [name for name in names.split() if hasattr(usual, name)][:1]
        if known and isinstance(value, list):
            raise ValueError(f"its layers differ in {known[0]} ({', '.join(map(str, value))}), which is not read")
        if not known and names in FACTORS and value not in (0, 1):
            raise ValueError(f"it tells {names.split()[0]} ({value}), which models of its family ({family}) lack")
        values |= {usual.attribute_map.get(name, name): value for name in known}
    values |= {f"{role}_token_id": file.special(key) for key, role in SPECIAL.items()}
    if isinstance(pattern := file.value("attention.sliding_window_pattern"), list):
        values["layer_types"] = ["sliding_attention" if each else "full_attention" for each in pattern]
    heads, size = file.value("attention.head_count") or 1, file.value("embedding_length")
    width = file.value("attention.key_length", size // heads)
    if usual_rotation := getattr(usual, "rope_parameters", None):
        values["rope_parameters"] = _rotations(file, usual_rotation, width)
    if family == "falcon":
        return values | {"multi_query": file.value("attention.head_count_kv") == 1, "tie_word_embeddings": True}
    if family in ("gemma2", "gemma3"):  # llama.cpp tells the largest ones, with another scale, by their layers
        values["query_pre_attn_scalar"] = size // heads if file.value("block_count") in (46, 62) else width
    if family == "gemma4":
        own = file.value("attention.key_length_swa", width)
        return values | {"head_dim": own, "global_head_dim": width, "vocab_size_per_layer_input": values["vocab_size"]}
    if family == "stablelm":
        values["use_parallel_residual"] = not any("ffn_norm" in each for each in tensors)
    if family == "qwen3moe":
        values["norm_topk_prob"] = True
    return values | ({"head_dim": width} if heads > 1 else {})


def _rotations(file: GgufFile, usual: dict[str, Any], width: int) -> dict[str, Any]:
    """Return how a model with heads of this `width` rotates, for each kind of its layers where the family has two."""
    base, count = float(file.value("rope.freq_base", 10000.0)), file.value("rope.dimension_count")
    found = {"rope_type": "default", "rope_theta": base, **_stretching(file)}
    if "sliding_attention" in usual:  # stretched only where the whole text is seen
        local = float(file.value("rope.freq_base_swa", 10000.0 if file.architecture == "gemma3" else base))
        found = {**usual["full_attention"], "rope_theta": base} if file.architecture == "gemma4" else found
        return {"sliding_attention": {"rope_type": "default", "rope_theta": local}, "full_attention": found}
    return found | ({"partial_rotary_factor": count / width} if count and "partial_rotary_factor" in usual else {})


def _stretching(file: GgufFile) -> dict[str, Any]:
    """Return how a model's rotations are stretched for long texts, by transformers' names; nothing if they are not."""
    if "rope_freqs.weight" in file.tensors and file.architecture != "gemma4":  # whose ones are a part that rotates
        return _llama3(_floats(file, "rope_freqs.weight"), float(file.value("rope.freq_base", 10000.0)))
    original = file.value("rope.scaling.original_context_length")
    if "rope_factors_long.weight" in file.tensors:
        factors = {f"{of}_factor": _floats(file, f"rope_factors_{of}.weight").tolist() for of in ("long", "short")}
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
    settings: dict[str, Any] = {"bos_token_id": file.special("bos"), "pad_token_id": file.special("padding")}
    ends = {file.special(each) for each in ("eos", "eot", "eom")}
    ends |= {number for number, token in enumerate(metadata.get(TOKENS, ())) if token in ENDS}
    settings["eos_token_id"] = sorted(each for each in ends if each is not None) or None
    sampling = {name: metadata.get(f"general.sampling.{key}") for key, name in SAMPLING.items()}
    sampling = {name: value for name, value in sampling.items() if value is not None}
    return GenerationConfig(**settings, **sampling, **({"do_sample": True} if sampling else {}))
