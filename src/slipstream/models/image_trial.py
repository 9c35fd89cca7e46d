"""Trying a vision model: after an image, drafts and rollbacks have to give the logits of a fresh pass over all."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from slipstream.models.families import first_sentence
from slipstream.models.images import Vision, run_illustrated

PROVEN_WITH_IMAGES = frozenset(
    {
        *("Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration", "Qwen3_5ForConditionalGeneration"),
        *("Gemma3ForConditionalGeneration", "LlavaForConditionalGeneration", "Mistral3ForConditionalGeneration"),
        *("InternVLForConditionalGeneration", "SmolVLMForConditionalGeneration"),
    }
)
"""Classes whose texts with images the tests compare with `generate`; any other has to pass `try_images`."""


def try_images(scorer: Any, vision: Vision) -> None:
    """Read a small picture, be wrong about what follows, roll back, and compare the logits with those of the model.

    Raises ValueError, without a name before it, if they differ or something fails.
    """
    if type(scorer.model).__name__ in PROVEN_WITH_IMAGES:
        return
    try:
        gap, allowed = _gap(scorer, vision)
    except Exception as error:  # of any kind: models and processors that are called in ways of their own
        raise ValueError(
            f"a picture cannot be read with it ({type(error).__name__}: {first_sentence(error)})."
        ) from error
    finally:
        scorer.free(range(len(scorer.lengths)))
    if not gap <= allowed:
        raise ValueError(f"behind a picture its logits are others (by {gap:.2g} standard deviations).")


@torch.inference_mode()
def _gap(scorer: Any, vision: Vision) -> tuple[float, float]:
    """By how many standard deviations the logits of the last two tokens differ, and how much rounding explains."""
    shades = np.linspace(0, 255, 64 * 64 * 3).astype(np.uint8).reshape(64, 64, 3)
    prompt, images = vision.text("one two three", [shades])
    if images is None:
        raise ValueError("its processor makes nothing of a picture")
    scorer.add(1)
    scorer.show(0, images)
    scorer.prefill([prompt[:-2]])
    scorer.extend(torch.tensor([[prompt[-2], 0, 0]], device=scorer.device), [3])
    scorer.rollback([len(prompt) - 1])
    ours = [scorer.extend(torch.tensor([[prompt[-1], 0]], device=scorer.device), [2])[0, :1]]
    scorer.rollback([len(prompt)])
    ours.append(scorer.extend(torch.tensor([[prompt[0]]], device=scorer.device), [1])[0, :1])
    fresh, _ = run_illustrated(scorer.model, [*prompt, prompt[0]], images)
    theirs = fresh.logits[0, -2:].float()
    gap = float((torch.cat(ours).float() - theirs).abs().max() / theirs.std())
    return gap, 0.01 if scorer.model.dtype in {torch.float32, torch.float64} else 0.3
