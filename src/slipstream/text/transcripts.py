"""Transcripts: what was said, and when, as text and as subtitles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Segment:
    """What was said between two times, in seconds from the beginning of the sound; `tokens` are its text's."""

    start: float
    end: float
    text: str
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Transcript:
    """What was said in a sound of `duration` seconds, in the order of time."""

    segments: tuple[Segment, ...]
    duration: float

    @property
    def text(self) -> str:
        """All of it, without times."""
        return " ".join(segment.text.strip() for segment in self.segments).strip()

    def srt(self) -> str:
        """Subtitles in the format of SubRip."""
        parts = enumerate(self.segments, 1)
        return "".join(f"{number}\n{_between(each, ',')}\n{each.text.strip()}\n\n" for number, each in parts)

    def vtt(self) -> str:
        """Subtitles in the format WebVTT."""
        return "WEBVTT\n\n" + "".join(f"{_between(each, '.')}\n{each.text.strip()}\n\n" for each in self.segments)


def _between(segment: Segment, point: str) -> str:
    return f"{clock(segment.start, point)} --> {clock(segment.end, point)}"


def clock(seconds: float, point: str = ".") -> str:
    """Hours, minutes, seconds and milliseconds."""
    whole, thousandths = divmod(round(seconds * 1000), 1000)
    return f"{whole // 3600:02}:{whole // 60 % 60:02}:{whole % 60:02}{point}{thousandths:03}"


@dataclass(frozen=True)
class Stamps:
    """Tokens that stand for times: `first` for 0, each later one for `step` seconds more."""

    first: int
    step: float

    def segments(
        self, tokens: Sequence[int], decode: Callable[[Sequence[int]], str], window: tuple[float, float]
    ) -> Iterator[Segment]:
        """What was said in a window of a sound, from its begin to its end in seconds: the text between two times.

        Text behind the last time lasts until the end of the window.
        """
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
