"""What tokens write, which are common, and a growing text in the tokens of another vocabulary."""

import random
from typing import Any

import pytest
import torch

from slipstream.drafters.cross_tokenizer.reader import LONG, Encoding, RetokenizedRow
from slipstream.drafters.cross_tokenizer.vocabulary import ABSENT, CommonTokens, Vocabulary
from tongues import END, STRANGE, TEXT, TONGUES, tongue, toy

FAITHFUL = [name for name in TONGUES if name != "word pieces"]
SAMPLE = TEXT[:1500] + STRANGE + TEXT[1500:2500]


def vocabulary(name: str) -> Vocabulary:
    return Vocabulary.of(tongue(name))


def common(target: str, draft: str) -> CommonTokens:
    sizes = len(tongue(target)), len(tongue(draft))
    return CommonTokens.of(vocabulary(target), vocabulary(draft), sizes)


# ---- pieces -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAITHFUL)
def test_pieces_write_what_was_encoded(name: str) -> None:
    found = vocabulary(name)
    written = found.write(found.encode(SAMPLE)).decode()
    assert written == (" " if found.strips else "") + SAMPLE


@pytest.mark.parametrize("name", TONGUES)
def test_a_piece_is_what_decoding_adds_behind_a_word(name: str) -> None:
    found, tokenizer = vocabulary(name), tongue(name)
    word = found.encode("text")[-1]
    for number in range(0, len(tokenizer), 11):
        piece = found.pieces[number]
        if piece is not None and piece.decode(errors="ignore").encode() == piece:
            both = tokenizer.decode([word, number], clean_up_tokenization_spaces=False)
            assert both == tokenizer.decode([word], clean_up_tokenization_spaces=False) + piece.decode()


def test_special_tokens_write_nothing() -> None:
    found = vocabulary("prepended")
    assert {found.piece(number) for number in found.special} == {None}
    assert found.special == {0: "<unk>", 1: "<s>", 2: "</s>"}
    assert found.prefix == (1,) and found.strips
    assert found.piece(10**6) is None
    assert not vocabulary("marked").strips and vocabulary("bytes").prefix == ()


def test_added_tokens_write_their_text() -> None:
    tokenizer = toy("a", "b", "ab")
    tokenizer.add_tokens(["Ġ?"])  # would be a space in GPT-2's alphabet of bytes
    assert Vocabulary.of(tokenizer).pieces == (b"a", b"b", b"ab", "Ġ?".encode())


def test_of_two_tokens_that_write_the_same_it_is_the_one_the_tokenizer_uses() -> None:
    found = vocabulary("marked")
    twice = [number for number, piece in enumerate(found.pieces) if piece == b"e"]
    assert len(twice) == 2 and found.ids[b"e"] == found.encode("xe")[-1] == max(twice)


def test_a_tokenizer_that_writes_nothing_is_refused() -> None:
    class Mute:
        added_tokens_decoder, all_special_ids = {}, [0]

        def get_vocab(self) -> dict[str, int]:
            return {"<s>": 0}

        def decode(self, ids: Any, **kwargs: Any) -> str:
            return ""

    with pytest.raises(ValueError, match="writes a character"):
        Vocabulary.of(Mute())


# ---- common tokens ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", TONGUES)
@pytest.mark.parametrize("target", TONGUES)
def test_common_tokens_write_the_same(target: str, draft: str) -> None:
    ours, draft_vocabulary, both = vocabulary(target), vocabulary(draft), common(target, draft)
    assert len(both.wanted) > 30
    for t, d in zip(both.wanted.tolist(), both.drafted.tolist(), strict=True):
        assert both.to_draft[t] == d
        same = ours.piece(t) == draft_vocabulary.piece(d)
        assert same and ours.piece(t) if t not in ours.special else both.special[t] == d
    assert int((both.to_draft != ABSENT).sum()) == len(both.wanted)


def test_special_tokens_are_common_by_name_or_role() -> None:
    by_role, by_name = common("bytes", "marked"), common("marked", "prepended")
    assert by_role.special == {tongue("bytes").eos_token_id: tongue("marked").eos_token_id}
    assert by_name.special == {0: 0, 1: 1, 2: 2}
    assert tongue("bytes").eos_token == END != tongue("marked").eos_token


def test_translated_logits_are_renormalised_on_the_common_tokens() -> None:
    both = CommonTokens.of(Vocabulary.of(toy("a", "b", "ab")), Vocabulary.of(toy("b", "c", "a")), (4, 3))
    assert both.wanted.tolist() == [0, 1] and both.drafted.tolist() == [2, 0]
    q = both.translate(torch.tensor([[0.5, 0.2, 0.3]]).log()).softmax(-1)
    assert q[0].tolist() == pytest.approx([0.3 / 0.8, 0.5 / 0.8, 0, 0])


def test_ids_beyond_the_logits_are_not_common() -> None:
    both = CommonTokens.of(Vocabulary.of(toy("a", "b", "ab")), Vocabulary.of(toy("b", "c", "a")), (3, 1))
    assert both.wanted.tolist() == [1] and both.drafted.tolist() == [0]


def test_nothing_in_common_is_refused() -> None:
    ours, draft_tokenizer = toy("a", "b", end="</s>"), toy("x", "y", end="</s>")
    with pytest.raises(ValueError, match="no token of the draft's vocabulary"):
        CommonTokens.of(Vocabulary.of(ours), Vocabulary.of(draft_tokenizer), (3, 3))


# ---- a growing text ---------------------------------------------------------------------------------------------


