"""The text of an answer with real kinds of tokenizers: what follows the prompt, byte by byte, up to a stop string."""

import codecs
import random
from collections.abc import Sequence
from functools import cache

import pytest
from transformers import ByT5Tokenizer

from slipstream.text.detokenize import Detokenizer, EmittedText
from slipstream.text.spelling import Spelling
from tongues import SENTENCEPIECE, tongue

KINDS = ("bytes", *SENTENCEPIECE)
STRIPS = ("prepended", "metaspace always", "metaspace first")
"""The kinds that decode a text without the space that they put before it."""


@cache
def spelling(name: str) -> Spelling:
    return Spelling(tongue(name))


def text_of(name: str, tokens: Sequence[int], final: bool = True) -> str:
    """The text of tokens, made of their bytes; unless `final`, without an incomplete character at its end."""
    printed = [token for token in tokens if token not in spelling(name).hidden]
    written = b"".join(map(spelling(name).write, printed))
    if name in STRIPS and written.startswith(b" "):
        written = written[1:]
    return codecs.getincrementaldecoder("utf-8")("replace").decode(written, final)


def answer(name: str, prompt: Sequence[int], output: Sequence[int], final: bool = True) -> str:
    """What an output adds to the text of a prompt, which may end inside a character."""
    before, text = text_of(name, prompt), text_of(name, [*prompt, *output], final)
    return text[len(before) :] if text.startswith(before) else text[len(text_of(name, prompt, final=False)) :]


def stopped(name: str, prompt: Sequence[int], output: Sequence[int], stops: Sequence[str], least: int) -> str:
    """The answer up to the first stop string that is complete after `least` tokens."""
    known = ""
    for count in range(1, len(output) + 1):
        text = answer(name, prompt, output[:count], final=False)
        ends = [place for stop in stops if (place := text.find(stop, max(0, len(known) - len(stop) + 1))) >= 0]
        if ends and count > least:
            return text[: min(ends)]
        known = text
    text = answer(name, prompt, output)
    ends = [place for stop in stops if (place := text.find(stop, max(0, len(known) - len(stop) + 1))) >= 0]
    return text[: min(ends)] if ends and len(output) > least else text


def some_tokens(name: str, rng: random.Random, count: int) -> list[int]:
    tokens, size = list[int](), len(tongue(name))
    while len(tokens) < count:
        wide = tongue(name).encode(rng.choice("😀é日ß"), add_special_tokens=False)
        tokens += [rng.randrange(size)] if rng.random() < 0.5 else wide[: rng.choice((len(wide), len(wide), 2))]
    return tokens[:count]


@pytest.mark.parametrize("name", KINDS)
def test_a_stream_and_a_whole_answer_are_what_the_output_adds_to_the_prompt(name: str) -> None:
    rng = random.Random(3)
    for _ in range(60):
        prompt, output = some_tokens(name, rng, rng.randrange(25)), some_tokens(name, rng, rng.randrange(1, 50))
        want = answer(name, prompt, output)
        whole, stream = (EmittedText(spelling(name).decode, (), prompt, spelling(name).hidden) for _ in range(2))
        whole.extend(output)
        whole.finish()
        pieces = [stream.take(count) for count, token in enumerate(output, 1) if not stream.push(token)]
        stream.finish()
        assert "".join([*pieces, stream.take()]) == whole.text == want
        near = [want[at : at + rng.randrange(1, 4)] for at in (rng.randrange(len(want) + 1) for _ in range(3))]
        stops = [stop for stop in [*near, "~~"] if stop and "\ufffd" not in stop]
        least = rng.choice((0, 0, 3, 10))
        cut = EmittedText(spelling(name).decode, stops, prompt, spelling(name).hidden, least)
        taken = list[str]()
        for count, token in enumerate(output, 1):
            ended = cut.push(token)
            taken.append(cut.take(count))
            if ended:
                break
        cut.finish()
        assert "".join([*taken, cut.take()]) == cut.text == stopped(name, prompt, output, stops, least)


@pytest.mark.parametrize("name", ["word pieces", *KINDS])
def test_the_answer_is_what_the_tokenizer_decodes_after_the_prompt(name: str) -> None:
    """For whole characters the definition is the tokenizer's own: decode(prompt + output) without decode(prompt)."""
    tokenizer = tongue(name)
    for words in ("it is true (True) ok", "def f(x):\n    return x", "naïve 日本 🙂"):
        ids = tokenizer.encode(words, add_special_tokens=False)
        for cut in range(len(ids)):
            before, text = (tokenizer.decode(part, skip_special_tokens=True) for part in (ids[:cut], ids))
            if "\ufffd" in before:
                continue
            following = Detokenizer(spelling(name).decode, ids[:cut])
            assert following.push(*ids[cut:]) + following.flush() == text.removeprefix(before)


