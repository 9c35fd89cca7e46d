"""Text while it comes: whole characters, stop strings across tokens."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.text.detokenize import Detokenizer, EmittedText


def decode(tokens: Sequence[int]) -> str:
    """A tokenizer of bytes: the hardest case for characters."""
    return bytes(tokens).decode("utf-8", errors="replace")


@given(st.text())
def test_the_pieces_add_up_to_the_text(text: str) -> None:
    detokenizer = Detokenizer(decode)
    pieces = [detokenizer.push(byte) for byte in text.encode()]
    assert "".join(pieces) + detokenizer.flush() == text
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


def test_a_character_waits_for_its_last_byte() -> None:
    detokenizer = Detokenizer(decode)
    assert [detokenizer.push(byte) for byte in "é€a".encode()] == ["", "é", "", "", "€", "a"]


def test_bytes_that_never_become_a_character_are_not_lost() -> None:
    detokenizer = Detokenizer(decode)
    assert [detokenizer.push(0xE2), detokenizer.flush()] == ["", "\ufffd"]


def test_leading_spaces_depend_on_the_token_before() -> None:
    """Sentencepiece-like decoding drops the space of the first token."""
    words = {1: " a", 2: " b"}
    detokenizer = Detokenizer(lambda tokens: "".join(words[token] for token in tokens).removeprefix(" "))
    assert [detokenizer.push(token) for token in (1, 2, 1)] == ["a", " b", " a"]
    assert [detokenizer.push(token) for token in (2, 1) * 50] == [" b", " a"] * 50, "also where the tail was cut"


@pytest.mark.parametrize(
    ("text", "stops", "want", "used"),
    [
        ("ab\n\ncd", ["\n\n"], "ab", 4),
        ("abcabd", ["abd"], "abc", 6),
        ("aXbY", ["Y", "Xb"], "a", 3),  # the first to be complete, not the first in the list
        ("aab", ["b", "ab"], "a", 3),  # complete at the same token: the one that begins first
        ("abc", ["z"], "abc", 3),
        ("é!", ["!"], "é", 3),
    ],
)
def test_a_stop_string_ends_the_text_before_itself(text: str, stops: list[str], want: str, used: int) -> None:
    transcript = EmittedText(decode, stops)
    tokens = 0
    for byte in text.encode():
        tokens += 1
        if transcript.push(byte):
            break
    transcript.finish()
    assert (transcript.text, tokens) == (want, used)


@given(st.text(alphabet="ab\n"), st.lists(st.text(alphabet="ab\n", min_size=1, max_size=3), max_size=2))
def test_what_is_taken_is_never_taken_back(text: str, stops: list[str]) -> None:
    transcript, taken = EmittedText(decode, stops), ""
    for count, byte in enumerate(text.encode(), 1):
        stopped = transcript.push(byte)
        taken += transcript.take(count)
        if stopped:
            break
    transcript.finish()
    taken += transcript.take()
    found = [(text.index(stop) + len(stop), text.index(stop)) for stop in stops if stop in text]
    cut = min(found)[1] if found else None  # the first to be complete
    assert taken == transcript.text == text[:cut]
