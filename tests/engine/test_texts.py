"""Grammars, bans and texts on real kinds of tokenizers, with a model for which every token is as likely."""

import pytest

from slipstream.decoding.controllers import Fixed
from slipstream.decoding.decoder import Decoder, NoDraft
from slipstream.engine.engine import Engine
from tongues import SENTENCEPIECE, tongue
from toys import scorer


def even(name: str) -> Engine:
    tokenizer, size = tongue(name), len(tongue(name))
    decoder = Decoder(scorer(lambda prefix: [1 / size] * size, "even", size), NoDraft(), controller=Fixed(0))
    return Engine(decoder, tokenizer, frozenset([tokenizer.eos_token_id]))


@pytest.mark.parametrize("name", ["bytes", *SENTENCEPIECE])
def test_a_grammar_means_the_text_that_follows_the_prompt(name: str) -> None:
    engine = even(name)
    for text in (" is true", "is true", "日本"):
        [done] = engine.generate("it", grammar=engine.grammars.choice([text]), temperature=1, max_new_tokens=20)
        assert (done.text, done.finish_reason) == (text, "stop")


def eager(name: str, prompt: str, output: str) -> Engine:
    """An engine that writes an output wherever it may, and any token where it may not."""
    tokenizer, size = tongue(name), len(tongue(name))
    before, both = (tokenizer(text)["input_ids"] for text in (prompt, prompt + output))

    def law(prefix: tuple[int, ...]) -> list[float]:
        weights = [0.1 / size] * size
        weights[both[len(prefix)] if len(prefix) < len(both) else tokenizer.eos_token_id] += 0.9
        return weights

    assert both[: len(before)] == before
    decoder = Decoder(scorer(law, "eager", size), NoDraft(), controller=Fixed(0))
    return Engine(decoder, tokenizer, frozenset([tokenizer.eos_token_id]))


@pytest.mark.parametrize("name", ["bytes", *SENTENCEPIECE])
@pytest.mark.parametrize("output", [" True", "(True", ' "True', "\nTrue", "=True"])
def test_a_banned_word_is_banned_behind_brackets_and_where_words_begin(name: str, output: str) -> None:
    engine = eager(name, "it", output)
    free = engine.generate("it", max_new_tokens=8)[0].text
    assert free == output
    assert "True" not in engine.generate("it", max_new_tokens=8, bad_words=["True"])[0].text


def test_the_stop_string_that_ended_a_text_is_told() -> None:
    engine = eager("prepended", "it", " is true")
    for stop, found in (([" true", "zz"], (" is", " true")), (["zz"], (" is true", None))):
        [done] = engine.generate("it", stop=stop, max_new_tokens=12)
        assert (done.text, done.stop) == found


def test_beams_continue_the_prompt_too() -> None:
    engine = eager("prepended", "it", " is true")
    assert engine.generate("it", num_beams=2, max_new_tokens=12)[0].text == " is true"
