"""Greedy texts and their log-probabilities have the same bits with a draft as without, through the whole engine."""

import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import slipstream
from slipstream.cache.stores import Int8Store
from slipstream.execution.backends import Native
from slipstream.execution.programs import Program
from toys.kernels import needs_kernel

pytestmark = needs_kernel
KINDS = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "float32", "quantize": "int8"},
    "int4": {"dtype": "bfloat16", "quantize": "int4"},
    "cache in int8": {"dtype": "float32", "kv_dtype": "int8"},
    "cache in int8, bfloat16": {"dtype": "bfloat16", "kv_dtype": "int8"},
}
BOTH = pytest.param("cache in int8, bfloat16", marks=pytest.mark.slow)
ROWS = 8


def batches(count: int) -> Iterator[list[str]]:
    """`count` prompts of 1 to 40 words, in ragged batches."""
    words = inspect.getsource(textwrap).split(" ")
    prompts = [" ".join(words[11 * i : 11 * i + 1 + 17 * i % 40]) or "#" for i in range(count)]
    for first in range(0, count, ROWS):
        yield prompts[first : first + ROWS]


def differences(engine: slipstream.Engine, count: int, tokens: int) -> int:
    """Decode prompts plainly and with every gamma from 1 to 8, alone and beside others -> how many answers differ."""
    settings: dict[str, Any] = {"max_new_tokens": tokens, "logprobs": 1, "ignore_eos": True}
    found = 0
    for place, prompts in enumerate(batches(count)):
        plain = engine.generate(prompts, plain=True, **settings)
        drafted = engine.generate(prompts, gamma=1 + place % 8, **settings)
        alone = engine.generate(prompts[0], gamma=8 - place % 8, **settings)
        assert sum(done.stats.accepted for done in drafted)
        pairs = zip([*drafted, *alone], [*plain, plain[0]], strict=True)
        found += sum((one.tokens, one.logprobs) != (other.tokens, other.logprobs) for one, other in pairs)
    return found


@pytest.mark.parametrize("kind", [*list(KINDS)[:-1], BOTH])
def test_a_draft_changes_no_bit(kind: str) -> None:
    assert differences(slipstream.load(batch_size=ROWS, **KINDS[kind]), 16, 8) == 0


@pytest.mark.parametrize("kind", ["bfloat16", "cache in int8", BOTH])
def test_trees_and_forks_change_no_bit(kind: str) -> None:
    """Accepted tokens of a tree move together, and answers to one prompt begin as copies of its row."""
    engine = slipstream.load(batch_size=ROWS, tree=(3, 2, 1), **KINDS[kind])
    settings: dict[str, Any] = {"max_new_tokens": 16, "logprobs": 1, "ignore_eos": True, "n": 2}
    for prompts in batches(8):
        plain, drafted = (engine.generate(prompts[::2], plain=plain, **settings) for plain in (True, False))
        assert sum(done.stats.accepted for done in drafted)
        assert [(done.tokens, done.logprobs) for done in drafted] == [(done.tokens, done.logprobs) for done in plain]


@pytest.mark.slow
@pytest.mark.parametrize("programs", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_changes_no_bit_in_a_hundred_prompts(
    kind: str, programs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By programs, and by the models' own code."""
    if not programs:
        monkeypatch.setattr(Native, "run", lambda *inputs, **options: None)
    assert differences(slipstream.load(batch_size=ROWS, **KINDS[kind]), 100, 24) == 0


def test_a_scale_for_all_tokens_of_a_pass_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of a cache in 8 bits: codes that depend on the tokens that were written together."""

    def careless(keys: Tensor, values: Tensor) -> Int8Store:
        scales = [each.abs().amax((2, 3), keepdim=True).expand(*each.shape[:3], 1) / 127 for each in (keys, values)]
        codes = [(each / scale).round().to(torch.int8) for each, scale in zip((keys, values), scales, strict=True)]
        return Int8Store(codes[0], scales[0], codes[1], scales[1])

    monkeypatch.setattr(Int8Store, "of", staticmethod(careless))
    assert differences(slipstream.load(batch_size=ROWS, **KINDS["cache in int8"]), 8, 8)


def test_other_sums_for_many_rows_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: logits of passes with several tokens for each row a bit greater than they are."""
    run = Program.__call__

    def careless(self: Program, inputs: tuple[Tensor, ...]) -> list[Tensor]:
        found = run(self, inputs)
        if inputs[0].numel() <= ROWS:
            return found
        return [one.nextafter(torch.full_like(one, torch.inf)) if one.dtype.is_floating_point else one for one in found]

    monkeypatch.setattr(Program, "__call__", careless)
    assert differences(slipstream.load(batch_size=ROWS, dtype="float32"), 8, 8)
