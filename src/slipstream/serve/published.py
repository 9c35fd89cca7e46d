"""Fields that clients send and this server does not act on, with the values that change nothing.

OpenAI, vLLM, SGLang, llama.cpp and the clients of each publish them. With a value that is listed, a field is accepted,
and named in a header of the answer; any other value would change the answer, and is refused.
"""

from typing import Any

Others = dict[str, tuple[Any, ...] | None]  # the values that change nothing: (): none, None: all


def _any(names: str) -> Others:
    return dict.fromkeys(names.split())


def _only(values: tuple[Any, ...], names: str) -> Others:
    return dict.fromkeys(names.split(), values)


_DECORATION: Others = _any("cache_control provider_specific_fields extra_content")  # which client libraries add
REQUEST: Others = {  # those of /v1/completions and /v1/chat/completions
    **_any("user store metadata service_tier safety_identifier prompt_cache_key prompt_cache_retention request_id rid"),
    **_any("provider_specific_fields keep_alive ttl id_slot guided_decoding_backend draft_model"),
    **_any("mirostat_tau mirostat_eta dynatemp_exponent dry_base dry_allowed_length dry_penalty_last_n n_keep"),
    **_any("dry_sequence_breakers xtc_threshold speculative.n_max speculative.n_min speculative.p_min adaptive_decay"),
    **_any("session_id extra_key custom_labels routed_experts_prompt_start routed_experts_start_len return_mm_kwargs"),
    **_any("return_token_offsets bootstrap_host bootstrap_port bootstrap_room routed_dp_rank disagg_prefill_dp_rank"),
    **_any("data_parallel_rank n_cache_reuse sse_ping_interval backend_sampling truncation_side prompt_cache_options"),
    **_only((True,), "skip_special_tokens spaces_between_special_tokens separate_reasoning stream_reasoning"),
    **_only((True,), "detokenize"),
    **_only((False,), "include_stop_str_in_output return_token_ids return_tokens_as_token_ids return_hidden_states"),
    **_only((False,), "return_prompt_text return_routed_experts return_cached_tokens_details watermarking"),
    **_only((False,), "no_stop_trim return_tokens return_progress post_sampling_probs return_prompt_logprobs"),
    **_only((0,), "mirostat dynatemp_range dry_multiplier xtc_probability n_probs min_keep n_indent top_a"),
    **_only((1,), "tfs_z guidance_scale n_cmpl"),
    **_only((-1,), "adaptive_target reasoning_budget_tokens"),
    **_only(([], {}), "logits_processors lora documents allowed_token_ids vllm_xargs transforms plugins"),
    **_only((), "prompt_logprobs truncate_prompt_tokens logprob_token_ids guided_whitespace_pattern grammar"),
    **_only((), "repeat_last_n samplers ebnf stop_regex lora_path t_max_predict_ms"),
    **_only(
        (), "ec_transfer_params kv_transfer_params session_params custom_params repetition_detection multimodal_data"
    ),
    **_only((), "stop_token top_n_sigma random_seed generation_config options extra_body custom_logit_processor"),
}

COMPLETION: Others = _only((True,), "add_special_tokens")
INFILL: Others = _any("samplers n_indent t_max_prompt_ms")  # from editor plugins
EXTRA_FILE: Others = _any("time")

CHAT: Others = {
    **_only((["text"],), "modalities"),
    **_only(([],), "functions"),
    **_only(("none", "auto"), "function_call"),
    **_only(("medium",), "verbosity"),
    **_only((False,), "add_special_tokens echo use_beam_search safe_prompt web_search thinking_forced_open"),
    **_only((True,), "include_reasoning parse_tool_calls"),
    **_only((1,), "best_of"),
    **_only((), "audio web_search_options moderation thinking enable_thinking thinking_token_budget chat_template"),
    **_only((), "mm_processor_kwargs media_io_kwargs reasoning length_penalty early_stopping"),
    **_any("reasoning_format"),
}

TOKENIZE: Others = {**_only((True,), "parse_special"), **_only((), "chat_template mm_processor_kwargs")}
STREAM_OPTIONS: Others = _any("include_obfuscation")
PART: Others = _DECORATION | _any("annotations logprobs id index prompt_cache_breakpoint")

MESSAGE: Others = {
    **_DECORATION,
    **_any("annotations id index status parsed thinking_blocks reasoning_details object created metadata"),
    **_only(([], {}), "images documents"),
    **_only((False,), "prefix partial"),
    **_only(("message", "text"), "type"),
    **_only((), "audio function_call"),
}

TOOL: Others = {  # those of tools, of calls of tools, and of their functions
    **_DECORATION,
    **_any("index parsed_arguments defer_loading eager_input_streaming allowed_callers input_examples output_schema"),
    **_only((False,), "async"),
}

RESPONSES: Others = {  # those of /v1/responses
    **_any("user service_tier safety_identifier prompt_cache_key prompt_cache_retention prompt_cache_options"),
    **_any("stream_options client_metadata background_options access_programs"),
    **_only(("auto", "disabled"), "truncation"),
    **_only(([], ["reasoning.encrypted_content"]), "include"),
    **_only((False,), "background"),
    **_only((0,), "top_logprobs"),
    **_only((), "conversation prompt max_tool_calls context_management moderation image"),
}

# of content in /v1/messages
BLOCK: Others = _DECORATION | _any("citations caller toolset_name is_error") | _only(({},), "transformations")
THINKING: Others = _any("budget_tokens display block_binding")  # the model decides how long
MESSAGES: Others = {  # those of /v1/messages
    **_any("metadata service_tier inference_geo betas anthropic_beta user speed"),
    **_any("cache_control diagnostics user_profile_id workspace_id billing_policy fallbacks fallback_credit_token"),
    **_only(([],), "mcp_servers"),
    **_only(({"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}), "context_management"),
    **_only((), "container compaction thread"),
}

# in the input of /v1/responses
ITEM: Others = _DECORATION | _any("id status phase caller namespace created_by") | _only((False,), "async")
AUDIO: Others = {  # those of the forms of /v1/audio, whose values are texts
    **_any("user"),
    **_only(("auto",), "chunking_strategy"),
    **_only(("false",), "stream"),
    **_only((), "prompt hotwords include[] known_speaker_names[] known_speaker_references[]"),
    **_only((), "seed to_language vad_filter"),
}

TEXT_SETTINGS: Others = _only(("medium",), "verbosity")
REASONING_SETTINGS: Others = _any("summary generate_summary context") | _only(("standard",), "mode")
