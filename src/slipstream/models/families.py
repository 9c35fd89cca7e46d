"""The models that can be used, and facts about them: those that ignore positions and masks, say, are refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from slipstream.core.protocols import HasModel, Scorer
from slipstream.core.source import Source
from slipstream.core.values import first_sentence
from slipstream.execution.passes import Sight, mask_kinds
from slipstream.kernels.attention import NAME as ATTENTION
from slipstream.kernels.placement import is_sharded

LENGTH_LAYERS = {
    *("full_attention", "sliding_attention", "chunked_attention", "indexed_attention", "attention", "mlp", "moe")
}
"""The kinds of layers that roll back by a length: they keep keys and values of every token, or nothing.

Keys of an indexer count as keys.
"""

STATEFUL = "keeps a state that cannot be rolled back to an earlier token"


# Classes covered by the contract tests; any other one has to pass `probe` when it is wrapped. One configuration may
# belong to several classes, such as BartForCausalLM and BartForConditionalGeneration, with code of their own.
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

LONGEST_TRIAL = 2304
"""The most tokens of a trial: windows, and selections of the best keys, up to about this size are crossed."""


def is_proven(model: PreTrainedModel) -> bool:
    kind = type(model)
    return not is_sharded(model) and kind.__name__ in PROVEN and kind.__module__.startswith("transformers.")


class Probed(HasModel, Protocol):
    """A Scorer that can also run its model without our cache."""

    def alone(self, text: Sequence[int], source: Source | None = None) -> Tensor:
        """Return the logits (1, n, vocab) of one text by the model's own forward."""


def refuse_dependence_on_passes(config: Any, name: str) -> None:
    """Raise ValueError for a model whose logits depend on how a text is divided into passes, by its text configuration.
    Often by less than a trial could tell from rounding."""
    if getattr(config, "recurrent_kv_cache_mode", None) == "last_loop":
        raise ValueError(
            f"{name} keeps the keys of its last loop only, so that earlier loops see other keys of the tokens in a "
            "pass than of those before it, and logits depend on how a text is divided; use another model."
        )


def refuse_unsupported(model: PreTrainedModel, name: str) -> None:
    config = model.config.get_text_config()
    refuse_dependence_on_passes(config, name)
    types = set(getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ())
    unsupported = sorted(map(str, types - LENGTH_LAYERS))
    if unsupported:
        raise ValueError(f"{name} has layers of type {', '.join(unsupported)}, which {STATEFUL}; use another model.")
    # transformers marks whole families, also models without such a layer; so the list of layer types decides, if given.
    if getattr(model, "_is_stateful", False) and not types:
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
    """Compare ragged rows, wrong drafts and rollbacks with fresh forwards of each text alone.

    Two rows are equally long, one is longer than every window up to `LONGEST_TRIAL` tokens, and one crosses it in the
    last tokens. Raises ValueError if logits differ by more than rounding: the model, of type `kind`, does not obey
    positions, mask or cache.
    """
    lengths = trial_lengths(windows_of(scorer.model.config.get_text_config()), scorer.context)
    texts = [trial_text(scorer.vocab, length, place) for place, length in enumerate(lengths)]
    sources = [form.example(3 + 3 * r) if (form := scorer.source_form) else None for r in range(len(texts))]
    try:
        scorer.add(len(texts), sources)
        ours = _drafted_wrong(scorer, texts)
        alone = [scorer.alone(text, source)[:, [-2, -1] * 2] for text, source in zip(texts, sources, strict=True)]
    except Exception as error:
        reason = f"{type(error).__name__}: {first_sentence(error)}"
        raise ValueError(f"{scorer.name} ({kind}) does not run with our cache: {reason}") from error
    expected = torch.cat([logits.to(ours.device) for logits in alone]).float()
    gap, allowed = spread_gap(ours.float(), expected), allowed_gap(ours.dtype)
    if not gap <= allowed:
        raise ValueError(
            f"{scorer.name} ({kind}) gives other logits with a rolled-back cache "
            f"(difference {gap:.2g} standard deviations, rounding explains {allowed}); it cannot be used."
        )