class Counting:
    def __init__(self, name: str) -> None:
        self.inner, self.characters = vocabulary(name), 0

    def encode(self, text: str) -> list[int]:
        self.characters += len(text)
        return self.inner.encode(text)


@pytest.mark.parametrize("longest", [pytest.param(1, marks=pytest.mark.slow), 9, 700])
@pytest.mark.parametrize("name", TONGUES)
def test_a_text_in_parts_has_the_tokens_of_the_whole(name: str, longest: int) -> None:
    rng, found = random.Random(longest), vocabulary(name)
    encoding, text = Encoding(found), SAMPLE if longest > 9 else SAMPLE[1200:2000]
    start = 0
    while start < len(text):
        stop = start + rng.randint(1, longest)
        encoding.write(text[start:stop])
        start = stop
        assert encoding.ids == found.encode(text[:start]), text[:start][-40:]


@pytest.mark.parametrize("name", TONGUES)
def test_only_the_end_of_a_text_is_encoded_again(name: str) -> None:
    counting = Counting(name)
    encoding = Encoding(counting)  # type: ignore[arg-type]
    prompt, rounds = 4000, 400
    encoding.write(TEXT[:prompt])
    assert counting.characters < 6 * prompt
    counting.characters = 0
    for start in range(prompt, prompt + 5 * rounds, 5):
        encoding.write(TEXT[start : start + 5])
    assert counting.characters < rounds * 3 * LONG  # instead of more than the prompt every time
    assert encoding.ids == counting.inner.encode(TEXT[: prompt + 5 * rounds])


class Whimsical:
    """A vocabulary whose tokens depend on the length of the whole text, so that no cut is ever safe."""

    def encode(self, text: str) -> list[int]:
        """A character is its code, plus the length of all."""
        return [ord(character) + len(text) for character in text]


def test_without_a_safe_cut_the_whole_text_is_encoded() -> None:
    encoding = Encoding(Whimsical())  # type: ignore[arg-type]
    for start in range(0, 1000, 10):
        encoding.write(TEXT[start : start + 10])
        assert encoding.ids == Whimsical().encode(TEXT[: start + 10])


class Fickle:
    """A vocabulary whose first token changes as late as at 300 characters."""

    def encode(self, text: str) -> list[int]:
        """A character is its code, but the first."""
        return [ord(character) + 1000 * (i == 0 and "@" in text) for i, character in enumerate(text)]


def test_an_anchor_that_changes_after_all_is_noticed() -> None:
    encoding, text = Encoding(Fickle()), "x" * 300  # type: ignore[arg-type]
    encoding.write(text)
    encoding.write("@")
    assert encoding.ids == Fickle().encode(text + "@")


# ---- a row's text -----------------------------------------------------------------------------------------------


def reading(target: str, draft: str) -> RetokenizedRow:
    return RetokenizedRow(vocabulary(target), vocabulary(draft), common(target, draft))


@pytest.mark.parametrize("target", FAITHFUL)
@pytest.mark.parametrize("draft", TONGUES)
def test_a_row_is_read_in_the_drafts_tokens(target: str, draft: str) -> None:
    rng, view, found = random.Random(3), reading(target, draft), vocabulary(draft)
    tokens = tongue(target)(SAMPLE[1300:2200])["input_ids"]
    stop = 0
    while stop < len(tokens):
        stop += rng.randint(1, 6)
        view.follow(tokens[:stop])
        if view.whole:
            text = tongue(target).decode(tokens[:stop], skip_special_tokens=True)
            assert view.text == text
            assert view.ids == [*found.prefix, *found.encode(text)]
    assert view.whole and view.ready


def test_an_unfinished_character_is_read_by_its_bytes() -> None:
    view, found = reading("bytes", "marked"), vocabulary("bytes")
    tokens = found.encode("a日")
    view.follow(tokens[:-1])
    assert view.ready and not view.whole and view.text == "a"
    assert vocabulary("marked").write(view.ids) == "a日".encode()[:-1]
    view.follow(tokens)
    assert view.whole and view.ids == vocabulary("marked").encode("a日")


def test_an_unfinished_character_that_the_draft_cannot_see_is_not_ready() -> None:
    view = reading("bytes", "word pieces")
    tokens = vocabulary("bytes").encode("a日")
    view.follow(tokens[:-1])
    assert not view.ready
    view.follow(tokens)
    assert view.ready


def test_special_tokens_are_read_by_role_and_end_the_text_before_them() -> None:
    view, found = reading("bytes", "prepended"), vocabulary("bytes")
    end, draft_tokenizer = tongue("bytes").eos_token_id, tongue("prepended")
    view.follow([*found.encode("one"), end, *found.encode("two")])
    words = [vocabulary("prepended").encode(word) for word in ("one", "two")]
    assert view.ids == [draft_tokenizer.bos_token_id, *words[0], draft_tokenizer.eos_token_id, *words[1]]
    assert view.text == "two"


def test_a_beginning_is_read_once() -> None:
    view = reading("prepended", "prepended")
    tokens = tongue("prepended")("text")["input_ids"]
    view.follow(tokens)
    assert view.ids == tokens


def test_special_tokens_without_counterpart_are_passed_over() -> None:
    view, found = reading("marked", "bytes"), vocabulary("marked")
    view.follow([*found.encode("one"), tongue("marked").bos_token_id, *found.encode("two"), 10**4])
    assert view.ids == [*vocabulary("bytes").encode("one"), *vocabulary("bytes").encode("two")]
