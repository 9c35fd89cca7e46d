"""Errors about the options of a call name the option."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

import slipstream
from slipstream.core.values import OptionError, PromptTooLong

WRONG: dict[str, Any] = {
    "max_new_tokens": 0,
    "n": 0,
    "logprobs": -1,
    "echo": 2,
    "max_time": -1,
    "gamma": -1,
    "verify": "guess",
    "stop": "",
    "seed": -1,
    "temperature": -1,
    "top_k": -1,
    "top_p": 2,
    "min_p": -1,
    "typical_p": 0,
    "logit_bias": {-1: 0},
    "bad_words": [""],
    "stop_token_ids": [1 << 30],
    "priority": "x",
    "prediction": 5,
    "length_penalty": 1.0,
    "min_new_tokens": 999,
    "num_beams": 0,
    "no_repeat_ngram_size": -1,
}


@pytest.fixture(scope="module")
def engine() -> slipstream.Engine:
    return slipstream.load()


@pytest.mark.parametrize("name", WRONG)
def test_an_impossible_value_names_its_option(engine: slipstream.Engine, name: str) -> None:
    with pytest.raises(OptionError) as caught:
        engine.prepare(["x"], {name: WRONG[name]})
    assert caught.value.option == name
    again = pickle.loads(pickle.dumps(caught.value))  # as between processes
    assert (again.option, str(again)) == (name, str(caught.value))


def test_a_prompt_is_no_option(engine: slipstream.Engine) -> None:
    with pytest.raises(ValueError) as caught:
        engine.encode("")
    assert not isinstance(caught.value, OptionError | PromptTooLong)
    with pytest.raises(PromptTooLong, match="holds 1024"):
        engine.encode("x = 1\n" * 1000)
