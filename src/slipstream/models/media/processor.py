"""Prompts with images and sounds: made by the model's processor, read by its own forward, and tried with drafts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    PROCESSOR_MAPPING,
    AutoConfig,
    AutoFeatureExtractor,
    AutoImageProcessor,
    AutoProcessor,
    AutoTokenizer,
    ImageProcessingMixin,
    ProcessorMixin,
)

from slipstream.core.media import Media, Modality
from slipstream.core.values import first_sentence
from slipstream.execution.names import state_in
from slipstream.kernels.placement import input_device
from slipstream.models.families import allowed_gap, spread_gap

VIDEOS = "video_processor"


class NoVideos(ImageProcessingMixin):
    """A stand-in for a processor's video part, with the attributes that a processor reads even without videos."""

    num_frames = fps = None
    merge_size = temporal_patch_size = 1
    model_input_names = ("pixel_values_videos",)


class TakesNoVideos:
    """A mixin for a processor class that makes its type check accept `NoVideos` as the video part."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        if argument_name == VIDEOS:
            return NoVideos
        return super().check_argument_for_proper_class(argument_name, argument)  # type: ignore[misc]


# The loaders are looked up when they are called: without pillow, even naming AutoImageProcessor.from_pretrained raises.
PARTS: dict[str, Callable[[Any], Any]] = {  # the functions that load the parts of processors, by the names of the parts
    "image_processor": lambda name: AutoImageProcessor.from_pretrained(name),
    "feature_extractor": lambda name: AutoFeatureExtractor.from_pretrained(name),
    "audio_processor": lambda name: AutoFeatureExtractor.from_pretrained(name),
    "tokenizer": lambda name: AutoTokenizer.from_pretrained(name),
    VIDEOS: lambda name: NoVideos(),
}


def load_processor(name: str | Path) -> Any:
    """Load the processor stored with a model, by its name or folder.

    If torchvision is missing, the video part of a processor that has one is left out. Raises what transformers raises
    if there is no processor.
    """
    try:
        return AutoProcessor.from_pretrained(name)
    except Exception as error:  # of any type, depending on the files
        if "torchvision" not in str(error).lower():
            raise
        settings, _ = ProcessorMixin.get_processor_dict(name)
        kind: Any = getattr(transformers, settings.get("processor_class") or "", None)
        kind = kind or PROCESSOR_MAPPING.get(type(AutoConfig.from_pretrained(name)), None)
        if kind is None or VIDEOS not in kind.get_attributes():
            raise
        settings, _ = kind.get_processor_dict(name)
        parts = [PARTS[part](name) for part in kind.get_attributes()]
        without: Any = type(kind.__name__, (TakesNoVideos, kind), {})
        return without.from_args_and_dict(parts, settings)


Layers = dict[int, tuple[Tensor, Tensor]]  # keys and values (heads, count, head_dim), by the number of the layer

PLACEHOLDERS = {Modality.IMAGE: "image_token", Modality.AUDIO: "audio_token"}
"""The attributes of processors with the placeholder token; configurations have its id there, with `_id` or `_index`."""


@dataclass
class RowMedia:
    """The media of a row, and the shift of the positions after them, which is set when they are read."""

    media: Media
    shift: int = 0


def modalities_of(model: Any) -> frozenset[Modality]:
    """Return the kinds of media that a model reads besides text, by its configuration; none for encoder-decoders."""
    config = model.config
    if config.is_encoder_decoder:
        return frozenset()
    kinds = set()
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        kinds.add(Modality.IMAGE)
    # transformers lists models for text and sound under either of these names
    if type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING or type(config) in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING:
        kinds |= {each for each in Modality if _placeholder(each, config) is not None}
    return frozenset(kinds)


def _placeholder(modality: Modality, *places: Any) -> int | None:
    """Return the id of a modality's placeholder token, from the first configuration or processor that has one."""
    name = PLACEHOLDERS[modality]
    parts = [getattr(place, part, None) for place in places for part in ("audio_config", "vision_config")]
    ids = (getattr(place, f"{name}_{end}", None) for place in (*places, *parts) for end in ("id", "index"))
    return next((token for token in ids if isinstance(token, int)), None)


