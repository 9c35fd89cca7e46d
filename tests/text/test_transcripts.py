"""Transcripts: times from tokens, and subtitles."""

from collections.abc import Sequence

import pytest

from slipstream.text.transcripts import Segment, Stamps, Transcript, clock

STAMPS = Stamps(100, 0.02)


def decode(tokens: Sequence[int]) -> str:
    return "".join(f" {chr(96 + token)}" for token in tokens if token)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([], []),
        ([0], []),
        ([1, 2], [(0, 5, " a b")]),
        ([100, 1, 150, 150, 2, 3, 200, 0], [(0, 1, " a"), (1, 2, " b c")]),
        ([125, 1, 0], [(0.5, 5, " a")]),  # the last text lasts until the window's end
        ([100, 1, 999], [(0, 5, " a")]),  # no time lies behind it
        ([100, 120, 140], []),  # times alone say nothing
    ],
)
def test_texts_stand_between_their_times(tokens: list[int], expected: list[tuple[float, float, str]]) -> None:
    found = [(each.start, each.end, each.text) for each in STAMPS.segments(tokens, decode, (0, 5))]
    assert found == [(pytest.approx(start), pytest.approx(end), text) for start, end, text in expected]
    later = list(STAMPS.segments(tokens, decode, (30, 35)))
    assert [each.start for each in later] == [pytest.approx(30 + start) for start, _, _ in expected]


def test_subtitles() -> None:
    made = Transcript((Segment(0, 1.5, " a b", (1, 2)), Segment(3725.25, 3726, " c", (3,))), 3726)
    assert made.text == "a b c"
    assert made.srt() == ("1\n00:00:00,000 --> 00:00:01,500\na b\n\n2\n01:02:05,250 --> 01:02:06,000\nc\n\n")
    assert made.vtt().startswith("WEBVTT\n\n00:00:00.000 --> 00:00:01.500\na b\n\n")
    assert Transcript((), 0).text == Transcript((), 0).srt() == ""


def test_times_are_rounded_to_the_next_second_too() -> None:
    assert clock(59.9996) == "00:01:00.000"
