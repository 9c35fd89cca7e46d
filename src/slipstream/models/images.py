"""Prompts with images: read by the model's own ways, and made of what users pass by its processor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoProcessor

from slipstream.core.images import Images
from slipstream.kernels.placement import input_device

Layers = dict[int, tuple[Tensor, Tensor]]
"""Keys and values (heads, count, head_dim) by layer."""


@dataclass
class Illustration:
    """The images of a row, and by how much the positions behind them are shifted, once they were read."""

    images: Images
    shift: int = 0


def can_see(model: Any) -> bool:
    """Whether this model reads images beside a text, and takes them at once."""
    return type(model.config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and not model.config.is_encoder_decoder


def run_illustrated(model: Any, text: Sequence[int], images: Images, **options: Any) -> tuple[Any, int]:
    """A pass over a whole text with its images, called as `generate` calls it -> its output, and by how much the
    positions of later tokens differ from their numbers."""
    counting = [part for part in model.modules() if hasattr(part, "rope_deltas")]
    for part in counting:
        part.rope_deltas = None  # that of another text
    device = input_device(model)
    tokens = torch.tensor([text], device=device)
    beside = images.beside(len(text), device, model.dtype)
    out = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), **beside, **options)
    found = next((part.rope_deltas for part in counting if part.rope_deltas is not None), None)
    return out, 0 if found is None else int(found.flatten()[0])


@torch.inference_mode()
def read_illustrated(model: Any, text: Sequence[int], images: Images) -> tuple[Layers, int]:
    """Read a text with its images -> the keys and values of every layer, and the shift of later positions."""
    keep = {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}
    out, shift = run_illustrated(model, text, images, use_cache=True, **keep)
    layers = enumerate(out.past_key_values.layers)
    return {place: (layer.keys[0], layer.values[0]) for place, layer in layers if layer.is_initialized}, shift


# ---- processors ----

Seen = tuple[tuple[int, ...], Images | None]
"""Token ids, and the images that some of them stand for."""


class Vision:
    """Makes what a vision model reads of texts and images, by the model's own processor."""

    def __init__(self, processor: Any, config: Any) -> None:
        self.processor = processor
        names = ("image_token_id", "image_token_index")
        found = [getattr(place, name, None) for place in (config, processor) for name in names]
        self.placeholder = next((token for token in found if isinstance(token, int)), -1)
        self._around = [getattr(config, f"vision_{end}_token_id", None) for end in ("start", "end")]

    @staticmethod
    def of(source: Any, config: Any) -> Vision:
        """The vision of the model with a name, in a folder, or loaded. Raises ValueError without a processor."""
        name = source if isinstance(source, str | Path) else config.name_or_path
        try:
            processor = AutoProcessor.from_pretrained(name)
        except Exception as error:  # of any kind, depending on what lies there and what is installed
            reason = " ".join(str(error).split())
            raise ValueError(f"its processor cannot be loaded: {reason[:300]}") from error
        if not hasattr(processor, "image_processor"):
            raise ValueError("no processor lies with it")
        return Vision(processor, config)

    @property
    def chats(self) -> bool:
        """Whether the processor has a chat template."""
        return bool(getattr(self.processor, "chat_template", None))

    def chat(self, messages: Sequence[Any], tools: Sequence[Any] | None, variables: dict[str, Any]) -> Seen:
        """What is read of the messages of a chat, whose images are open."""
        given = {"add_generation_prompt": True, **variables, "tokenize": True, "return_dict": True}
        return self._seen(self.processor.apply_chat_template(list(messages), tools=tools, return_tensors="pt", **given))

    def text(self, text: str, images: Sequence[Any]) -> Seen:
        """What is read of a text and its images. Raises ValueError if it names another number of them."""
        mark = self.processor.image_token
        if mark not in text:
            start, end = (self._spelled(token) for token in self._around)
            text = f"{start}{mark}{end}" * len(images) + text
        if text.count(mark) != len(images):
            raise ValueError(f"the prompt has {len(images)} images, but {mark} stands in it {text.count(mark)} times.")
        return self._seen(self.processor(text=text, images=[list(images)], return_tensors="pt"))

    def _spelled(self, token: int | None) -> str:
        return "" if token is None else self.processor.tokenizer.decode([token])

    def _seen(self, made: Any) -> Seen:
        """The ids and the images of what the processor has made."""
        ids = made["input_ids"]
        rest = {name: made[name] for name in made.keys() - {"input_ids", "attention_mask"}}
        tensors = {name: each for name, each in rest.items() if isinstance(each, Tensor)}
        along = {name: each for name, each in tensors.items() if name.endswith("token_type_ids")}
        inputs = {name: each for name, each in tensors.items() if name not in along}
        images = Images.of(inputs, along, frozenset({self.placeholder})) if inputs else None
        return tuple(ids[0].tolist()), images
