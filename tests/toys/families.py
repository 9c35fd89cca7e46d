"""Tiny random Hugging Face models, by family."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from slipstream.models.loading.pairings import EMBEDDED

HF_VOCAB = 101
WINDOW = 7  # smaller than the texts of the tests, so that it matters

# The names under which families know their sizes.
NO_TOKENS = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
LLAMA: dict[str, Any] = {"vocab_size": HF_VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.2}
LLAMA |= NO_TOKENS
GPT: dict[str, Any] = {"vocab_size": HF_VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
GPT |= {"initializer_range": 0.2, **NO_TOKENS}
MOE = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
MIXED = ["sliding_attention", "full_attention"]


@dataclass(frozen=True)
class Family:
    """A configuration class of transformers and what to change in its sizes."""

    config: str
    base: dict[str, Any]
    changes: dict[str, Any]


def _llama(config: str, **changes: Any) -> Family:
    return Family(config, LLAMA, changes)


def _gpt(config: str, **changes: Any) -> Family:
    return Family(config, GPT, changes)


FAMILIES: dict[str, Family] = {
    "llama": _llama("LlamaConfig"),
    "mistral": _llama("MistralConfig", sliding_window=WINDOW),
    "qwen2": _llama("Qwen2Config", use_sliding_window=True, sliding_window=WINDOW, layer_types=MIXED),
    "qwen3": _llama("Qwen3Config", use_sliding_window=True, sliding_window=WINDOW, layer_types=MIXED, head_dim=8),
    "gemma2": _llama("Gemma2Config", sliding_window=WINDOW, layer_types=MIXED, head_dim=8, query_pre_attn_scalar=8),
    "gemma3": _llama("Gemma3TextConfig", sliding_window=WINDOW, layer_types=MIXED, head_dim=8),
    "phi": _llama("PhiConfig"),
    "phi3": _llama("Phi3Config", sliding_window=WINDOW),
    "gpt2": _gpt("GPT2Config"),
    "gpt_neox": _llama("GPTNeoXConfig"),
    "opt": _llama("OPTConfig", ffn_dim=48, word_embed_proj_dim=32),
    "falcon_new": _llama("FalconConfig", new_decoder_architecture=True, num_kv_heads=2, alibi=False),
    "falcon_multi_query": _llama("FalconConfig", new_decoder_architecture=False, multi_query=True, alibi=False),
    "mixtral": _llama("MixtralConfig", sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2),
    "qwen2_moe": _llama(
        "Qwen2MoeConfig",
        use_sliding_window=True,
        sliding_window=WINDOW,
        layer_types=MIXED,
        shared_expert_intermediate_size=24,
        **MOE,
    ),
}
"""The families that are accepted without a probe."""

PROBED: dict[str, Family] = {
    "stablelm": _llama("StableLmConfig"),
    "gemma": _llama("GemmaConfig", head_dim=8),
    "cohere": _llama("CohereConfig"),
    "cohere2": _llama("Cohere2Config", sliding_window=WINDOW, layer_types=MIXED),
    "olmo2": _llama("Olmo2Config"),
    "starcoder2": _llama("Starcoder2Config", sliding_window=WINDOW),
    "gptj": _gpt("GPTJConfig", rotary_dim=4),
    "gpt_bigcode": _gpt("GPTBigCodeConfig"),
    "codegen": _gpt("CodeGenConfig", rotary_dim=4),
    "granite": _llama("GraniteConfig"),
    "smollm3": _llama("SmolLM3Config", no_rope_layers=[1, 0]),
    "qwen3_moe": _llama("Qwen3MoeConfig", head_dim=8, **MOE),
    "olmoe": _llama("OlmoeConfig", num_experts=4, num_experts_per_tok=2),
    "gpt_oss": _llama(
        "GptOssConfig",
        sliding_window=WINDOW,
        layer_types=MIXED,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "llama4": _llama(
        "Llama4TextConfig",
        attention_chunk_size=WINDOW,
        layer_types=["chunked_attention", "full_attention"],
        head_dim=8,
        intermediate_size_mlp=48,
        num_local_experts=2,
        no_rope_layers=[1, 0],
    ),
}
"""Families that `probe` decides about."""

T5: dict[str, Any] = {"vocab_size": HF_VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
T5 |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 12}  # less than our texts have
T5 |= {"initializer_factor": 1.5, "tie_word_embeddings": False}
T5 |= {"decoder_start_token_id": 2, "pad_token_id": 0, "eos_token_id": None}

BART: dict[str, Any] = {"vocab_size": HF_VOCAB, "d_model": 32, "max_position_embeddings": 128, "init_std": 0.5}
SIDE = {"layers": 2, "attention_heads": 4, "ffn_dim": 48}
BART |= {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in SIDE.items()}
BART |= {**NO_TOKENS, "tie_word_embeddings": False, "decoder_start_token_id": 2, "pad_token_id": 1}
BART |= {"forced_eos_token_id": None}

WHISPER = {
    **{name: size for name, size in BART.items() if name not in {"max_position_embeddings", "forced_eos_token_id"}},
    "max_target_positions": 128,
    "max_source_positions": 20,
    "num_mel_bins": 8,
}

SEQ2SEQ: dict[str, Family] = {
    "t5": Family("T5Config", T5, {"tie_word_embeddings": True}),
    "t5_gated": Family("T5Config", T5, {"feed_forward_proj": "gated-gelu"}),
    "mt5": Family("MT5Config", T5, {}),
    "umt5": Family("UMT5Config", T5, {}),
    "bart": Family("BartConfig", BART, {}),
    "mbart": Family("MBartConfig", BART, {}),
    "marian": Family("MarianConfig", BART, {"decoder_vocab_size": HF_VOCAB, "share_encoder_decoder_embeddings": False}),
    "m2m_100": Family("M2M100Config", BART, {}),
    "pegasus": Family("PegasusConfig", BART, {}),
    "whisper": Family("WhisperConfig", WHISPER, {}),
}
"""Encoder-decoders that are accepted without a probe."""


def tiny(family: Family, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """A random model of a family with two layers."""
    config = getattr(transformers, family.config)(**{**family.base, **family.changes, **changes})
    torch.manual_seed(seed)
    kind = transformers.AutoModelForCausalLM
    if config.is_encoder_decoder:
        speaks = config.model_type == "whisper"
        kind = transformers.AutoModelForSpeechSeq2Seq if speaks else transformers.AutoModelForSeq2SeqLM
    model = kind.from_config(config, dtype=dtype)
    return model.eval()


@cache
def embedded(name: str) -> PreTrainedModel:
    """A model of the embedded pair, in float32, for tests that leave it as it is."""
    return transformers.AutoModelForCausalLM.from_pretrained(EMBEDDED / name, dtype=torch.float32).eval()
