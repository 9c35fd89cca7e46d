"""The suffix array is in order, a match is the naive one, and a file is whole or absent."""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.drafters.datastore.corpus import DEPTH, SAMPLE, Corpus, Match, sort_suffixes

VOCAB = 5
documents = st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=30), min_size=1, max_size=6).filter(any)
contexts = st.lists(st.integers(0, VOCAB - 1), max_size=12)


def naive(texts: Sequence[Sequence[int]], context: Sequence[int], count: int) -> Match:
    """The longest suffix by trying all, the way on by counting all."""
    for length in range(min(len(context), DEPTH), 0, -1):
        tail = list(context[-length:])
        after = [
            [*text, VOCAB][place + length : place + length + count]
            for text in texts
            for place in range(len(text) - length + 1)
            if list(text[place : place + length]) == tail
        ]
        if after:
            return majority(length, after, count)
    return Match()


def majority(length: int, after: list[list[int]], count: int) -> Match:
    total, tokens, chances = len(after), [], []
    for place in range(count):
        token, votes = Counter(way[place] for way in after).most_common(1)[0]
        if token == VOCAB:
            break
        after = [way for way in after if way[place] == token]
        tokens.append(token)
        chances.append(votes / total)
    return Match(length, tuple(tokens), tuple(chances))


# ---- order and matches ------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 3), min_size=1, max_size=80), st.integers(1, 12))
def test_suffixes_are_in_order_up_to_the_depth(text: list[int], depth: int) -> None:
    """An alphabet of 2 ** 20 leaves room for three tokens in the first sort, so that doubling has to work."""
    for ids in (4, 1 << 20):
        order = sort_suffixes(np.array(text), ids, depth).tolist()
        heads = [text[start : start + depth] for start in order]
        assert sorted(order) == list(range(len(text))) and heads == sorted(heads)


def test_the_order_is_not_that_of_a_smaller_depth() -> None:
    text = [0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0]
    order = sort_suffixes(np.array(text), 1 << 20, 3).tolist()
    heads = [text[start : start + 6] for start in order]
    assert heads != sorted(heads)


@given(documents, contexts, st.integers(1, 5))
def test_a_match_is_the_longest_and_its_draft_the_most_frequent(
    texts: list[list[int]], context: list[int], count: int
) -> None:
    match, want = Corpus.build(texts, VOCAB).match(context, count), naive(texts, context, count)
    assert match.length == want.length
    if match.tokens != want.tokens:  # a tie: another way that is as frequent
        first = next(i for i, (a, b) in enumerate(zip(match.tokens, want.tokens, strict=False)) if a != b)
        assert match.chances[: first + 1] == want.chances[: first + 1]
    elif want.length and sum(map(len, texts)) <= SAMPLE:
        assert match.chances == want.chances


def test_the_majority_wins_and_the_earliest_among_equals() -> None:
    corpus = Corpus.build([[1, 2, 3], [1, 2, 4], [1, 2, 4]], VOCAB)
    assert corpus.match([0, 1, 2], 3) == Match(2, (4,), (2 / 3,))
    assert Corpus.build([[1, 2, 4], [1, 2, 3]], VOCAB).match([1, 2], 3) == Match(2, (4,), (0.5,))
    assert Corpus.build([[1, 2, 3], [1, 2, 4]], VOCAB).match([1, 2], 3) == Match(2, (3,), (0.5,))


def test_of_many_occurrences_a_sample_is_asked() -> None:
    texts = [[1, 2]] * 300 + [[1, 3]] * 700
    match = Corpus.build(texts, VOCAB).match([1], 2)
    assert match.tokens == (3,) and abs(match.chances[0] - 0.7) <= 1 / SAMPLE


def test_a_match_is_no_longer_than_the_depth() -> None:
    text = [1, *[0] * (DEPTH + 9), 2]
    match = Corpus.build([text], VOCAB).match(text[:-1], 2)
    assert match == Match(DEPTH, (0, 0), (9 / 10, 8 / 10))  # with the token before, only one place would be left


def test_nothing_crosses_the_end_of_a_document() -> None:
    corpus = Corpus.build([[1, 2], [3, 4]], VOCAB)
    assert corpus.match([1, 2], 3) == Match(2)
    assert corpus.match([2, 3], 3) == Match(1, (4,), (1.0,))
    assert corpus.match([], 3) == corpus.match([0], 3) == Match()
    assert corpus.documents == 2 and len(corpus) == 6


def test_marks_are_matched_and_never_drafted() -> None:
    corpus = Corpus.build([[6, 1, 2], [1, 3, 6, 4]], VOCAB, marks=1)
    assert corpus.match([6], 1).length == 1
    assert corpus.match([6, 1], 2) == Match(2, (2,), (1.0,))
    assert corpus.match([1, 3], 2) == Match(2)


@pytest.mark.parametrize("vocab", [1 << 16, 200_000, (1 << 16) - 1])
def test_vocabularies_of_any_size(vocab: int) -> None:
    """Two bytes per token while the end of a document fits beside the vocabulary; four beyond."""
    corpus = Corpus.build([[vocab - 1, 256, 1, vocab - 1, 255, 2]], vocab)
    assert corpus.text.shape[1] == (2 if vocab < 1 << 16 else 4)
    assert corpus.match([256, 1], 2) == Match(2, (vocab - 1, 255), (1.0, 1.0))


NONSENSE = [
    ([[0, 5]], "do not fit"),
    ([[-1]], "do not fit"),
    ([[[1], [2]]], "give token ids"),
    ([[0.5]], "give token ids"),
    ([], "no tokens"),
    ([[]], "no tokens"),
]


@pytest.mark.parametrize(("texts", "words"), NONSENSE, ids=str)
def test_what_is_no_text_is_refused(texts: list[list[int]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Corpus.build(texts, VOCAB)


# ---- files ------------------------------------------------------------------------------------------------------


def test_a_file_gives_the_same_matches(tmp_path: Path) -> None:
    built = Corpus.build([[1, 2, 3, 1, 2, 4]], VOCAB, "words")
    built.save(tmp_path / "c")
    loaded = Corpus.load(tmp_path / "c")
    assert (loaded.vocab, loaded.tokenizer, loaded.documents, len(loaded)) == (VOCAB, "words", 1, 7)
    assert loaded.match([1, 2], 3) == built.match([1, 2], 3) != Match()
    assert os.listdir(tmp_path) == ["c"]


def test_what_is_no_corpus_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "c").write_bytes(b"no corpus")
    with pytest.raises(ValueError, match=r"damaged.*build it with `slipstream draft build`\.$"):
        Corpus.load(tmp_path / "c")
    with pytest.raises(FileNotFoundError, match="draft build"):
        Corpus.load(tmp_path / "absent")