def run_with_media(model: Any, text: Sequence[int], media: Media, **options: Any) -> tuple[Any, int]:
    """Run a pass over a whole text with its media, as `generate` does -> its output, and the shift of later positions.
    The shift is by how much the positions of later tokens differ from their indices in the text."""
    counting = [part for part in model.modules() if hasattr(part, "rope_deltas")]
    for part in counting:
        part.rope_deltas = None  # it belongs to the text that was read before
    device = input_device(model)
    tokens = torch.tensor([text], device=device)
    arguments = media.arguments(len(text), device, model.dtype)
    out = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), **arguments, **options)
    delta = next((part.rope_deltas for part in counting if part.rope_deltas is not None), None)
    return out, 0 if delta is None else int(delta.flatten()[0])


@torch.inference_mode()
def read_with_media(model: Any, text: Sequence[int], media: Media) -> tuple[Layers, int]:
    """Read a text with its media -> the keys and values of every layer, and the shift of later positions."""
    keep = {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}
    out, shift = run_with_media(model, text, media, use_cache=True, **keep)
    layers = enumerate(state_in(out).layers)
    return {place: (layer.keys[0], layer.values[0]) for place, layer in layers if layer.is_initialized}, shift


TokensAndMedia = tuple[tuple[int, ...], Media | None]
"""Token ids, and the media for their placeholder tokens (None: no media)."""


@dataclass(frozen=True)
class MediaProcessor:
    """Converts texts with images and sounds to token ids and media, with the model's own processor of transformers.
    `placeholders` are the ids of the placeholder tokens of the modalities that it reads."""

    processor: Any
    config: Any
    placeholders: Mapping[Modality, int]

    @staticmethod
    def of(model: Any, processor: Any = None) -> MediaProcessor:
        """Return that of a model, with the processor that is stored with it unless one is given."""
        try:
            processor = load_processor(model.config.name_or_path) if processor is None else processor
        except Exception as error:  # of any type, depending on the files and on what is installed
            reason = " ".join(str(error).split()).partition(". ")[0].rstrip(".")
            raise ValueError(f"its processor cannot be loaded: {reason}.") from error
        parts = {Modality.IMAGE: getattr(processor, "image_processor", None), Modality.AUDIO: _extractor(processor)}
        placeholders = {
            each: -1 if (token := _placeholder(each, model.config, processor)) is None else token
            for each in modalities_of(model)
            if parts[each] is not None
        }
        if not placeholders or not hasattr(processor, "tokenizer"):
            raise ValueError("its processor reads no texts with images or sounds.")
        return MediaProcessor(processor, model.config, placeholders)

    @property
    def modalities(self) -> frozenset[Modality]:
        return frozenset(self.placeholders)

    def without(self, modality: Modality) -> MediaProcessor:
        return replace(self, placeholders={name: id for name, id in self.placeholders.items() if name is not modality})

    @property
    def rate(self) -> int:
        """The sampling rate, in Hz, of the sound that the model reads; 0 for a model that reads no sound."""
        return _extractor(self.processor).sampling_rate if Modality.AUDIO in self.placeholders else 0

    def mark(self, modality: Modality) -> str:
        """Return what stands in texts for an image or a sound; "" if the processor has nothing for it."""
        return str(getattr(self.processor, PLACEHOLDERS[modality], None) or "")

    def chat(self, text: str, media: Mapping[Modality, Sequence[Any]]) -> TokensAndMedia:
        """Return the token ids and media of what a chat template wrote, with a placeholder for each of the media."""
        begin = self.processor.tokenizer.bos_token
        return self._read(text, media, **({"add_special_tokens": False} if begin and text.startswith(begin) else {}))

    def text(self, text: str, media: Mapping[Modality, Sequence[Any]]) -> TokensAndMedia:
        """Return the token ids and media of a text; media go before a text that has no placeholders for them."""
        for modality in reversed(Modality):  # so that images come first
            count, mark = len(media.get(modality, ())), self.mark(modality)
            if not count or not mark:
                continue
            if mark not in text:
                name = {Modality.IMAGE: "vision", Modality.AUDIO: "audio"}[modality]
                ids = [getattr(self.config, f"{name}_{end}_token_id", None) for end in ("start", "end")]
                start, end = ("" if each is None else self.processor.tokenizer.decode([each]) for each in ids)
                text = f"{start}{mark}{end}" * count + text
            elif text.count(mark) != count:
                raise ValueError(f"the prompt has {count} {modality}, but {mark} is there {text.count(mark)} times.")
        return self._read(text, media)

    def _read(self, text: str, media: Mapping[Modality, Sequence[Any]], **inputs: Any) -> TokensAndMedia:
        if images := media.get(Modality.IMAGE):
            inputs["images"] = [list(images)]
        if sounds := media.get(Modality.AUDIO):
            inputs["audio"], inputs["sampling_rate"] = list(sounds), self.rate
        try:
            made = self.processor(text=[text], return_tensors="pt", **inputs)
        except Exception as error:  # of any type, from the processor's own code
            raise ValueError(f"its processor cannot read the prompt: {first_sentence(error)}") from error
        for name in {"feature_attention_mask", "input_features_mask"} & made.keys():  # 1 for what is not cut off
            read = int(made[name].sum()) * _extractor(self.processor).hop_length / self.rate
            if read < 0.99 * (given := sum(map(len, sounds or ())) / self.rate):
                raise ValueError(f"the prompt has {given:.0f} s of sound, and the model reads {read:.0f}: shorten it.")
        ids = tuple(made["input_ids"][0].tolist())
        rest = made.keys() - {"input_ids", "attention_mask"}
        tensors = {name: made[name] for name in rest if isinstance(made[name], Tensor)}
        along = {name: each for name, each in tensors.items() if name.endswith("token_type_ids")}
        inputs = {name: each for name, each in tensors.items() if name not in along}
        if not inputs:
            return ids, None
        named = {each: token for each, token in self.placeholders.items() if token in ids}
        return ids, Media.of(inputs, along, named or self.placeholders)


