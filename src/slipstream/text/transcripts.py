"""Transcripts of speech with times, as text and as subtitles."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Segment:
    """The text spoken between two times, in seconds from the beginning of the audio, and its token ids."""

    start: float
    end: float
    text: str
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Transcript:
    """The text spoken in an audio of `duration` seconds, as segments in the order of time."""

    segments: tuple[Segment, ...]
    duration: float

    @property
    def text(self) -> str:
        return " ".join(segment.text.strip() for segment in self.segments).strip()

    def srt(self) -> str:
        parts = enumerate(self.segments, 1)
        return "".join(f"{number}\n{_between(each, ',')}\n{each.text.strip()}\n\n" for number, each in parts)

    def vtt(self) -> str:
        return "WEBVTT\n\n" + "".join(f"{_between(each, '.')}\n{each.text.strip()}\n\n" for each in self.segments)


def _between(segment: Segment, point: str) -> str:
    return f"{clock(segment.start, point)} --> {clock(segment.end, point)}"


def clock(seconds: float, point: str = ".") -> str:
    """Format seconds as hours:minutes:seconds and milliseconds after `point`."""
    whole, thousandths = divmod(round(seconds * 1000), 1000)
    return f"{whole // 3600:02}:{whole // 60 % 60:02}:{whole % 60:02}{point}{thousandths:03}"


@dataclass(frozen=True)
class Stamps:
    """The timestamp tokens of a model: `first` is 0 seconds, each later token id `step` seconds more."""

    first: int
    step: float

    def segments(
        self, tokens: Sequence[int], decode: Callable[[Sequence[int]], str], window: tuple[float, float]
    ) -> Iterator[Segment]:
        """Yield the segments of a window of an audio, given as begin and end in seconds: the text between two times.
        Text after the last timestamp lasts until the end of the window."""
        begin, end = window
        start, kept = 0.0, list[int]()
        for token in (*tokens, None):
            if token is not None and token < self.first:
                kept.append(token)
                continue
            time = end - begin if token is None else min((token - self.first) * self.step, end - begin)
            if (text := decode(kept)).strip():
                yield Segment(begin + start, begin + time, text, tuple(kept))
            start, kept = time, []
