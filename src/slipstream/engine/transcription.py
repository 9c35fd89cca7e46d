"""Speech to text: sound in windows that the encoder reads, and a transcript of them with times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from slipstream.core.protocols import HasModel, Scorer
from slipstream.core.values import OptionError
from slipstream.engine.generation import Completion
from slipstream.engine.sounds import read_sound
from slipstream.models.media.speech import SpeechInput
from slipstream.text.transcripts import Segment, Transcript

TASKS = ("transcribe", "translate")


@dataclass(frozen=True)
class Transcriber:
    """Turns sound into windows for a speech model, and its tokens into a transcript.

    `longest` is how many tokens its decoder can hold.
    """

    speech: SpeechInput
    tokenizer: Any
    longest: int

    @staticmethod
    def of(target: Scorer, tokenizer: Any) -> Transcriber:
        """Make one for a target that reads sound. Raises ValueError for others, and without a feature extractor."""
        form = target.source_form
        if form is None or form.features is None or not isinstance(target, HasModel):
            raise ValueError(f"{target.name} does not read sound: take a Whisper.")
        if tokenizer is None:
            raise ValueError(f"{target.name} has no tokenizer to write with; pass tokenizer=... to load().")
        return Transcriber(SpeechInput.of(target.model), tokenizer, target.context or 448)

    def read(self, sound: Any) -> np.ndarray:
        """Return the samples of a file, of its bytes, or as they are given; see `read_sound`."""
        return read_sound(sound, self.speech.rate)

    def windows(self, samples: np.ndarray) -> list[Tensor]:
        """Return the features of the sound, one window after the other."""
        return self.speech.windows(samples)

    def options(self, language: str | None, task: str, timestamps: bool) -> dict[str, Any]:
        """Return the options of `Engine.generate` for a task. Raises ValueError if the model lacks it."""
        if task not in TASKS:
            raise OptionError("task", f"task={task!r} is not known: use {' or '.join(TASKS)}.")
        begin = self.speech.decoder_prompt(language, task, timestamps)
        processors = [self.speech.time_rules(1 + len(begin))] if timestamps else []
        return {"decoder_prompt": begin, "max_new_tokens": self.longest - len(begin) - 1, "processors": processors}

    def transcript(self, done: Sequence[Completion], samples: np.ndarray, timestamps: bool) -> Transcript:
        """Join the texts of the windows into a transcript. Raises ValueError if one of them failed."""
        duration, length = len(samples) / self.speech.rate, self.speech.seconds
        segments: list[Segment] = []
        for number, completion in enumerate(done):
            window = (number * length, min((number + 1) * length, duration))
            if completion.error:
                raise ValueError(f"the sound from {window[0]:g} s on cannot be transcribed: {completion.error}")
            if timestamps:
                segments += self.speech.stamps.segments(completion.tokens, self._decode, window)
            else:
                segments.append(Segment(*window, completion.text, completion.tokens))
        return Transcript(tuple(segments), duration)

    def _decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
