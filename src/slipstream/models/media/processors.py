"""Loading processors of transformers, if need be without their video part: it needs torchvision, and is never used."""

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
    """A stand-in for a processor's video part, with the attributes that a processor reads even without videos."""

    num_frames = fps = None
    merge_size = temporal_patch_size = 1
    model_input_names = ("pixel_values_videos",)


class TakesNoVideos:
    """A mixin for a processor class that makes its type check accept `NoVideos` as the video part."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        """Return the class that a processor's part has to be of. Raises TypeError for a part of another class."""
        if argument_name == VIDEOS:
            return NoVideos
        return super().check_argument_for_proper_class(argument_name, argument)  # type: ignore[misc]


# The loaders are looked up when they are called: without pillow, even naming AutoImageProcessor.from_pretrained raises.
PARTS: dict[str, Callable[[Any], Any]] = {
    "image_processor": lambda name: AutoImageProcessor.from_pretrained(name),
    "feature_extractor": lambda name: AutoFeatureExtractor.from_pretrained(name),
    "audio_processor": lambda name: AutoFeatureExtractor.from_pretrained(name),
    "tokenizer": lambda name: AutoTokenizer.from_pretrained(name),
    VIDEOS: lambda name: NoVideos(),
}
"""The functions that load the parts of processors, by the names of the parts."""


def load_processor(name: str | Path) -> Any:
    """Load the processor stored with a model, by its name or folder.

    If torchvision is missing, the video part of a processor that has one is left out. Raises what transformers raises
    if there is no processor.
    """
    try:
        return AutoProcessor.from_pretrained(name)
    except Exception as error:  # of any type, depending on the files
        kind = _kind(name) if "torchvision" in str(error).lower() else None
        if kind is None or VIDEOS not in kind.get_attributes():
            raise
        return without_videos(kind, name)


def _kind(name: str | Path) -> Any:
    """Return the class of the processor stored with a model, as its files name it; None if they name no known one."""
    settings, _ = ProcessorMixin.get_processor_dict(name)
    known = getattr(transformers, settings.get("processor_class") or "", None)
    return known or PROCESSOR_MAPPING.get(type(AutoConfig.from_pretrained(name)), None)


def without_videos(kind: Any, name: str | Path) -> Any:
    """Load a processor of the class `kind` without its video part; its other parts are loaded one by one."""
    settings, _ = kind.get_processor_dict(name)
    parts = [PARTS[part](name) for part in kind.get_attributes()]
    without: Any = type(kind.__name__, (TakesNoVideos, kind), {})
    return without.from_args_and_dict(parts, settings)