def test_without_the_prompt_the_space_is_lost() -> None:
    """The control: what the comparison above must catch."""
    ids = tongue("prepended").encode("it is", add_special_tokens=False)
    cut = next(at for at in range(1, len(ids)) if tongue("prepended").decode(ids[:at]) == "it")
    alone, after = Detokenizer(spelling("prepended").decode), Detokenizer(spelling("prepended").decode, ids[:cut])
    assert (alone.push(*ids[cut:]), after.push(*ids[cut:])) == ("is", " is")


@pytest.mark.parametrize("name", SENTENCEPIECE)
def test_two_of_three_bytes_at_the_end_are_one_broken_character(name: str) -> None:
    """And the whole characters before them stay, though the tokenizer decodes the run of bytes to signs only."""
    tokenizer = tongue(name)
    ids = tokenizer.encode("ok😀😃😄你", add_special_tokens=False)[:-1]
    assert tokenizer.decode(ids).endswith("ok" + 14 * "\ufffd")
    assert spelling(name).decode(ids).endswith("ok😀😃😄\ufffd")


@pytest.mark.parametrize("name", KINDS)
def test_the_bytes_of_a_token_are_its_own(name: str) -> None:
    ids = tongue(name).encode("it is 😀", add_special_tokens=False)
    written = [spelling(name).write(token) for token in ids]
    assert written[-4:] == [b"\xf0", b"\x9f", b"\x98", b"\x80"]
    assert b"".join(written).decode().removeprefix(" ") == "it is 😀"
    assert spelling(name).text(ids[-1]) == "\ufffd"


def test_bytes_that_are_tokens_are_their_own() -> None:
    """ByT5's tokenizer is no fast one, and drops characters that are incomplete."""
    tokenizer = ByT5Tokenizer()
    own, ids = Spelling(tokenizer), tokenizer.encode("ok 😀", add_special_tokens=False)
    assert [own.write(token) for token in ids] == [bytes([byte]) for byte in "ok 😀".encode()]
    made = EmittedText(own.decode, (), ids[:1], own.hidden)
    pieces = [made.take(count) for count, token in enumerate(ids[1:], 1) if not made.push(token)]
    assert pieces == ["k", " ", "", "", "", "😀"]


def test_bytes_without_end_are_decoded_in_short_tails() -> None:
    """Ten thousand bytes that never become a character take as many decodings of a few tokens each."""
    longest = 0

    def decode(tokens: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(tokens))
        return bytes(tokens).decode(errors="replace")

    endless = Detokenizer(decode)
    written = "".join(endless.push(0x80) for _ in range(10_000)) + endless.flush()
    assert (written, longest) == ("\ufffd" * 10_000, 2 * Detokenizer.TAIL)


def transcript(text: str, stops: Sequence[str], least: int = 0) -> EmittedText:
    """A transcript of tokens that are characters; | is special and not printed."""

    def decode(tokens: Sequence[int]) -> str:
        return "".join(chr(token) for token in tokens if chr(token) != "|")

    made = EmittedText(decode, stops, hidden={ord("|"): "<|end|>"}, least=least)
    for character in text:
        if made.push(ord(character)):
            break
    made.finish()
    return made


@pytest.mark.parametrize(
    ("stops", "want", "count"),
    [
        (["<|end|>"], "ab", 3),
        (["<|end|>cd"], "ab", 5),
        (["b<|end|>"], "a", 3),
        (["d", "<|end|>"], "ab", 3),
        (["<|end|>x"], "abcde", 6),
        (["end"], "abcde", 6),  # no text of the answer, and not the name of a special token
        (["<"], "abcde", 6),
    ],
)
def test_the_text_of_a_special_token_ends_an_answer_that_does_not_print_it(
    stops: list[str], want: str, count: int
) -> None:
    made = transcript("ab|cde", stops)
    assert (made.text, made.count, made.take(), bool(made.stop)) == (want, count, want, count < 6)


def test_stop_strings_are_not_looked_for_in_the_first_tokens() -> None:
    assert transcript("abXcXd", ["X"], least=3).text == "abXc"
    assert transcript("abXYcX", ["XY"], least=3).text == "ab", "one that is complete later counts"
    assert transcript("abXcXd", ["X"], least=2).text == "ab"