def _drafted_wrong(scorer: Scorer, texts: Sequence[Sequence[int]]) -> Tensor:
    """Return the logits (rows, 4, vocab) of the last two tokens of each text, fed in one pass and then in two, after
    rolling back wrong drafts. In the first row drafts are wrong from their first token on, in the others after it."""
    wrong = scorer.vocab - 1

    def feed(rows: Sequence[Sequence[int]], counts: Sequence[int]) -> Tensor:
        return scorer.extend(torch.tensor(rows, device=scorer.device), counts)

    scorer.prefill([text[:-3] for text in texts])
    feed([[text[-3], wrong, wrong, wrong] for text in texts], [1, *(2 + place % 3 for place in range(1, len(texts)))])
    scorer.rollback([len(text) - 2 for text in texts])
    feed([[wrong, wrong] for _ in texts], [2] * len(texts))
    scorer.rollback([len(text) - 2 for text in texts])
    at_once = feed([text[-2:] for text in texts], [2] * len(texts))
    scorer.rollback([len(text) - 2 for text in texts])
    return torch.cat([at_once, *(feed([[text[at]] for text in texts], [1] * len(texts)) for at in (-2, -1))], 1)


def trial_lengths(windows: set[int], context: int | None) -> list[int]:
    crossed = sorted(window for window in windows if 1 < window <= LONGEST_TRIAL)
    lengths = [6, 12, 12, *(window + 1 for window in crossed), *(window + 9 for window in crossed[-1:])]
    return [min(length, context or length) for length in lengths]


def trial_text(vocab: int, length: int, place: int = 0) -> list[int]:
    low = min(4, vocab // 2)  # the first tokens are often padding, which some models count differently
    return [low + (7 * i + 3 * place) % (vocab - low) for i in range(length)]


def spread_gap(ours: Tensor, expected: Tensor) -> float:
    """Return the greatest difference of logits, in standard deviations; tokens impossible in both count as equal."""
    difference = torch.where((ours == -math.inf) & (expected == -math.inf), 0, ours - expected).abs().max()
    return float(difference / expected[expected.isfinite()].std())


def allowed_gap(dtype: torch.dtype) -> float:
    """Return how far apart logits of this type may be by rounding, in standard deviations."""
    return 0.01 if dtype in {torch.float32, torch.float64} else 0.3


LOOKS_BACK = {"attention_chunk_size", "local_attention", "index_topk", "indexer_budget"}
"""The names of settings that limit how far a layer looks back, but do not contain "window"."""


def windows_of(config: Any) -> set[int]:
    """Return every number of tokens that some layer is limited to, found by the names of settings."""
    return {
        value
        for name, value in config.to_dict().items()
        if isinstance(value, int) and ("window" in name or name in LOOKS_BACK)
    }


def longest_text(config: Any) -> int | None:
    """Return the longest text: `max_position_embeddings`, or the length from which longrope turns all tokens otherwise,
    also cached ones and those of other rows."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [kind for kind in (rope, *rope.values()) if isinstance(kind, dict) and kind.get("rope_type") == "longrope"]
    limits = [getattr(config, name, None) for name in ("max_position_embeddings", "max_target_positions")]
    limits += [kind["original_max_position_embeddings"] for kind in kinds]
    return min((limit for limit in limits if limit), default=None)


@dataclass(frozen=True)
class ModelFacts:
    """Sizes and properties of a model, read once from its configuration.

    `vocab` is the size of the logits. `context` is the longest text: `max_position_embeddings`, or the length before
    longrope would turn cached keys differently; None if there is no limit. `kinds` say what layers see, by their type.
    `relative`: the decoder has a bias by distance. `proven`: the model's class is covered by the contract tests.
    `drops_logits`: it can skip computing logits that are not needed.
    """

    vocab: int
    context: int | None
    dtype: torch.dtype
    kinds: dict[str, Sight]
    relative: bool
    proven: bool
    drops_logits: bool

    @staticmethod
    def of(model: PreTrainedModel, relative: bool = False) -> ModelFacts:
        config = model.config.get_text_config()
        return ModelFacts(
            vocab=vocabulary_of(model),
            context=longest_text(config),
            dtype=model.dtype,
            kinds=mask_kinds(config),
            relative=relative,
            proven=is_proven(model),
            drops_logits=model._supports_logits_to_keep(),  # it inspects signatures: too slow for every pass
        )

    def within(self, window: int, sinks: int) -> ModelFacts:
        return replace(self, kinds={kind: sight.within(window, sinks) for kind, sight in self.kinds.items()})


def vocabulary_of(model: PreTrainedModel) -> int:
    head = model.get_output_embeddings()
    return int(getattr(head, "out_features", None) or model.config.get_text_config().vocab_size)
