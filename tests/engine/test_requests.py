"""The door: what users pass to a call. Either it is understood, or one sentence says what is allowed."""

import math
import pickle
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import BatchEncoding, LogitsProcessorList, TemperatureLogitsWarper

import slipstream
from slipstream.core.values import OptionError, PromptTooLong
from slipstream.decoding.sampling import Sampling
from slipstream.engine.options import read_options
from slipstream.engine.requests import read_prompts

CHAT = [{"role": "user", "content": "hello"}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
LEFT = {"input_ids": [[0, 0, 5], [7, 8, 9]], "attention_mask": [[0, 0, 1], [1, 1, 1]]}
RIGHT = {"input_ids": [[5, 0, 0], [7, 8, 9]], "attention_mask": [[1, 0, 0], [1, 1, 1]]}


def numbers(*values: int) -> Iterator[int]:
    yield from values


UNDERSTOOD: list[tuple[Any, list[Any]]] = [
    ("def f", ["def f"]),
    (["a", "b"], ["a", "b"]),
    (("a", "b"), ["a", "b"]),
    (deque(["a", "b"]), ["a", "b"]),
    (np.array(["a", "b"]), ["a", "b"]),
    ({1: "a", 2: "b"}.values(), ["a", "b"]),
    ((text for text in ("a", "b")), ["a", "b"]),
    ([1, 2, 3], [(1, 2, 3)]),
    ((1, 2, 3), [(1, 2, 3)]),
    (range(3), [(0, 1, 2)]),
    (numbers(4, 5), [(4, 5)]),
    ([numbers(4, 5), range(2)], [(4, 5), (0, 1)]),
    ([np.int64(4), 5], [(4, 5)]),
    ([torch.tensor(4), torch.tensor(5)], [(4, 5)]),
    (np.array([4, 5], dtype=np.int32), [(4, 5)]),
    (np.array([[4, 5], [6, 7]]), [(4, 5), (6, 7)]),
    (torch.tensor([4, 5]), [(4, 5)]),
    (torch.tensor([[4, 5], [6, 7]]), [(4, 5), (6, 7)]),
    ([torch.tensor([4, 5]), torch.tensor([[6]]), [7]], [(4, 5), (6,), (7,)]),
    (["a", [1, 2], CHAT], ["a", (1, 2), CHAT]),
    ({"input_ids": [4, 5], "attention_mask": [1, 1]}, [(4, 5)]),
    (BatchEncoding(LEFT), [(5,), (7, 8, 9)]),
    (BatchEncoding(LEFT, tensor_type="pt"), [(5,), (7, 8, 9)]),
    (BatchEncoding(RIGHT, tensor_type="np"), [(5,), (7, 8, 9)]),
    ([{"input_ids": [4, 5]}, BatchEncoding({"input_ids": [[6]]})], [(4, 5), (6,)]),
    (CHAT, [CHAT]),
    ([CHAT, CHAT], [CHAT, CHAT]),
    (PARTS, [[{"role": "user", "content": "a\nb"}]]),
    ([], []),
]


@pytest.mark.parametrize(("prompts", "want"), UNDERSTOOD, ids=lambda value: repr(value).split(" at 0x")[0][:40])
def test_prompts_that_are_understood(prompts: Any, want: list[Any]) -> None:
    assert read_prompts(prompts) == want


REFUSED: list[tuple[Any, str]] = [
    (None, "prompts is None: a prompt is a text, token ids"),
    (5, r"prompts is 5 \(int\)"),
    (math.nan, r"prompts is nan \(float\)"),
    (b"def f", r"prompts is b'def f' \(bytes\)"),
    (True, r"prompts is True \(bool\)"),
    ([True, False], r"prompt 0 is True \(bool\)"),
    ([1, True], r"prompt 0 is a list that holds True"),
    ([b"x"], r"prompt 0 is b'x' \(bytes\)"),
    (["x", None], "prompt 1 is None"),
    (["x", 5], "prompt 1 is 5"),
    ([5, "x"], "prompt 0 is a list that holds 'x'"),
    ([1.5, 2.5], r"prompt 0 is 1.5 \(float\)"),
    ([[math.nan]], "prompt 0 is a list that holds nan"),
    ([[["x"]]], r"prompt 0 is a list that holds \['x'\] \(list\)"),
    ({"a"}, "which has no order: pass a list"),
    ({"x": "y"}, r"prompts is a dict with the keys \['x'\]"),
    ([{"x": "y"}], "a message of a chat has a"),
    ([*CHAT, "x"], "prompt 0 is a list that holds 'x'"),
    (CHAT[0], "put a message into a list"),
    ([{"role": "user", "content": [{"type": "input_audio"}]}], "has a part without its audio: write"),
    ([{"role": "user", "content": [{"type": "input_video"}]}], "a message of a chat has a"),
    ([{"role": "user", "content": 5}], "a message of a chat has a"),
    *((ids, "a token id that no model knows") for ids in ([10**30], [5, -1], np.array([[-1]]), torch.tensor([-100]))),
    (np.array([True]), "prompts is a ndarray of shape"),
    (np.array(5), "prompts is a ndarray of shape"),
    (torch.tensor([True]), "prompts is a Tensor of shape"),
    (torch.zeros(2, 2, 2, 2), "prompts is a Tensor of shape"),
    (torch.tensor([0.5]), "prompts is a Tensor of shape"),
    ([torch.tensor([[4], [5]])], "holds 2 prompts"),
    ({"input_ids": ["a"]}, "token ids are whole numbers"),
    ({"input_ids": "abc"}, "token ids are whole numbers"),
    ({"input_ids": [[1, 2]], "attention_mask": [[1]]}, "attention_mask of another shape"),
    ({"input_ids": [[1, 2, 3]], "attention_mask": [[1, 0, 1]]}, "attention_mask with holes"),
    ("\ud800", "not valid Unicode"),
    ({"text": "x", "images": "photo.jpg"}, "images of prompt 0 is 'photo.jpg' .*they are a list of images"),
    (str, r"prompts is <class 'str'> \(type\)"),
    (open, "prompts is <built-in function open>"),
]


@pytest.mark.parametrize(("prompts", "says"), REFUSED, ids=lambda value: repr(value).split(" at 0x")[0][:40])
def test_prompts_that_are_refused(prompts: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says) as refusal:
        read_prompts(prompts)
    assert "\n" not in str(refusal.value)


ODD = st.recursive(
    st.one_of(
        *(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.binary(max_size=5)),
        *(st.complex_numbers(), st.just(object()), st.just(np.float32(1)), st.just(np.array([1, 2]))),
        st.just(torch.tensor([[1.0, 2.0]])),
    ),
    lambda inner: st.one_of(
        *(st.lists(inner, max_size=3), st.tuples(inner, inner), st.sets(st.integers(), max_size=2)),
        st.dictionaries(st.sampled_from(["input_ids", "attention_mask", "role", "content", "x"]), inner, max_size=3),
    ),
    max_leaves=6,
)
OPTIONS = (
    *("max_new_tokens", "stop", "seed", "gamma", "verify", "lossless", "plain", "ignore_eos", "temperature", "top_k"),
    *("top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"),
    *("bad_words", "min_new_tokens", "processors", "stop_token_ids", "n", "logprobs", "echo", "max_time", "prediction"),
    *("priority", "cache_salt", "max_tokens", "no_repeat_ngram_size", "surprise"),
)


@given(ODD)
@settings(max_examples=100)
@example({"input_ids": {"input_ids": [1]}})
@example({"input_ids": []})
def test_any_prompts_are_understood_or_refused(prompts: Any) -> None:
    try:
        understood = read_prompts(prompts)
    except ValueError as refusal:
        assert str(refusal).endswith((".", ").")) and "\n" not in str(refusal)
    else:
        assert all(isinstance(prompt, str | tuple | list | torch.Tensor) for prompt in understood)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"stop": ""}, "stop holds ''"),
    ({"stop": [""]}, "stop holds ''"),
    ({"stop": 5}, r"stop is 5 \(int\): it is one text or several"),
    ({"stop": [5]}, r"stop holds 5 \(int\)"),
    ({"stop": b"x"}, "stop is b'x'"),
    ({"max_new_tokens": 1.5}, "max_new_tokens=1.5 is not possible: it must be a whole number, at least 1"),
    ({"max_new_tokens": True}, "max_new_tokens=True is not possible"),
    ({"gamma": 2.5}, "gamma=2.5 is not possible"),
    ({"gamma": True}, "gamma=True is not possible"),
    ({"gamma": "5"}, "gamma='5' is not possible"),
    ({"verify": 5}, "verify=5 is not possible: give the name of a rule"),
    ({"verify": ""}, "verify='' is not known"),
    ({"plain": "no"}, "plain='no' is not possible: it is True or False"),
    ({"temperature": "hot"}, "temperature='hot' is not possible: it must be 0"),
    ({"temperature": 10**400}, "temperature=1000"),
    ({"top_p": None, "min_p": "x"}, "min_p='x' is not possible"),
    ({"logit_bias": {5: math.nan}}, "logit_bias={5: nan} is not possible"),
    ({"logit_bias": {5: math.inf}}, "logit_bias={5: inf} is not possible"),
    ({"logit_bias": {"a": 1.0}}, "logit_bias has the key 'a'"),
    ({"logit_bias": {-1: 1.0}}, "logit_bias has the key -1"),
    ({"logit_bias": {10**6: 1.0}}, "logit_bias has the token id 1000000, but"),
    ({"logit_bias": [1]}, r"logit_bias=\[1\] is not possible: it must be a dict"),
    ({"bad_words": [[]]}, r"bad_words holds \[\]"),
    ({"bad_words": [""]}, "bad_words holds an empty text"),
    ({"bad_words": [5]}, "a word of bad_words is 5"),
    ({"bad_words": [[10**6]]}, "bad_words has the token id 1000000"),
    ({"processors": [5]}, "processors holds 5"),
    ({"processors": 5}, "processors holds 5"),
    ({"stop_token_ids": [10**6]}, "stop_token_ids has the token id 1000000, but"),
    ({"stop_token_ids": [-1]}, "stop_token_ids=-1 is not possible: it must be at least 0"),
    ({"stop_token_ids": 5}, r"stop_token_ids is 5 \(int\): it is a list of token ids"),
    ({"stop_token_ids": [5], "bad_words": [[5]]}, "bad_words forbids the token 5, at which stop_token_ids ends"),
    ({"seed": [1, 2]}, "seed holds 2 numbers for 1 prompts: give one number, or one for each prompt"),
    ({"seed": [-1]}, "seed=-1 is not possible"),
    ({"seed": [0.5]}, "seed=0.5 is not possible"),
    ({"verify": "guess"}, "verify='guess' is not known"),
    ({"length_penalty": 1.0}, "length_penalty is for beam search"),
    ({"logprobs": True}, "logprobs=True is not possible"),
    ({"echo": 1}, "echo=1 is not possible"),
    ({"max_time": "x"}, "max_time='x' is not possible"),
    ({"cache_salt": 5}, r"cache_salt is 5 \(int\), but it is a text"),
    ({"prediction": 5}, r"prediction is 5 \(int\), but it is a text"),
    ({"grammar": "x"}, "give one that `engine.grammars` has made"),
    ({"max_tokens": 5, "max_new_tokens": 5}, "max_tokens and max_new_tokens are one option: give one of them"),
    ({"min_tokens": 9, "max_tokens": 4}, "min_new_tokens=9 is above max_new_tokens=4"),
]

