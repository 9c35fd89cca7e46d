"""Any arguments at all for `load`, `generate`, `stream` and `custom_generate`: an answer, or a documented error."""

import math
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import slipstream
from slipstream.decoding.rules import COUPLED
from slipstream.drafters.lookup import Lookup
from toys import FAMILIES, HF_VOCAB, tiny

DOCUMENTED = (ValueError, TypeError, FloatingPointError)


@cache
def model(seed: int = 0) -> Any:
    return tiny(FAMILIES["llama"], seed)


# ---- what is drawn ----------------------------------------------------------------------------------------------


def fails(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    raise KeyError("processor")


def poisons(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores * math.nan


def forbids(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores - math.inf


def cuts(ids: torch.Tensor, scores: torch.Tensor) -> Any:
    return scores[:, 1:]


def loses(ids: torch.Tensor, scores: torch.Tensor) -> Any:
    return None


HUGE = 10**30
ODD: list[Any] = [
    *(None, True, False, 0, 1, 2, -1, HUGE, 0.0, 0.5, 1.0, -0.5, 2.5, math.nan, math.inf, -math.inf, 1e308, 1e-308),
    *("", "x", "auto", "block", "\ud800", b"", b"x", [], [1], (2, 1), [[]], [""], ["x"], [None], [1.5], {}, {1: 2.0}),
    *({"x": "y"}, {"input_ids": [1, 2]}, {"input_ids": []}, {HUGE: 1.0}, {1: math.nan}, set(), {1}, {"a"}, range(3)),
    *(object(), object, print, 1j, np.int64(2), np.float32(0.5), np.array([1, 2]), np.array(2), np.zeros((0, 3))),
    *(torch.tensor([1, 2]), torch.tensor(1), torch.tensor([0.5]), torch.zeros(0, dtype=torch.long)),
    *(torch.tensor([[1, 2], [3, 4]]), torch.tensor([True]), Path("nowhere"), Path("."), [HUGE], [-1]),
    *([HF_VOCAB], [[1], "x"], [{"role": "user", "content": "x"}], fails, poisons, forbids, cuts, loses, [fails, 5]),
]
"""Values of every kind, for any argument."""

ALIENS = [*ODD, "no/such", Path("missing"), torch.nn.Linear(2, 2)]
"""What is no model."""

MEANT: dict[str, list[Any]] = {
    "stop": ["x", ["a", "b"]],
    "seed": [0, 3, 2**63, 2**64, [1], [1, 2], (0,)],
    "stop_token_ids": [[1], [1, 2], [HF_VOCAB]],
    "n": [1, 2],
    "logprobs": [0, 3, HF_VOCAB + 1],
    "echo": [True, False],
    "max_time": [1e-9, 10.0],
    "prediction": ["x"],
    "grammar": [object()],
    "priority": [1, -1],
    "cache_salt": ["x"],
    "max_tokens": [1, 2],
    "min_tokens": [0, 1],
    "no_repeat_ngram_size": [1, 2],
    "gamma": [0, 1, 4, "auto", 100],
    "verify": ["token", "block", "match", "coupled", "lenient:0.5", "lenient:x", "lenient:nan", COUPLED],
    "temperature": [0, 1, 0.5, 1e-9, 1e9],
    "top_k": [0, 1, 5, HF_VOCAB, HF_VOCAB + 1],
    "top_p": [0.5, 1, 1e-9],
    "min_p": [0.0, 0.5, 1.0],
    "typical_p": [0.5, 1, 1e-9],
    "repetition_penalty": [1.5, 0.5],
    "presence_penalty": [1.0, -1.0],
    "frequency_penalty": [1.0, -1.0],
    "logit_bias": [{1: 5.0}, {1: -math.inf}, dict.fromkeys(range(HF_VOCAB), -math.inf), {HF_VOCAB: 1.0}],
    "bad_words": [[[1, 2]], [[1]], [[HF_VOCAB]]],
    "min_new_tokens": [0, 1, 2],
    "processors": [[poisons], [cuts], [loses], forbids],
    "max_new_tokens": [1, 2],
    "skip": [(), (0,), {5}],
    "on_round": [None, print, 5],
    "on_completion": [None, 5, []],
    "lossless": [True, False],
    "plain": [True, False],
    "ignore_eos": [True, False],
    "num_beams": [1, 2, 3, HF_VOCAB],
    "length_penalty": [0.0, 2.0, -50.0, 51.0],
    "early_stopping": [True, False, "never"],
    "num_return_sequences": [1, 2, 3],
    "surprise": [1],
}
"""Values of the kind that an option has, in and out of its bounds."""

WORK = {"max_new_tokens", "min_new_tokens", "max_tokens", "n", "gamma"}
"""Options whose large values are work to do."""

PROMPTS: list[Any] = [[1, 2, 3], [[1, 2], [3]], "x", [0] * 200, [1] * 127, torch.tensor([[1, 2], [3, 4]])]


def small(name: str) -> list[Any]:
    """The values of an option that end soon."""
    large = (HUGE, 1e308, math.inf) if name in WORK - {"gamma"} else ()
    return [value for value in (*MEANT[name], *ODD) if not any(value is each for each in large)]


@st.composite
def options(draw: Any, names: tuple[str, ...]) -> dict[str, Any]:
    chosen = draw(st.lists(st.sampled_from(names), max_size=3, unique=True))
    return {name: draw(st.sampled_from(MEANT[name] if draw(st.booleans()) else small(name))) for name in chosen}


CALLS = tuple(MEANT)
STREAMS = tuple(name for name in MEANT if name not in {"skip", "on_round", "on_completion"})
LOADS: dict[str, list[Any]] = {
    "draft": [
        *("lookup", "embedded", "plain", "exit:1", "lookup|plain", "lookup||plain", "ngram:missing"),
        *("exit:9", "no/such", "a>", Path("missing"), Lookup(), "exit:x", "datastore:missing", "lookup?x=1", "|"),
    ],
    "gamma": MEANT["gamma"],
    "tree": [(2, 1), [3], (0,), (1000, 1000), "2,1", (2.5,), ("x",)],
    "verify": MEANT["verify"],
    "batch_size": [1, 8],
    "dtype": ["auto", "float32", "bfloat16", torch.float16, "float64", torch.int8, torch.complex64],
    "device": ["cpu", "meta", "cuda:99", "nowhere", torch.device("cpu")],
    "plan": ["missing.json", Path("missing.json"), Path(".")],
    "exact_shape": [True],
    "tokenizer": [None],
    "task": ["x", "a>b"],
    "surprise": [1],
}
SILENT: list[Any] = [print, object, fails, poisons, forbids, cuts, loses]
"""Functions that are no verifiers; as one, they may raise what they like."""

HOOKS: dict[str, list[Any]] = {
    "gamma": MEANT["gamma"],
    "verifier": [COUPLED, "block", COUPLED.verify],
    "seed": [0, 3, -1, 2**63, 2**64],
}


# ---- what has to hold -------------------------------------------------------------------------------------------


def refused(error: Exception) -> None:
    """An error that a user gets is one of those that are documented, with a sentence in one line."""
    assert str(error)
    of_python = r"'NoneType' object|has no attribute|not subscriptable|unsupported operand"
    assert not re.search(of_python, str(error)), repr(error)


@pytest.fixture(scope="module")
def engines() -> Iterator[list[slipstream.Engine]]:
    yield [slipstream.load(model(), model(1), gamma=2), slipstream.load()]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", [16, pytest.param(250, marks=pytest.mark.slow)])
def test_calls(engines: list[slipstream.Engine], count: int) -> None:

    @settings(max_examples=count, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(engines), st.booleans(), st.data())
    def each(engine: slipstream.Engine, whole: bool, data: Any) -> None:
        prompt = data.draw(st.sampled_from(PROMPTS if data.draw(st.booleans()) else ODD))
        arguments = {"max_new_tokens": 2, **data.draw(options(CALLS if whole else STREAMS))}
        if arguments["max_new_tokens"] is None:  # the default
            arguments["max_new_tokens"] = 3
        try:
            made = engine.generate(prompt, **arguments) if whole else list(engine.stream(prompt, **arguments))
        except DOCUMENTED as error:
            refused(error)
        else:
            assert isinstance(made, list)

    each()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", [8, pytest.param(120, marks=pytest.mark.slow)])
def test_engines(count: int) -> None:

    @settings(max_examples=count, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def each(data: Any) -> None:
        names = data.draw(st.lists(st.sampled_from(sorted(LOADS)), max_size=3, unique=True))
        chosen = {name: data.draw(st.sampled_from(LOADS[name] if data.draw(st.booleans()) else ODD)) for name in names}
        target = data.draw(st.sampled_from([model(), None] if data.draw(st.booleans()) else ALIENS))
        try:
            made = slipstream.load(target, **chosen).generate([1, 2, 3], max_new_tokens=2)
        except DOCUMENTED as error:
            refused(error)
        else:
            assert len(made[0].tokens) == 2

    each()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", [8, pytest.param(100, marks=pytest.mark.slow)])
def test_hooks(count: int) -> None:

    @settings(max_examples=count, suppress_health_check=list(HealthCheck))
    @given(st.booleans(), st.data())
    def each(samples: bool, data: Any) -> None:
        draft = data.draw(st.sampled_from([model(1)] if data.draw(st.booleans()) else ALIENS))
        names = data.draw(st.lists(st.sampled_from(sorted(HOOKS)), max_size=3, unique=True))
        chosen = {name: data.draw(st.sampled_from(HOOKS[name] if data.draw(st.booleans()) else ODD)) for name in names}
        assume(not any(chosen.get("verifier") is each for each in SILENT))
        ids = torch.tensor([[1, 2, 3]])
        try:
            speculate = slipstream.custom_generate(draft, **chosen)
            made = model().generate(ids, custom_generate=speculate, max_new_tokens=2, do_sample=samples)
        except DOCUMENTED as error:
            refused(error)
        else:
            assert made.shape == (1, 5)

    each()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"plan": 0.5}, r"plan=0.5 is not possible: give a file that `slipstream plan --save` wrote"),
        ({"plan": False}, "plan=False is not possible"),
        ({"plan": []}, r"plan=\[\] is not possible"),
        ({"exact_shape": torch.tensor([1, 2])}, r"exact_shape=tensor\(\[1, 2\]\) is not possible: it is True or False"),
        ({"compile": "no"}, "compile='no' is not possible: it is True or False"),
        ({"tokenizer": [101]}, r"tokenizer=\[101\] is not possible"),
        ({"tokenizer": ""}, "tokenizer='' is not possible"),
    ],
)
def test_what_load_cannot_use_is_one_sentence(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        slipstream.load(model(), **wrong)


def test_options_that_nobody_reads_are_refused() -> None:
    with pytest.raises(TypeError, match="unknown option gama: a loaded model is used as it is"):
        slipstream.load(model(), gama=3)


@pytest.mark.parametrize("verifier", [None, 5, "x"])
def test_a_verifier_is_a_rule_or_a_function(verifier: Any) -> None:
    with pytest.raises(ValueError, match="is not possible: give one of "):
        slipstream.custom_generate(model(1), verifier=verifier)
