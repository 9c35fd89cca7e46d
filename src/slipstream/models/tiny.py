"""Tiny random models of any architecture of transformers: its default configuration with small sizes.

Sizes have different names in different families; `NAMES` lists the names in use by size. Values of a model type that
have to fit each other are in `OWN`.
"""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

VOCAB = 101
WINDOW = 7  # the size of sliding windows: smaller than the tried texts, so that it has an effect

NAMES: dict[int, str] = {
    VOCAB: "vocab_size src_vocab_size tgt_vocab_size decoder_vocab_size unpadded_vocab_size vocab_size_per_layer_input "
    "ple_vocab_size pronunciation_vocab_size shape_vocab_size ngram_vocab_size_base encoder_hash_byte_group_vocab",
    32: "hidden_size d_model n_embd embedding_size word_embed_proj_dim emb_dim embedding_dim attention_hidden_size "
    "lru_width dim_model input_embedding_size output_embedding_size pronunciation_embed_dim shape_embed_dim "
    "hidden_size_per_layer_input cross_attention_hidden_size mamba_d_ssm ple_embed_dim out_hidden_size "
    "text_hidden_size",
    48: "intermediate_size ffn_dim d_ff dff dim_ff encoder_ffn_dim decoder_ffn_dim feed_forward_size ffn_hidden_size "
    "intermediate_size_mlp dense_intermediate_size d_inner n_inner shared_intermediate_size expert_ffn_hidden_size",
    24: "moe_intermediate_size shared_expert_intermediate_size shared_experts_intermediate_size "
    "moe_shared_expert_intermediate_size",
    128: "max_position_embeddings n_positions n_ctx max_seq_len model_max_length context_length "
    "max_target_positions original_max_position_embeddings",
    20: "max_source_positions",
    16: "index_n_heads q_lora_rank kv_lora_rank qk_head_dim mamba_dt_rank attention_head_dim prompt_mid_dim "
    "mamba_chunk_size chunk_size block_size hc_lowrank ple_embed_per_layer",
    8: "head_dim d_kv d_head dim_head qk_rope_head_dim qk_nope_head_dim v_head_dim kv_channels linear_head_dim "
    "linear_key_head_dim linear_value_head_dim mamba_d_state state_size ssm_state_size query_pre_attn_scalar "
    "mamba_d_head mamba_head_dim index_head_dim swa_head_dim time_step_rank num_mel_bins "
    "attention_head_size relative_attention_num_buckets num_buckets o_lora_rank global_head_dim laurel_rank",
    WINDOW: "sliding_window attention_chunk_size window_size attention_window_size sliding_window_size "
    "local_attention keep_window_size local_attention_window_len swa_window_size attention_window",
    4: "num_hidden_layers n_layer n_layers num_attention_heads n_head n_heads num_heads decoder_attention_heads "
    "encoder_attention_heads attention_heads num_encoder_attention_heads num_decoder_attention_heads rotary_dim "
    "num_experts n_routed_experts num_local_experts moe_num_experts linear_num_value_heads "
    "linear_num_heads mamba_d_conv conv_kernel swa_num_attention_heads num_blocks index_topk_blocks "
    "num_layers index_block_size",
    2: "num_key_value_heads num_kv_heads encoder_layers decoder_layers num_encoder_layers num_decoder_layers "
    "num_experts_per_tok num_experts_per_token moe_topk linear_num_key_heads swa_num_key_value_heads moe_k "
    "mamba_n_groups n_groups attn_layer_period max_window_layers zero_expert_num n_mamba_heads "
    "num_global_key_value_heads",
    1: "n_group topk_group num_expert_group n_shared_experts num_shared_experts attn_layer_offset "
    "first_k_dense_replace num_dense_layers num_kv_shared_layers moe_layer_start_index router_jitter",
    12: "relative_attention_max_distance position_bias_max_distance relative_max_distance index_topk",
    0: "num_nextn_predict_layers num_mtp_layers",
}
SIZES: dict[str, int] = {name: size for size, names in NAMES.items() for name in names.split()}

SETTINGS: dict[str, Any] = {
    "initializer_range": 0.2,
    "init_std": 0.3,
    "is_decoder": True,
    "use_cache": True,
    "embd_pdrop": 0.0,
}

MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_expand": 2}
ZAMBA = {"attention_hidden_size": 64, "attention_head_dim": 16}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
POSITIONS_IN_SECTIONS = (
    "qwen2_vl_text qwen2_5_vl_text glm4v_text glm_ocr_text paddleocr_vl_text cosmos3_edge_text hunyuan_vl_text "
    "ernie4_5_vl_moe_text hy_v4_vl_text"
)
OWN: dict[str, dict[str, Any]] = {  # the values of a model type that have to fit each other
    **dict.fromkeys(POSITIONS_IN_SECTIONS.split(), MROPE),
    "glm4v_moe_text": {
        "rope_parameters": {**MROPE["rope_parameters"], "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5}
    },
    "qwen3_vl_moe_text": {"sliding_window": None},  # the masks of these models have no window
    "qwen3_omni_moe_text": {"sliding_window": None},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 5},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 5},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"] * 2},
    "molmo2_adapter": {"vision_feature_layer": [3, 1]},
    "mistral4": {"head_dim": 16},
    "bamba": {**MAMBA2, "attn_layer_indices": [1, 3]},
    "granitemoehybrid": {**MAMBA2, "layer_types": ["mamba", "attention"] * 2},
    "falcon_h1": {**MAMBA2, "mamba_d_ssm": 64},
    "mamba2": {"num_heads": 8, "head_dim": 8, "expand": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "dbrx": {
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48},
    },
    "zaya": {"num_experts_per_tok": 1},
    "reformer": {"axial_pos_embds_dim": (16, 16), "axial_pos_shape": (8, 16)},
    "zamba": {"layers_block_type": ["linear_attention", "linear_attention", "hybrid", "hybrid"], **ZAMBA},
    "gemma4_text": {"num_kv_shared_layers": 0},
    "gemma4_unified_text": {"num_kv_shared_layers": 0},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "qwen4_exp_text": {
        "indexer_compress_ratio": 4,
        "indexer_budget": 12,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
    },
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("full_attention", "sliding_attention")
        }
    },
    "led": {"attention_window": 8},
    "dory": {"n_input_layers": 1, "n_output_layers": 1},
    "xlstm": {"hidden_size": 64, "embedding_dim": 64, "qk_dim_factor": 1.0},  # its states come in multiples of 64
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "dots3_note_text": {
        "num_key_value_heads": 4,
        "head_dim": 16,
        "moe_shared_expert_intermediate_size": 24,
        **dict.fromkeys(("swa_num_attention_heads", "swa_num_key_value_heads"), 4),
        **dict.fromkeys(("swa_head_dim", "swa_q_lora_rank", "swa_kv_lora_rank"), 16),
        **dict.fromkeys(("swa_qk_nope_head_dim", "swa_qk_rope_head_dim", "swa_v_head_dim"), 8),
    },
    "dots3_note_vision_encoder": {"adapter_in_dim": 32, "adapter_out_dim": 32, "mlp_layer_types": ["dense"] * 4},
    "dots3_note_audio_encoder": {"adapter_input_size": 32, "adapter_out_dim": 32},
    "bailing_hybrid": {"layer_group_size": 2},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2, "mamba_ngroups": 1, "n_mamba_heads": 8, **ZAMBA},
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def tiny_config(kind: type[PreTrainedConfig], **changes: Any) -> PreTrainedConfig:
    return kind(**_small(kind, changes))


def _small(kind: type[PreTrainedConfig], changes: dict[str, Any]) -> dict[str, Any]:
    default = kind()
    default_values, known = default.to_dict(), {**SIZES, **SETTINGS}
    small = {
        name: known[name]
        for name, value in default_values.items()
        if name in known and not isinstance(value, list | dict)
    }
    if default_values.get("kv_lora_rank"):  # all heads share one latent for their keys
        small["num_key_value_heads"] = small["num_attention_heads"]
    for name, token in TOKENS.items():
        if isinstance(default_values.get(name), int) and default_values[name] >= VOCAB:
            small[name] = token
    if "decoder_start_token_id" in default_values or getattr(default, "is_encoder_decoder", False):
        small["decoder_start_token_id"] = 2
    for name in getattr(kind, "sub_configs", None) or {}:
        if isinstance(part := getattr(default, name, None), PreTrainedConfig):
            small[name] = {"model_type": part.model_type, **_small(type(part), {})}
    return {**small, **OWN.get(kind.model_type, {}), **changes}


def tiny_model(kind: type[PreTrainedModel], config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """Return a random model in evaluation mode; a class for texts takes the text part of a configuration of several."""
    if kind.config_class == (getattr(config, "sub_configs", None) or {}).get("text_config"):
        config = config.get_text_config()
    torch.manual_seed(seed)
    model = kind._from_config(config).eval()
    # Padding gets an embedding like any token's: after one of zeros an indexer scores all keys equally, and its choice
    # would depend on how a pass is divided.
    for part in model.modules():
        if isinstance(part, nn.Embedding) and part.padding_idx is not None:
            part.weight.data[part.padding_idx] = part.weight.data[part.padding_idx - 1].roll(1)
    return model
