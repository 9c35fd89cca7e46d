"""Tiny random models that see images, and prompts with images for them, without a processor."""

import base64
import io
import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from torch import Tensor
from transformers import AutoTokenizer, CLIPImageProcessorPil, LlavaProcessor, PreTrainedModel

from slipstream.core.media import Media, Modality
from slipstream.models.loading.load import load_tokenizer
from slipstream.models.loading.pairings import EMBEDDED

VOCAB, PLACEHOLDER = 120, 110
"""Sizes of the tiny vocabularies, and the token that stands for (a part of) an image in all of them."""

WIDE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT: dict[str, Any] = {**WIDE, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCAB, "initializer_range": 0.2}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 256}
TOWER: dict[str, Any] = {**WIDE, "image_size": 28, "patch_size": 14, "initializer_range": 0.2}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
QWEN: dict[str, Any] = {"image_token_id": PLACEHOLDER, "video_token_id": 111}
QWEN |= {"vision_start_token_id": 112, "vision_end_token_id": 113}
GRID = {"depth": 2, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}


@dataclass(frozen=True)
class Kind:
    """A family: its classes, the parts of its configuration, and how many tokens an image takes there, where `grid`
    is True for models that take patches of images of any size."""

    name: str
    text: dict[str, Any]
    tower: dict[str, Any]
    whole: dict[str, Any]
    per_image: int = 4
    grid: bool = False
    extra: dict[str, Any] = field(default_factory=dict)


KINDS = {
    "qwen2.5-vl": Kind(
        "Qwen2_5_VL",
        {"rope_parameters": MROPE},
        {**GRID, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 32, "window_size": 16},
        QWEN,
        grid=True,
    ),
    "qwen3-vl": Kind(
        "Qwen3VL",
        {"rope_parameters": {**MROPE, "mrope_interleaved": True}},
        {**GRID, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 32}
        | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
        QWEN,
        grid=True,
    ),
    "qwen3.5": Kind(
        "Qwen3_5",
        {"rope_parameters": {**MROPE, "mrope_interleaved": True, "partial_rotary_factor": 1.0}}
        | {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_key_head_dim": 8}
        | {"linear_num_value_heads": 4, "linear_value_head_dim": 8},
        {**GRID, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 32, "num_position_embeddings": 16},
        QWEN,
        grid=True,
    ),
    "gemma3": Kind(
        "Gemma3",
        {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 8},
        TOWER,
        {"image_token_index": PLACEHOLDER, "boi_token_index": 112, "eoi_token_index": 113, "mm_tokens_per_image": 4}
        | {"tie_word_embeddings": False},
    ),
    "llava": Kind(
        "Llava", {"model_type": "llama"}, {**TOWER, "model_type": "clip_vision_model"}, {"image_token_index": 110}
    ),
    "mistral3": Kind(
        "Mistral3",
        {"model_type": "mistral", "sliding_window": 7},
        {**TOWER, "model_type": "pixtral", "head_dim": 8},
        {"image_token_index": PLACEHOLDER, "spatial_merge_size": 1},
        extra={"image_sizes": torch.tensor([[28, 28]])},
    ),
    "internvl": Kind(
        "InternVL",
        {"model_type": "qwen2"},
        {**TOWER, "image_size": [56, 56], "patch_size": [14, 14]},
        {"image_token_id": PLACEHOLDER, "downsample_ratio": 0.5, "image_seq_length": 4},
    ),
    "smolvlm": Kind(
        "SmolVLM",
        {"model_type": "llama"},
        {**TOWER, "image_size": 56},
        {"image_token_id": PLACEHOLDER, "scale_factor": 2},
    ),
}


@cache
def tiny_vision(kind: str) -> PreTrainedModel:
    return tiny_vision_of(kind, VOCAB, PLACEHOLDER)


def tiny_vision_of(kind: str, vocab: int, placeholder: int) -> PreTrainedModel:
    """A tiny random model of a family, for a tokenizer of so many tokens, of which one stands for images."""
    it = KINDS[kind]
    text = {**TEXT, **TOKENS, "tie_word_embeddings": False, **it.text, "vocab_size": vocab}
    whole = {**it.whole, **{name: placeholder for name in it.whole if name.startswith("image_token_i")}}
    config = getattr(transformers, f"{it.name}Config")(text_config=text, vision_config=it.tower, **whole)
    torch.manual_seed(3)
    model = getattr(transformers, f"{it.name}ForConditionalGeneration")(config).eval()
    for name, weight in model.named_parameters():
        if "mm_input_projection" in name:  # Gemma 3 begins it with zeros, and images would not matter
            torch.nn.init.normal_(weight, std=0.3)
    model.generation_config.eos_token_id = None
    return model


def illustrated(kind: str, before: int, after: int, images: int = 1, seed: int = 0) -> tuple[tuple[int, ...], Media]:
    """A random prompt of so many tokens before and behind each of some images -> its tokens, and the images."""
    it, draw = KINDS[kind], torch.Generator().manual_seed(seed)
    prompt: list[int] = []
    for _ in range(images):
        prompt += [*_text(before, draw), 112, *[PLACEHOLDER] * it.per_image, 113, *_text(after, draw)]
    types = torch.tensor([[int(token == PLACEHOLDER) for token in prompt]])
    along = {"mm_token_type_ids": types} if it.grid else {"token_type_ids": types} if kind == "gemma3" else {}
    extra = {name: each.repeat(images, 1) for name, each in it.extra.items()}
    return tuple(prompt), Media.of({**_pixels(kind, images, draw), **extra}, along, {Modality.IMAGE: PLACEHOLDER})


def _text(count: int, draw: torch.Generator) -> list[int]:
    return torch.randint(4, 100, (count,), generator=draw).tolist()


def _pixels(kind: str, images: int, draw: torch.Generator) -> dict[str, Tensor]:
    """What an image processor would make of random pictures."""
    it = KINDS[kind]
    if it.grid:  # 4 by 4 patches, of which 2 by 2 make a token
        patches = torch.randn(16 * images, 3 * 2 * it.tower["patch_size"] ** 2, generator=draw)
        return {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, 4, 4]] * images)}
    size = 56 if kind in {"internvl", "smolvlm"} else 28
    pixels = torch.randn(images, 3, size, size, generator=draw)
    return {"pixel_values": pixels[None] if kind == "smolvlm" else pixels}


