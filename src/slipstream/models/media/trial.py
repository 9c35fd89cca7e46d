"""Trying a model with images or sounds: drafts and rollbacks after them have to give the logits of a fresh pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from slipstream.core.media import Modality
from slipstream.core.values import first_sentence
from slipstream.models.families import allowed_gap, spread_gap
from slipstream.models.media.processor import MediaProcessor, run_with_media

PROVEN = {
    Modality.IMAGE: frozenset(
        {
            *("Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration"),
            *("Qwen3_5ForConditionalGeneration", "Gemma3ForConditionalGeneration", "LlavaForConditionalGeneration"),
            *("Mistral3ForConditionalGeneration", "InternVLForConditionalGeneration"),
            "SmolVLMForConditionalGeneration",
        }
    ),
    Modality.AUDIO: frozenset(
        {
            *("Qwen2AudioForConditionalGeneration", "AudioFlamingo3ForConditionalGeneration"),
            *("GlmAsrForConditionalGeneration", "Qwen2_5OmniThinkerForConditionalGeneration"),
            "Qwen3ASRForConditionalGeneration",
        }
    ),
}
"""The model classes whose texts with media the tests compare with `generate`; any other has to pass `try_media`."""


def proven_modalities(model: Any) -> frozenset[Modality]:
    return frozenset(each for each, names in PROVEN.items() if type(model).__name__ in names)


def try_media(scorer: Any, processor: MediaProcessor, modality: Modality) -> None:
    """Check a model on a small picture or a short sound: draft wrong tokens, roll back, and compare with fresh logits.

    Raises ValueError, with a message that does not name the model, if the logits differ or the trial fails.
    """
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
    prompt, media = processor.text("one two three", {modality: [_example(processor, modality)]})
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


def _example(processor: MediaProcessor, modality: Modality) -> np.ndarray:
    """Return an image (64, 64, 3) that gets brighter from top to bottom, or one second of a rising tone (n,)."""
    if modality is Modality.IMAGE:
        return np.linspace(0, 255, 64 * 64 * 3).astype(np.uint8).reshape(64, 64, 3)
    seconds = np.arange(processor.rate, dtype=np.float32) / processor.rate
    return np.sin(2 * np.pi * (200 + 400 * seconds) * seconds).astype(np.float32)
