"""Facts about a model that are needed to run it on rows of different lengths."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from slipstream.execution.masks import Sight, mask_kinds
from slipstream.models.families import is_proven, longest_text


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

    @property
    def looks_at_distance(self) -> bool:
        """Whether masks depend on the distance between tokens: by a relative bias, or by a limited window."""
        return self.relative or any(sight.limited for sight in self.kinds.values())


def vocabulary_of(model: PreTrainedModel) -> int:
    head = model.get_output_embeddings()
    return int(getattr(head, "out_features", None) or model.config.get_text_config().vocab_size)
