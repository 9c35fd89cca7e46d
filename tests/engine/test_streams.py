"""Streams of several prompts and of event loops: the same texts, and an engine that is free again at once."""

from __future__ import annotations

import asyncio
import threading
from contextlib import aclosing, closing
from typing import Any

import pytest

import slipstream
from slipstream.engine.generation import Piece

PROMPTS = ["def add(a, b):\n", "x =", "import os"]
LONG: dict[str, Any] = {"max_new_tokens": 400, "ignore_eos": True}


EARLIER: set[threading.Thread] = set()
"""The threads of engines that other tests have left behind, as those of drafts that run ahead."""


@pytest.fixture(scope="module")
def engine() -> slipstream.Engine:
    EARLIER.update(threading.enumerate())
    return slipstream.load()


def assert_free(engine: slipstream.Engine) -> None:
    """Nothing is left of earlier calls: no row, and no thread but such as are just ending."""
    assert list(engine.decoder.target.lengths) == []
    for thread in threading.enumerate():
        if thread.name.startswith("slipstream") and thread not in EARLIER:
            thread.join(10)
            assert not thread.is_alive()


# ---- several prompts --------------------------------------------------------------------------------------------


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
        engine.stream_async(["x", "y"])
    with pytest.raises(TypeError, match="unknown option gama"):
        engine.stream_async("x", gama=3)


def test_closing_a_stream_frees_the_engine(engine: slipstream.Engine) -> None:
    with closing(engine.stream_batch(PROMPTS, **LONG)) as stream:  # type: ignore[type-var]
        next(iter(stream))
        with pytest.raises(RuntimeError, match="serves one call at a time"):
            engine.generate("x", max_new_tokens=1)
    assert_free(engine)


# ---- event loops ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "seed": 3, "logprobs": 2}])
def test_an_async_stream_is_the_stream(engine: slipstream.Engine, settings: dict[str, Any]) -> None:
    async def collect() -> list[Piece]:
        return [piece async for piece in engine.stream_async(PROMPTS[0], max_new_tokens=20, **settings)]

    want = list(engine.stream(PROMPTS[0], max_new_tokens=20, **settings))
    found = asyncio.run(collect())
    assert [(one.text, one.token, one.source, one.logprobs) for one in found] == [
        (one.text, one.token, one.source, one.logprobs) for one in want
    ]
    assert_free(engine)


def test_the_loop_is_free_while_a_round_runs(engine: slipstream.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go = threading.Event(), threading.Event()
    propose = engine.decoder.drafter.propose

    def waiting(*args: Any) -> Any:
        begun.set()
        assert go.wait(20), "the event loop was blocked"
        return propose(*args)

    monkeypatch.setattr(engine.decoder.drafter, "propose", waiting)

    async def release() -> None:
        while not begun.is_set():
            await asyncio.sleep(0.001)
        go.set()  # only possible if the loop runs while the round does

    async def both() -> list[Piece]:
        other = asyncio.create_task(release())
        found = [piece async for piece in engine.stream_async("x =", max_new_tokens=4)]
        await other
        return found

    assert asyncio.run(both())[-1].completion


def test_leaving_early_frees_the_engine(engine: slipstream.Engine) -> None:
    async def leave() -> None:
        async with aclosing(engine.stream_async(PROMPTS[0], **LONG)) as stream:  # type: ignore[type-var]
            async for _ in stream:
                break
        assert list(engine.decoder.target.lengths) == []
        assert [piece async for piece in engine.stream_async("x =", max_new_tokens=2)][-1].completion

    asyncio.run(leave())
    assert_free(engine)


@pytest.mark.parametrize("times", [1, 2])
def test_cancelling_frees_the_engine_within_a_round(
    engine: slipstream.Engine, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """Cancelled while a round runs in the thread, once, or once more while that round is waited for."""
    inside, go, rounds = threading.Event(), threading.Event(), [0]
    propose = engine.decoder.drafter.propose

    def slow(*args: Any) -> Any:
        rounds[0] += 1
        if rounds[0] == 2:
            inside.set()
            assert go.wait(20)
        return propose(*args)

    monkeypatch.setattr(engine.decoder.drafter, "propose", slow)

    async def consume() -> None:
        async for _ in engine.stream_async(PROMPTS[0], **LONG):
            pass

    async def cancel() -> None:
        task = asyncio.create_task(consume())
        while not inside.is_set():
            await asyncio.sleep(0.001)
        for _ in range(times):
            task.cancel()
            await asyncio.sleep(0.01)
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        while engine.decoder.target.lengths:  # the thread frees it, also if nobody waits for that
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(cancel(), 60))
    assert rounds[0] == 2
    assert_free(engine)
    assert engine.generate("x =", max_new_tokens=2)[0].tokens


def test_what_fails_in_the_thread_arrives_in_the_loop(
    engine: slipstream.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> Any:
        raise RuntimeError("the draft broke")

    monkeypatch.setattr(engine.decoder.drafter, "propose", broken)

    async def consume() -> None:
        async for _ in engine.stream_async("x =", max_new_tokens=4):
            pass

    with pytest.raises(RuntimeError, match="the draft broke"):
        asyncio.run(consume())
    assert_free(engine)
