"""Processors of transformers, also without their part for videos: that needs torchvision, and no prompt has any."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers
from transformers import (
    PROCESSOR_MAPPING,
    AutoConfig,
    AutoFeatureExtractor,
    AutoImageProcessor,
    AutoProcessor,
    AutoTokenizer,
    ImageProcessingMixin,
    ProcessorMixin,
)

VIDEOS = "video_processor"


class NoVideos(ImageProcessingMixin):
    """Stands in the place of a processor's part for videos, with the settings that are asked of it without any."""

    num_frames = fps = None
    merge_size = temporal_patch_size = 1
    model_input_names = ("pixel_values_videos",)


class TakesNoVideos:
    """Added to a class of processors: takes `NoVideos` for its part for videos, whose class would be checked."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        """The class that a part has to be of. Raises TypeError if it is none."""
        if argument_name == VIDEOS:
            return NoVideos
        return super().check_argument_for_proper_class(argument_name, argument)  # type: ignore[misc]


PARTS: dict[str, Callable[[Any], Any]] = {
    "image_processor": AutoImageProcessor.from_pretrained,
    "feature_extractor": AutoFeatureExtractor.from_pretrained,
    "audio_processor": AutoFeatureExtractor.from_pretrained,
    "tokenizer": AutoTokenizer.from_pretrained,
    VIDEOS: lambda name: NoVideos(),
}
"""How the parts of processors are loaded, by their names."""


def load_processor(name: str | Path) -> Any:
    """The processor that lies with a model, by its name or folder; one that also reads videos goes without that part
    where torchvision is missing. Raises what transformers raises if there is none."""
    try:
        return AutoProcessor.from_pretrained(name)
    except Exception as error:  # of any kind, depending on what lies there
        kind = _kind(name) if "torchvision" in str(error).lower() else None
        if kind is None or VIDEOS not in kind.get_attributes():
            raise
        return without_videos(kind, name)


def _kind(name: str | Path) -> Any:
    """The class of the processor that lies with a model, as its files call it; None if they do not tell."""
    settings, _ = ProcessorMixin.get_processor_dict(name)
    known = getattr(transformers, settings.get("processor_class") or "", None)
    return known or PROCESSOR_MAPPING.get(type(AutoConfig.from_pretrained(name)), None)


def without_videos(kind: Any, name: str | Path) -> Any:
    """A processor of a class of transformers, whose other parts are loaded one by one."""
    settings, _ = kind.get_processor_dict(name)
    parts = [PARTS[part](name) for part in kind.get_attributes()]
    without: Any = type(kind.__name__, (TakesNoVideos, kind), {})
    return without.from_args_and_dict(parts, settings)
