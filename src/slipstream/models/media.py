"""Prompts with images and sounds: read by the model's own forward, and made of what users pass by its processor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
)

from slipstream.core.media import Media, Modality
from slipstream.kernels.placement import input_device
from slipstream.models.processors import load_processor

Layers = dict[int, tuple[Tensor, Tensor]]
"""Keys and values (heads, count, head_dim) by layer."""

PLACEHOLDERS = {Modality.IMAGE: "image_token", Modality.AUDIO: "audio_token"}
"""How processors call the text of a token that stands for a medium; configurations add `_id` or `_index`."""


@dataclass
class RowMedia:
    """The media of a row, and by how much the positions behind them are shifted, once they were read."""

    media: Media
    shift: int = 0


def modalities_of(model: Any) -> frozenset[Modality]:
    """What a model reads beside text, and takes at once: nothing for encoder-decoders."""
    config = model.config
    if config.is_encoder_decoder:
        return frozenset()
    found = set()
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        found.add(Modality.IMAGE)
    # transformers lists models for text and sound under either of these names
    if type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING or type(config) in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING:
        found |= {each for each in Modality if _placeholder(each, config) is not None}
    return frozenset(found)


def _placeholder(modality: Modality, *places: Any) -> int | None:
    """The id of the token that stands for a medium, by the first of some configurations or processors with one."""
    name = PLACEHOLDERS[modality]
    parts = [getattr(place, part, None) for place in places for part in ("audio_config", "vision_config")]
    found = (getattr(place, f"{name}_{end}", None) for place in (*places, *parts) for end in ("id", "index"))
    return next((token for token in found if isinstance(token, int)), None)


def run_with_media(model: Any, text: Sequence[int], media: Media, **options: Any) -> tuple[Any, int]:
    """A pass over a whole text with its media, called as `generate` calls it -> its output, and by how much the
    positions of later tokens differ from their numbers."""
    counting = [part for part in model.modules() if hasattr(part, "rope_deltas")]
    for part in counting:
        part.rope_deltas = None  # that of another text
    device = input_device(model)
    tokens = torch.tensor([text], device=device)
    arguments = media.arguments(len(text), device, model.dtype)
    out = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), **arguments, **options)
    found = next((part.rope_deltas for part in counting if part.rope_deltas is not None), None)
    return out, 0 if found is None else int(found.flatten()[0])


@torch.inference_mode()
def read_with_media(model: Any, text: Sequence[int], media: Media) -> tuple[Layers, int]:
    """Read a text with its media -> the keys and values of every layer, and the shift of later positions."""
    keep = {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}
    out, shift = run_with_media(model, text, media, use_cache=True, **keep)
    layers = enumerate(out.past_key_values.layers)
    return {place: (layer.keys[0], layer.values[0]) for place, layer in layers if layer.is_initialized}, shift


# ---- processors ----

TokensAndMedia = tuple[tuple[int, ...], Media | None]
"""Token ids, and the media that some of them stand for."""


@dataclass(frozen=True)
class MediaProcessor:
    """Makes what a model reads of texts with images and sounds, by the model's own processor of transformers.

    `placeholders` are the tokens that stand for the kinds of media that it reads.
    """

    processor: Any
    config: Any
    placeholders: Mapping[Modality, int]

    @staticmethod
    def of(source: Any, model: Any) -> MediaProcessor:
        """That of a model with a name, in a folder, or loaded. Raises ValueError if none lies with it."""
        name = source if isinstance(source, str | Path) else model.config.name_or_path
        try:
            processor = load_processor(name)
        except Exception as error:  # of any kind, depending on what lies there and what is installed
            reason = " ".join(str(error).split())
            raise ValueError(f"its processor cannot be loaded: {reason[:300]}") from error
        if not hasattr(processor, "tokenizer"):
            raise ValueError("no processor lies with it")
        return MediaProcessor.with_processor(processor, model)

    @staticmethod
    def with_processor(processor: Any, model: Any) -> MediaProcessor:
        """One that works with a processor of transformers."""
        parts = {Modality.IMAGE: getattr(processor, "image_processor", None), Modality.AUDIO: _ears(processor)}
        found = {
            each: -1 if (token := _placeholder(each, model.config, processor)) is None else token
            for each in modalities_of(model)
            if parts[each] is not None
        }
        return MediaProcessor(processor, model.config, found)

    @property
    def modalities(self) -> frozenset[Modality]:
        """What can be read beside text."""
        return frozenset(self.placeholders)

    def without(self, modality: Modality) -> MediaProcessor:
        """One that does not read this kind of media."""
        left = {each: token for each, token in self.placeholders.items() if each is not modality}
        return MediaProcessor(self.processor, self.config, left)

    @property
    def rate(self) -> int:
        """Samples of sound per second that the model is made for; 0 for one that reads no sound."""
        return _ears(self.processor).sampling_rate if Modality.AUDIO in self.placeholders else 0

    @property
    def chats(self) -> bool:
        """Whether the processor has a chat template."""
        return bool(getattr(self.processor, "chat_template", None))

    def chat(self, messages: Sequence[Any], tools: Sequence[Any] | None, variables: dict[str, Any]) -> TokensAndMedia:
        """What is read of the messages of a chat, whose images and sounds are open."""
        given = {"add_generation_prompt": True, **variables, "tokenize": True, "return_dict": True}
        return self._read(self.processor.apply_chat_template(list(messages), tools=tools, return_tensors="pt", **given))

    def text(self, text: str, media: Mapping[Modality, Sequence[Any]]) -> TokensAndMedia:
        """What is read of a text and its media, which stand before it if it does not say where. Raises ValueError if it
        names another number of them."""
        for modality in reversed(Modality):  # so that images come first
            text = self._placed(text, modality, len(media.get(modality, ())))
        given: dict[str, Any] = {}
        if images := media.get(Modality.IMAGE):
            given["images"] = [list(images)]
        if sounds := media.get(Modality.AUDIO):
            given["audio"], given["sampling_rate"] = list(sounds), self.rate
        return self._read(self.processor(text=[text], return_tensors="pt", **given))

    def _placed(self, text: str, modality: Modality, count: int) -> str:
        """The text with as many placeholders as there are media."""
        mark = getattr(self.processor, PLACEHOLDERS[modality], None)
        if not count or not mark:
            return text
        if mark not in text:
            start, end = self._around(modality)
            return f"{start}{mark}{end}" * count + text
        if text.count(mark) != count:
            what = modality.value
            raise ValueError(f"the prompt has {count} {what}, but {mark} stands in it {text.count(mark)} times.")
        return text

    def _around(self, modality: Modality) -> tuple[str, str]:
        """What stands before and behind a placeholder of a medium."""
        name = {Modality.IMAGE: "vision", Modality.AUDIO: "audio"}[modality]
        found = [getattr(self.config, f"{name}_{end}_token_id", None) for end in ("start", "end")]
        start, end = ("" if each is None else self.processor.tokenizer.decode([each]) for each in found)
        return start, end

    def _read(self, made: Any) -> TokensAndMedia:
        """The ids and the media of what the processor has made."""
        ids = tuple(made["input_ids"][0].tolist())
        rest = {name: made[name] for name in made.keys() - {"input_ids", "attention_mask"}}
        tensors = {name: each for name, each in rest.items() if isinstance(each, Tensor)}
        along = {name: each for name, each in tensors.items() if name.endswith("token_type_ids")}
        inputs = {name: each for name, each in tensors.items() if name not in along}
        if not inputs:
            return ids, None
        named = {each: token for each, token in self.placeholders.items() if token in ids}
        return ids, Media.of(inputs, along, named or self.placeholders)


def _ears(processor: Any) -> Any:
    """The part of a processor that reads sound; None without one."""
    return getattr(processor, "audio_processor", None) or getattr(processor, "feature_extractor", None)
