"""`slipstream generate --num-beams` on the embedded pair: texts, JSON, files to go on with, refusals."""

import json
from typing import Any

import pytest

import slipstream
from terminal import run

BEAMS = ("--num-beams", "3", "--num-return-sequences", "2", "--max-new-tokens", "8", "--dtype", "float32")
PROMPTS = ("def add(a, b):", "import os")


def lines(text: str) -> dict[int, dict[str, Any]]:
    return {line["index"]: line for line in map(json.loads, text.splitlines())}


def test_texts_and_json_are_those_of_the_engine() -> None:
    done = slipstream.load(dtype="float32").generate(PROMPTS, num_beams=3, num_return_sequences=2, max_new_tokens=8)
    shown = run("generate", *PROMPTS, "--draft", "embedded", *BEAMS).stdout
    assert [text in shown for text in (each.text for each in done)] == [True] * 4
    assert shown.count("==> ") == 4 and "prompt 2, sample 2" in shown
    printed = lines(run("generate", *PROMPTS, "--draft", "embedded", *BEAMS, "--json").stdout)
    assert [printed[place]["tokens"] for place in range(4)] == [list(each.tokens) for each in done]
    assert [printed[place]["score"] for place in range(4)] == pytest.approx([each.score for each in done], abs=1e-4)
    places = [(printed[place]["prompt"], printed[place]["sample"]) for place in range(4)]
    assert places == [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--num-beams", "2", "--stream"), "--num-beams and --stream exclude each other"),
        (("--num-beams", "2", "--explain"), "--num-beams and --explain exclude each other"),
        (("--num-beams", "2", "--n", "2"), "excludes n"),
        (("--length-penalty", "2"), "length_penalty is for beam search"),
        (("--num-beams", "2", "--early-stopping", "soon"), "soon"),
        (("--num-beams", "2", "--draft", "lookup|embedded"), "cannot draft for beam search"),
    ],
)
def test_what_does_not_go_together_is_refused(options: tuple[str, ...], sentence: str) -> None:
    result = run("generate", PROMPTS[0], *options)
    assert result.exit_code == 2 and sentence in result.stderr and "Traceback" not in result.stderr


@pytest.mark.slow
def test_early_stopping_is_written_in_words() -> None:
    for word, value in (("true", True), ("false", False), ("never", "never")):
        printed = lines(run("generate", PROMPTS[0], *BEAMS, "--early-stopping", word, "--json").stdout)
        done = slipstream.load(dtype="float32").generate(
            PROMPTS[0], num_beams=3, num_return_sequences=2, max_new_tokens=8, early_stopping=value
        )
        assert [printed[place]["tokens"] for place in range(2)] == [list(each.tokens) for each in done]
