"""Speech models: sound to features for the encoder, and the decoder's tokens for language, task and times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoFeatureExtractor
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

from slipstream.core.values import OptionError
from slipstream.text.transcripts import Stamps


@dataclass(frozen=True)
class SpeechInput:
    """Makes the inputs of a speech model, with transformers' feature extractor and the model's generation settings."""

    extractor: Any
    settings: Any

    @staticmethod
    def of(model: Any) -> SpeechInput:
        try:
            extractor = AutoFeatureExtractor.from_pretrained(model.config.name_or_path)
        except Exception as error:  # of any kind, depending on the files
            name = model.config.name_or_path or type(model).__name__
            raise ValueError(f"{name} has no feature extractor (preprocessor_config.json) for sound.") from error
        return SpeechInput(extractor, model.generation_config)

    @property
    def rate(self) -> int:
        return self.extractor.sampling_rate

    def features(self, samples: np.ndarray) -> Tensor:
        """Return the features (bins, frames) of at most `seconds` of sound, (samples,)."""
        made = self.extractor(samples, sampling_rate=self.rate, return_tensors="np")
        return torch.as_tensor(made["input_features"][0])

    @property
    def seconds(self) -> int:
        return round(self.extractor.n_samples / self.rate)

    @property
    def stamps(self) -> Stamps:
        silent = getattr(self.settings, "no_timestamps_token_id", None)
        if silent is None:
            raise OptionError("the model knows no times (no_timestamps_token_id): ask for text alone.", "timestamps")
        return Stamps(silent + 1, 2 * self.extractor.hop_length / self.rate)  # its encoder halves the frames

    def time_rules(self, begin: int) -> Any:
        """Return Whisper's rules for times after `begin` tokens of the decoder, as a logits processor.
        Times come in pairs, do not go back, and are written where together they are more probable than any word."""
        assert self.stamps
        return WhisperTimeStampLogitsProcessor(self.settings, begin)

    def decoder_prompt(self, language: str | None, task: str, timestamps: bool = False) -> tuple[int, ...]:
        """Return the decoder's tokens after its first: language, task, and without `timestamps` the one against times.
        Without a language, English is taken. Raises ValueError for a language that the model does not have."""
        languages = getattr(self.settings, "lang_to_id", None)
        silent = None if timestamps else getattr(self.settings, "no_timestamps_token_id", None)
        if not languages:
            if language not in (None, "en") or task != "transcribe":
                raise OptionError("the model writes English only: leave language and translation out.", "language")
            return () if silent is None else (silent,)
        token = languages.get(f"<|{language or 'en'}|>")
        if token is None:
            known = ", ".join(sorted(name.strip("<|>") for name in languages))
            raise OptionError(f"language {language!r} is not known: the model knows {known}.")
        return (token, self.settings.task_to_id[task], *(() if silent is None else (silent,)))