def generated(model: PreTrainedModel, prompt: tuple[int, ...], media: Media | None, count: int) -> list[int]:
    """Greedy decoding by transformers, of one prompt alone."""
    ids = torch.tensor([prompt])
    arguments = media.arguments(len(prompt), model.device, model.dtype) if media else {}
    options = {"do_sample": False, "max_new_tokens": count, "pad_token_id": 0}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **arguments, **options)[0, len(prompt) :].tolist()


# ---- pictures, and a folder with a processor ----

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}<image>{% endif %}{% endfor %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def picture(seed: int, size: int = 28) -> Image.Image:
    """Random pixels."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8))


def png(image: Image.Image) -> bytes:
    """The bytes of a file."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def data_url(image: Image.Image) -> str:
    return "data:image/png;base64," + base64.b64encode(png(image)).decode()


@dataclass(frozen=True)
class Saved:
    """What lies with a model of a family in a folder: its processor's class and settings, the special tokens of its
    tokenizer by their names there, and the one that users write for an image."""

    processor: str
    images: dict[str, Any]
    tokens: dict[str, str]
    mark: str
    settings: dict[str, Any] = field(default_factory=dict)


GRID_IMAGES = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "merge_size": 2}
GRID_IMAGES |= {"temporal_patch_size": 2, "size": {"shortest_edge": 256, "longest_edge": 1024}}
GRID_TOKENS = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
GRID_TOKENS |= {"vision_start_token": "<|vision_start|>", "vision_end_token": "<|vision_end|>"}

SAVED = {
    "qwen2.5-vl": Saved("Qwen2_5_VLProcessor", GRID_IMAGES, GRID_TOKENS, "<|image_pad|>"),
    "qwen3-vl": Saved("Qwen3VLProcessor", GRID_IMAGES, GRID_TOKENS, "<|image_pad|>"),
    "internvl": Saved(
        "InternVLProcessor",
        {"image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 56, "width": 56}},
        {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}
        | {"video_token": "<video>"},
        "<IMG_CONTEXT>",
        {"image_seq_length": 4},
    ),
    "smolvlm": Saved(
        "SmolVLMProcessor",
        {"image_processor_type": "SmolVLMImageProcessor", "size": {"longest_edge": 56}}
        | {"max_image_size": {"longest_edge": 56}, "do_image_splitting": False},
        {"image_token": "<image>", "fake_image_token": "<fake_token_around_image>", "video_token": "<video>"}
        | {"global_image_token": "<global-img>", "end_of_utterance_token": "<end_of_utterance>"},
        "<image>",
        {"image_seq_len": 4},
    ),
}
"""Families whose processors read videos too, as their checkpoints on the hub have them."""


def save_vision(kind: str, path: Path) -> Path:
    """A model of a family with its processor, in a folder as it is downloaded."""
    it = SAVED[kind]
    tokenizer = tokenizer_with(it.tokens)
    save_processor(path, it.processor, tokenizer, {"image_processor": it.images, **it.settings}, it.mark)
    tiny_vision_of(kind, len(tokenizer), tokenizer.convert_tokens_to_ids(it.mark)).save_pretrained(path)
    return path


def tokenizer_with(tokens: dict[str, str]) -> Any:
    """The embedded tokenizer with more special tokens, by the names that a processor asks for."""
    return AutoTokenizer.from_pretrained(EMBEDDED / "target", extra_special_tokens=tokens)


def save_processor(path: Path, kind: str, tokenizer: Any, parts: dict[str, Any], mark: str) -> None:
    """A processor in a folder: its class, its parts and settings, and a template that writes `mark` for a medium."""
    tokenizer.save_pretrained(path)
    videos = {"video_processor": {"video_processor_type": "Qwen2VLVideoProcessor"}}
    (path / "processor_config.json").write_text(json.dumps({"processor_class": kind, **videos, **parts}))
    (path / "chat_template.jinja").write_text(TEMPLATE.replace("<image>", mark))


def save_llava(path: Path) -> Path:
    """A LLaVA with a processor that is made of the embedded tokenizer, in a folder as it is downloaded."""
    tokenizer = load_tokenizer(EMBEDDED / "target")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    images = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    processor = LlavaProcessor(images, tokenizer, 14, "default", chat_template=TEMPLATE, num_additional_image_tokens=1)
    processor.save_pretrained(path)
    tiny_vision_of("llava", len(tokenizer), processor.image_token_id).save_pretrained(path)
    return path
