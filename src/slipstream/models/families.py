"""Which models can be used: what cannot be rolled back, or ignores positions and masks, is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from slipstream.core.protocols import Scorer
from slipstream.core.source import Source
from slipstream.kernels.attention import NAME as ATTENTION

ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
STATEFUL = "keeps a state that cannot be rolled back to an earlier token"


# Classes covered by the contract tests; any other one has to pass `probe` when it is wrapped. Of one configuration
# there may be several classes, as BartForCausalLM beside BartForConditionalGeneration, with code of their own.
PROVEN = frozenset(
    {
        *("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Gemma2ForCausalLM"),
        *("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration", "PhiForCausalLM", "Phi3ForCausalLM"),
        *("GPT2LMHeadModel", "GPTNeoXForCausalLM", "OPTForCausalLM", "FalconForCausalLM", "MixtralForCausalLM"),
        *("Qwen2MoeForCausalLM", "T5ForConditionalGeneration", "MT5ForConditionalGeneration"),
        *("UMT5ForConditionalGeneration", "BartForConditionalGeneration", "MBartForConditionalGeneration"),
        *("MarianMTModel", "M2M100ForConditionalGeneration", "PegasusForConditionalGeneration"),
        "WhisperForConditionalGeneration",
    }
)

LONGEST_TRIAL = 1024
"""Tokens of a trial at most: it crosses windows up to this size."""


def is_proven(model: PreTrainedModel) -> bool:
    """Whether the contract tests cover the model's class, and it is transformers' own."""
    kind = type(model)
    return kind.__name__ in PROVEN and kind.__module__.startswith("transformers.")


class Probed(Scorer, Protocol):
    """A Scorer that can also run its model without our cache."""

    def alone(self, text: Sequence[int], source: Source | None = None) -> Tensor:
        """The logits (1, n, vocab) of one text by the model's own ways."""
        ...


def refuse_unsupported(model: PreTrainedModel, name: str) -> None:
    """Raises ValueError in one sentence for models that are known not to work."""
    config = model.config.get_text_config()
    types = set(getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ())
    alien = sorted(map(str, types - ATTENTION_LAYERS - {"attention"}))
    if alien:
        raise ValueError(f"{name} has layers of type {', '.join(alien)}, which {STATEFUL}; use another model.")
    if getattr(model, "_is_stateful", False):
        raise ValueError(f"{name} ({config.model_type}) {STATEFUL}; use another model.")
    if config.model_type in {"bloom", "mpt"} or getattr(config, "alibi", False):
        raise ValueError(f"{name} uses ALiBi, whose bias cannot follow rows of different lengths; use another model.")
    if "local" in (getattr(config, "attention_layers", None) or ()):
        raise ValueError(
            f"{name} ({config.model_type}) counts its local attention from the longest row, so rows of different "
            "lengths would see too little; use another model."
        )
    kernel = getattr(config, "_attn_implementation", None)
    if kernel not in {"sdpa", "eager", ATTENTION, None}:
        raise ValueError(f"{name} uses attn_implementation={kernel!r}, which takes no mask; load it with 'sdpa'.")


@torch.inference_mode()
def probe(scorer: Probed, kind: str) -> None:
    """Compare extend, rollback and ragged rows with fresh forwards on a few tokens.

    Raises ValueError if they differ by more than rounding: the model, of type `kind`, does not obey positions, mask
    or cache.
    """
    half = min(12, (scorer.context or 12)) // 2
    texts = [[(7 * i + 3 * r + 1) % scorer.vocab for i in range(half + half * r)] for r in range(2)]
    sources = [form.example(3 + half * r) if (form := scorer.source_form) else None for r in range(2)]
    wrong = torch.zeros(2, 3, dtype=torch.long, device=scorer.device)
    try:
        scorer.add(2, sources)
        scorer.prefill([text[:-2] for text in texts])
        scorer.extend(wrong, [1, 2])
        scorer.rollback([len(text) - 2 for text in texts])
        ours = scorer.extend(torch.tensor([text[-2:] for text in texts], device=scorer.device), [2, 2])
        alone = [scorer.alone(text, source) for text, source in zip(texts, sources, strict=True)]
    except Exception as error:
        reason = f"{type(error).__name__}: {first_sentence(error)}"
        raise ValueError(f"{scorer.name} ({kind}) does not run with our cache: {reason}") from error
    theirs = torch.cat([logits[:, -2:].to(ours.device) for logits in alone]).float()
    gap = float((ours.float() - theirs).abs().max() / theirs.std())
    allowed = 0.01 if ours.dtype in {torch.float32, torch.float64} else 0.3
    if not gap <= allowed:
        raise ValueError(
            f"{scorer.name} ({kind}) gives other logits with a rolled-back cache "
            f"(difference {gap:.2g} standard deviations, rounding explains {allowed}); it cannot be used."
        )


def longest_text(config: Any) -> int | None:
    """The longest text, from `max_position_embeddings`, or before longrope would turn cached keys differently."""
    names = ("max_position_embeddings", "max_target_positions")
    limits = (*(getattr(config, name, None) for name in names), longrope_switch(config))
    return min((limit for limit in limits if limit), default=None)


def longrope_switch(config: Any) -> int | None:
    """The length beyond which longrope changes the rotation of all tokens, of the cached ones and of other rows too."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [kind for kind in (rope, *rope.values()) if isinstance(kind, dict) and kind.get("rope_type") == "longrope"]
    return min((kind["original_max_position_embeddings"] for kind in kinds), default=None)


def first_sentence(error: Exception) -> str:
    """The first line of a message that may have many."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
