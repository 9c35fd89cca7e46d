"""Streams: the same texts, and an engine that is free again at once."""

from contextlib import closing
from typing import Any

import pytest

import slipstream
from slipstream.engine.generation import Piece

PROMPTS = ["def add(a, b):\n", "x =", "import os"]
LONG: dict[str, Any] = {"max_new_tokens": 400, "ignore_eos": True}


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "n": 2}, {"stop": ["\n"], "echo": True, "logprobs": 1}])
def test_a_stream_of_several_prompts_is_what_generate_answers(
    engine: slipstream.Engine, settings: dict[str, Any]
) -> None:
    want = engine.generate(PROMPTS, max_new_tokens=20, **settings)
    pieces: list[list[Piece]] = [[] for _ in want]
    order = []
    for index, piece in engine.stream_batch(PROMPTS, max_new_tokens=20, **settings):
        pieces[index].append(piece)
        order.append(index)
    for found, done in zip(pieces, want, strict=True):
        last = found[-1].completion
        assert last and (last.text, last.tokens, last.logprobs) == (done.text, done.tokens, done.logprobs)
        assert "".join(piece.text for piece in found) == done.text
        assert tuple(piece.token for piece in found) == done.tokens
    assert order != sorted(order)  # they run together


def test_what_cannot_be_is_said_at_once(engine: slipstream.Engine) -> None:
    with pytest.raises(ValueError, match="prompt 1 has 5"):
        engine.stream_batch(["x", "x " * 5000])
    with pytest.raises(ValueError, match="n=2 asks for several: use stream_batch"):
        engine.stream("x", n=2)
    with pytest.raises(ValueError, match="here are 2: use stream_batch"):
        engine.stream(["x", "y"])
    with pytest.raises(TypeError, match="unknown option gama"):
        engine.stream("x", gama=3)


def test_closing_a_stream_frees_the_engine(engine: slipstream.Engine) -> None:
    with closing(engine.stream_batch(PROMPTS, **LONG)) as stream:  # type: ignore[type-var]
        next(iter(stream))
        with pytest.raises(RuntimeError, match="serves one call at a time"):
            engine.generate("x", max_new_tokens=1)
    assert list(engine.decoder.target.lengths) == []
