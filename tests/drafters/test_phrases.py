"""Phrases: counted once in each text, kept where several texts agree, drafted where they are likelier than a copy."""

from pathlib import Path

import pytest

from slipstream.drafters.kinds import EMBEDDED
from slipstream.drafters.phrases import LEAST, PhraseDrafter, Phrases
from toys.drafts import drafted
from toys.texts import GREEDY, row

VOCAB = 10
TEXTS = [[1, 2, 3, 4], [0, 2, 3, 4], [5, 2, 3, 6], [7, 8, 7, 8, 7, 8]]


def test_chances_are_interpolated_counts_of_texts() -> None:
    """After 2 3 come 4, 4 and 6; after 3 the same; and 4 makes up 2 of the 14 pairs of a text and a token in it."""
    phrases = Phrases.fit(TEXTS, VOCAB)
    kinds = 9  # different tokens
    first = (2 + kinds * 0) / (14 + kinds)
    after_3 = (2 + 2 * first) / (3 + 2)
    assert phrases.after([3]) == (4, pytest.approx(after_3))
    assert phrases.after([9, 2, 3]) == (4, pytest.approx((2 + 2 * after_3) / (3 + 2)))


def test_one_text_makes_no_phrase_however_often_it_repeats_itself() -> None:
    assert Phrases.fit(TEXTS, VOCAB).after([7]) == (0, 0.0)
    assert Phrases.fit([*TEXTS, [7, 8]], VOCAB).after([7])[0] == 8  # a second text does


def test_a_table_without_phrases_is_a_table(tmp_path: Path) -> None:
    Phrases.fit([[1, 2]], VOCAB).save(tmp_path / "empty")
    assert Phrases.load(tmp_path / "empty").after([1]) == (0, 0.0)


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    made, file = Phrases.fit(TEXTS, VOCAB), tmp_path / "a.phrases"
    made.save(file)
    read = Phrases.load(file)
    for text in ([3], [2, 3], [1, 2, 3], [0]):
        token, chance = made.after(text)
        assert read.after(text) == (token, pytest.approx(chance, abs=0.002))
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1
    file.write_bytes(damaged)
    with pytest.raises(ValueError):
        Phrases.load(file)


@pytest.mark.parametrize(
    ("texts", "vocab", "words"),
    [([[1, 10]], VOCAB, "do not fit"), ([[-1]], VOCAB, "do not fit"), ([[1]], 1 << 21, "is not possible")],
)
def test_impossible_tables_are_refused(texts: list[list[int]], vocab: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Phrases.fit(texts, vocab)
    with pytest.raises(ValueError, match="make another"):
        PhraseDrafter(Phrases.fit(TEXTS, VOCAB), VOCAB + 1)


SURE = {1: (3, 0.9), 4: (5, 0.9), 6: (7, LEAST)}
"""After 0 comes 3, after that 5, after that hardly ever 7; a context of one token has the number after its id."""


def test_the_likelier_of_copy_and_phrase_is_drafted() -> None:
    drafter = PhraseDrafter(Phrases(SURE, VOCAB), VOCAB)
    assert drafted(drafter, [row([9, 0], sampler=GREEDY)], [5]) == [[3, 5]]  # nothing to copy: phrases
    short = [0, 2, 8, 8, 8, 0]  # a match of one token stands one time in ten, the phrase nine times in ten
    assert drafted(drafter, [row(short, sampler=GREEDY)], [5]) == [[3, 5]]
    long = [9, 8, 7, 2, 0, 6, 6, 9, 8, 7, 2, 0]  # a match of five stands 25 times in 34
    assert drafted(PhraseDrafter(Phrases({1: (3, 0.7)}, VOCAB), VOCAB), [row(long, sampler=GREEDY)], [2]) == [[6, 6]]


def test_a_draft_ends_where_it_would_hardly_stand() -> None:
    drafter = PhraseDrafter(Phrases({1: (0, 0.6)}, VOCAB), VOCAB)  # 0 follows itself, three times in five
    assert drafted(drafter, [row([9, 0], sampler=GREEDY)], [8]) == [[0, 0, 0, 0]]  # 0.6 ** 5 is below LEAST
    assert drafted(drafter, [row([9, 0], sampler=GREEDY)], [2]) == [[0, 0]]
    assert drafted(PhraseDrafter(Phrases({}, VOCAB), VOCAB), [row([9, 0], sampler=GREEDY)], [8]) == [[]]


def test_the_shipped_table_is_of_the_model_that_it_names() -> None:
    phrases = Phrases.load(EMBEDDED / "smollm2.phrases")
    assert phrases.vocab == 49152 and (EMBEDDED / "smollm2.phrases").stat().st_size < 2 << 20
