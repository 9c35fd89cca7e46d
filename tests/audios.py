"""Tiny random models that hear sounds beside a text, in folders with the processors that they come with."""

import base64
import io
import wave
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import PreTrainedModel

from visions import GRID, GRID_IMAGES, MROPE, TEXT, TOKENS, WIDE, save_processor, tokenizer_with

RATE = 16000
MARK = "<|AUDIO|>"
"""What users write where a sound stands, in all of them."""

SPECIAL = {"audio_token": MARK, "audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>"}
PICTURES = {"image_token": "<|IMAGE|>", "video_token": "<|VIDEO|>", "vision_bos_token": "<|vision_bos|>"}
PICTURES |= {"vision_eos_token": "<|vision_eos|>"}

ENDS = (("start", "bos"), ("end", "eos"))
"""How configurations call what stands around a medium, and how tokenizers do."""

LANGUAGE = {**TEXT, **TOKENS, "max_position_embeddings": 512, "tie_word_embeddings": False}
EARS = {"num_mel_bins": 8, "initializer_range": 0.2, "max_source_positions": 50}
WHISPER = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48, **EARS}


@dataclass(frozen=True)
class Kind:
    """A family: its model, and its processor's class, the parts of its configuration, how many seconds of sound are
    read at once, what makes features of them, and how large the weights of the projector are."""

    model: str
    processor: str
    text: dict[str, Any]
    audio: dict[str, Any]
    seconds: int = 1
    features: str = "WhisperFeatureExtractor"
    projector: float = 0.3
    vision: dict[str, Any] = field(default_factory=dict)


KINDS = {
    "qwen2-audio": Kind("Qwen2Audio", "Qwen2AudioProcessor", {"model_type": "qwen2"}, WHISPER),
    "audioflamingo3": Kind("AudioFlamingo3", "AudioFlamingo3Processor", {"model_type": "qwen2"}, {**WIDE, **EARS}),
    "glmasr": Kind(
        "GlmAsr",
        "GlmAsrProcessor",
        {"model_type": "llama"},
        {**WIDE, "intermediate_size": 128, "num_mel_bins": 8, "initializer_range": 0.2},
        seconds=2,
    ),
    "qwen3-asr": Kind(
        "Qwen3ASR",
        "Qwen3ASRProcessor",
        {"model_type": "qwen3"},
        {**{name: size for name, size in WHISPER.items() if name != "max_source_positions"}, "output_dim": 32}
        | {"n_window": 50, "n_window_infer": 100, "downsample_hidden_size": 16},
        features="Qwen3ASRFeatureExtractor",
        projector=1.0,
    ),
    "qwen2.5-omni": Kind(
        "Qwen2_5OmniThinker",
        "Qwen2_5OmniProcessor",
        {"rope_parameters": MROPE},
        {**WHISPER, "output_dim": 32, "n_window": 25},
        vision={**GRID, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 32, "window_size": 16},
    ),
}


def save_audio(kind: str, path: Path) -> Path:
    """A model of a family with its processor, in a folder as it is downloaded."""
    it = KINDS[kind]
    tokenizer = tokenizer_with({**SPECIAL, **(PICTURES if it.vision else {})})
    ears = {"feature_extractor_type": it.features, "feature_size": 8, "chunk_length": it.seconds}
    parts = {"feature_extractor": ears, **({"image_processor": GRID_IMAGES} if it.vision else {})}
    own = {} if it.vision else {"audio_token": MARK}
    save_processor(path, it.processor, tokenizer, {**parts, **own}, MARK)
    _tiny(it, tokenizer).save_pretrained(path)
    return path


def _tiny(it: Kind, tokenizer: Any) -> PreTrainedModel:
    """A tiny random model for the tokens of a tokenizer."""
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in {**SPECIAL, **PICTURES}.items()}
    parts = {"text_config": {**LANGUAGE, **it.text, "vocab_size": len(tokenizer)}, "audio_config": it.audio}
    if it.vision:
        parts |= {"vision_config": it.vision, "audio_token_index": ids["audio_token"]}
        parts |= {f"{name}_index": ids[name] for name in ("image_token", "video_token")}
        parts |= {f"{at}_{end}_token_id": ids[f"{at}_{to}_token"] for at in ("audio", "vision") for end, to in ENDS}
    else:
        parts["audio_token_id"] = ids["audio_token"]
    config = getattr(transformers, f"{it.model}Config")(**parts)
    torch.manual_seed(3)
    model = getattr(transformers, f"{it.model}ForConditionalGeneration")(config).eval()
    for name, weight in model.named_parameters():
        if "projector" in name and weight.ndim == 2:  # which begin small, so that sounds would hardly matter
            torch.nn.init.normal_(weight, std=it.projector)
    model.generation_config.eos_token_id = None
    return model


# ---- sounds ----


def sound(seed: int, seconds: float = 0.4) -> np.ndarray:
    """A chord of random tones with some noise (n,)."""
    draw, times = np.random.default_rng(seed), np.arange(round(seconds * RATE)) / RATE
    tones = [np.sin(2 * np.pi * tone * times) for tone in draw.uniform(100, 4000, 5)]
    return (np.mean(tones, 0) + 0.05 * draw.standard_normal(len(times))).astype(np.float32)


def wav(samples: np.ndarray, rate: int = RATE) -> bytes:
    """The bytes of a file of 16-bit samples."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((1, 2, rate, 0, "NONE", ""))
        out.writeframes(_whole(samples).tobytes())
    return file.getvalue()


def rounded(samples: np.ndarray) -> np.ndarray:
    """What a file of 16-bit samples holds of a sound."""
    return _whole(samples).astype(np.float32) / 32768


def _whole(samples: np.ndarray) -> np.ndarray:
    return np.clip(np.rint(samples * 32768), -32768, 32767).astype("<i2")


def input_audio(content: bytes) -> dict[str, Any]:
    """A part of a message, as clients of OpenAI's API write it."""
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(content).decode(), "format": "wav"}}