def _extractor(processor: Any) -> Any:
    return getattr(processor, "audio_processor", None) or getattr(processor, "feature_extractor", None)


PROVEN = {
    Modality.IMAGE: "Qwen2_5_VL Qwen3VL Qwen3_5 Gemma3 Llava Mistral3 InternVL SmolVLM",
    Modality.AUDIO: "Qwen2Audio AudioFlamingo3 GlmAsr Qwen2_5OmniThinker Qwen3ASR",
}
"""The model classes, without "ForConditionalGeneration", whose texts with media the tests compare with `generate`; any
other has to pass `try_media`."""


def proven_modalities(model: Any) -> frozenset[Modality]:
    name = type(model).__name__.removesuffix("ForConditionalGeneration")
    return frozenset(each for each, names in PROVEN.items() if name in names.split())


def try_media(scorer: Any, processor: MediaProcessor, modality: Modality) -> None:
    """Check a model on a small picture or a short sound: draft wrong tokens, roll back, and compare with fresh logits.
    Raises ValueError, with a message that does not name the model, if the logits differ or the trial fails."""
    if modality in proven_modalities(scorer.model):
        return
    what = {Modality.IMAGE: "a picture", Modality.AUDIO: "a sound"}[modality]
    try:
        gap, allowed = _gap(scorer, processor, modality)
    except Exception as error:  # of any type, since models and processors may need other calls
        raise ValueError(f"{what} cannot be read with it ({type(error).__name__}: {first_sentence(error)}).") from error
    finally:
        scorer.free(range(len(scorer.lengths)))
    if not gap <= allowed:
        raise ValueError(f"behind {what} its logits are others (by {gap:.2g} standard deviations).")


@torch.inference_mode()
def _gap(scorer: Any, processor: MediaProcessor, modality: Modality) -> tuple[float, float]:
    if modality is Modality.IMAGE:  # one that gets brighter from top to bottom
        values = np.linspace(0, 255, 64 * 64 * 3).astype(np.uint8).reshape(64, 64, 3)
        example: Any = transformers.image_transforms.to_pil_image(values)  # some processors take no arrays
    else:  # one second of a rising tone
        seconds = np.arange(processor.rate, dtype=np.float32) / processor.rate
        example = np.sin(2 * np.pi * (200 + 400 * seconds) * seconds).astype(np.float32)
    prompt, media = processor.text("one two three", {modality: [example]})
    if media is None:
        raise ValueError("its processor makes nothing of it")
    again = prompt[-2]  # a token of the text: the first one may be a placeholder
    scorer.add(1)
    scorer.attach(0, media)
    scorer.prefill([prompt[:-2]])
    scorer.extend(torch.tensor([[prompt[-2], 0, 0]], device=scorer.device), [3])
    scorer.rollback([len(prompt) - 1])
    ours = [scorer.extend(torch.tensor([[prompt[-1], 0]], device=scorer.device), [2])[0, :1]]
    scorer.rollback([len(prompt)])
    ours.append(scorer.extend(torch.tensor([[again]], device=scorer.device), [1])[0, :1])
    fresh, _ = run_with_media(scorer.model, [*prompt, again], media)
    return spread_gap(torch.cat(ours).float(), fresh.logits[0, -2:].float()), allowed_gap(scorer.model.dtype)
