"""Speech to text: sound in windows that the encoder reads, and a transcript of them with times."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from torch import Tensor

from slipstream.core.protocols import HasModel, Scorer
from slipstream.core.values import OptionError
from slipstream.engine.generation import Completion
from slipstream.engine.sounds import Sound, opened
from slipstream.models.media.speech import SpeechInput
from slipstream.text.transcripts import Segment, Transcript

WINDOWS = 4  # the windows of a sound that are decoded in one call, per row that runs
TASKS = ("transcribe", "translate")


@dataclass(frozen=True)
class Transcriber:
    """Turns sound into windows for a speech model, and its tokens into a transcript; its decoder holds `longest`."""

    speech: SpeechInput
    tokenizer: Any
    longest: int

    @staticmethod
    def of(target: Scorer, tokenizer: Any) -> Transcriber:
        form = target.source_form
        if form is None or form.features is None or not isinstance(target, HasModel):
            raise ValueError(f"{target.name} does not read sound: take a Whisper.")
        if tokenizer is None:
            raise ValueError(f"{target.name} has no tokenizer to write with; pass tokenizer=... to load().")
        return Transcriber(SpeechInput.of(target.model), tokenizer, target.context or 448)

    def opened(self, sound: Any) -> AbstractContextManager[Sound]:
        return opened(sound, self.speech.rate)

    def count(self, sound: Sound) -> int:
        return math.ceil(sound.seconds / self.speech.seconds)

    def windows(self, sound: Sound, which: Iterable[int] | None = None) -> Iterator[Tensor]:
        """Yield the features of a sound's windows, or of those with these numbers."""
        length = self.speech.seconds
        for number in range(self.count(sound)) if which is None else which:
            yield self.speech.features(sound.part(number * length, (number + 1) * length))

    def options(self, language: str | None, task: str, timestamps: bool) -> dict[str, Any]:
        if task not in TASKS:
            raise OptionError(f"task={task!r} is not known: use {' or '.join(TASKS)}.")
        begin = self.speech.decoder_prompt(language, task, timestamps)
        processors = [self.speech.time_rules(1 + len(begin))] if timestamps else []
        return {"decoder_prompt": begin, "max_new_tokens": self.longest - len(begin) - 1, "processors": processors}

    def written(
        self,
        sound: Any,
        generate: Callable[..., list[Completion]],
        rows: int,
        timestamps: bool,
        on_window: Callable[[int, int], object] | None,
    ) -> Transcript:
        """Write down a sound by calls of `Engine.generate`, each for a few windows for every one of `rows` that run.

        So the memory it takes does not grow with the sound. `on_window` is told how many windows are done, and of how
        many.
        """
        with self.opened(sound) as opened:
            done, windows, finished = list[Completion](), self.windows(opened), itertools.count()
            report = (lambda *_: on_window(next(finished), self.count(opened))) if on_window else (lambda *_: None)
            report()
            while some := list(islice(windows, WINDOWS * rows)):
                done += generate(some, on_completion=report)
        return self.transcript(done, opened.seconds, timestamps)

    def transcript(self, done: Sequence[Completion], duration: float, timestamps: bool) -> Transcript:
        length, segments = self.speech.seconds, list[Segment]()
        decode = partial(self.tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        for number, completion in enumerate(done):
            window = (number * length, min((number + 1) * length, duration))
            if completion.error:
                raise ValueError(f"the sound from {window[0]:g} s on cannot be transcribed: {completion.error}")
            if timestamps:
                segments += self.speech.stamps.segments(list(completion.tokens), decode, window)
            else:
                segments.append(Segment(*window, completion.text, completion.tokens))
        return Transcript(tuple(segments), duration)