UNNAMED = {
    *(r"stop is 5 \(int\): it is one text or several", r"stop_token_ids is 5 \(int\): it is a list of token ids"),
    *("stop is b'x'", "a word of bad_words is 5"),
}
"""What is said of a list that is none, whatever it is for."""


@pytest.mark.parametrize(("options", "says"), WRONG, ids=lambda value: str(value)[:40])
def test_options_that_are_refused(engine: slipstream.Engine, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        engine.generate("x", **options)
    if isinstance(caught.value, OptionError):  # it names its option, also between processes
        again = pickle.loads(pickle.dumps(caught.value))
        assert again.option.replace("new_", "") in {name.replace("new_", "") for name in options}
        assert (again.option, str(again)) == (caught.value.option, str(caught.value))
    else:
        assert says in UNNAMED


def test_a_prompt_is_no_option(engine: slipstream.Engine) -> None:
    with pytest.raises(ValueError) as caught:
        engine.encode("")
    assert not isinstance(caught.value, OptionError | PromptTooLong)
    with pytest.raises(PromptTooLong, match="holds 1024"):
        engine.encode("x = 1\n" * 1000)


def test_none_is_the_default_and_numpy_numbers_are_numbers() -> None:
    asked, rest = read_options(dict.fromkeys(OPTIONS[:-1]))
    assert (asked, rest) == (read_options({})[0], {})
    asked, rest = read_options({"max_new_tokens": np.int64(3), "temperature": np.float32(0.5), "plain": np.bool_(True)})
    assert asked.max_new_tokens == 3 and asked.plain and Sampling(**rest).temperature == 0.5
    assert read_options({"stop": (text for text in "ab")})[0].stops == ["a", "b"]


def test_what_a_tokenizer_returns_is_the_text(engine: slipstream.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["def f(x):", "import os\nimport"]
    want = [done.tokens for done in engine.generate(texts, max_new_tokens=8)]
    tokenizer = engine.tokenizer
    monkeypatch.setattr(tokenizer, "pad_token", tokenizer.convert_ids_to_tokens(0))
    for side in ("left", "right"):
        for kind in ("pt", "np", None):
            batch = tokenizer(texts, padding=True, padding_side=side, return_tensors=kind)
            assert [done.tokens for done in engine.generate(batch, max_new_tokens=8)] == want
    single = tokenizer(texts[0])
    assert engine.generate(single, max_new_tokens=8)[0].tokens == want[0]
    assert [piece.token for piece in engine.stream(single, max_new_tokens=8)] == list(want[0])
    assert engine.encode(single) == engine.encode(texts[0])


def test_words_and_processors_may_come_alone(engine: slipstream.Engine) -> None:
    halved = TemperatureLogitsWarper(0.5)
    settings: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 8}
    want = engine.generate("def f", processors=[halved], **settings)[0].tokens
    for form in (halved, LogitsProcessorList([halved]), iter([halved])):
        assert engine.generate("def f", processors=form, **settings)[0].tokens == want
    assert engine.generate("x", bad_words="return", max_new_tokens=4)


@pytest.mark.parametrize("size", [0, -1, 2.5, True, "8", None])
def test_a_batch_has_a_size(size: Any) -> None:
    with pytest.raises(ValueError, match=f"batch_size={size!r} is not possible"):
        slipstream.load(batch_size=size)


@pytest.mark.parametrize("gamma", [2.5, True, object()])
def test_a_gamma_that_is_none_is_refused_while_loading(gamma: Any) -> None:
    with pytest.raises(ValueError, match=r"gamma=.* is not possible: give a number of tokens"):
        slipstream.load(gamma=gamma)


def test_forbidding_by_bias_is_allowed(engine: slipstream.Engine) -> None:
    first = engine.generate("def f", max_new_tokens=1)[0].tokens[0]
    assert engine.generate("def f", max_new_tokens=1, logit_bias={first: -math.inf})[0].tokens[0] != first
    assert engine.generate("def f", max_new_tokens=1, logit_bias={3: 1})[0].tokens
