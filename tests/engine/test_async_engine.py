"""`AsyncEngine`: overlapping calls share a batch and get the texts that the engine gives alone."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import slipstream
from slipstream.engine.generation import Piece
from slipstream.engine.queued import QueueFull, Unavailable

PROMPTS = ["def area(radius):", "import os\n", "class Stack:"]
OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "temperature": 1.0}


@pytest.fixture(scope="module")
def engine() -> slipstream.Engine:
    return slipstream.load(gamma=3)


def served(
    engine: slipstream.Engine, work: Callable[[slipstream.AsyncEngine], Awaitable[Any]], max_queue: int = 8
) -> Any:
    async def run() -> Any:
        async with slipstream.AsyncEngine(engine, max_queue=max_queue) as running:
            return await work(running)

    return asyncio.run(run())


def test_overlapping_calls_get_the_texts_of_calls_alone(engine: slipstream.Engine) -> None:
    async def work(running: slipstream.AsyncEngine) -> list[list[str]]:
        calls = [running.generate(PROMPTS, seed=1, **OPTIONS), running.generate(PROMPTS[0], seed=2, n=2, **OPTIONS)]
        return [[each.text for each in found] for found in await asyncio.gather(*calls)]

    alone = [engine.generate(PROMPTS, seed=1, **OPTIONS), engine.generate(PROMPTS[0], seed=2, n=2, **OPTIONS)]
    assert served(engine, work) == [[each.text for each in found] for found in alone]


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "seed": 3, "logprobs": 2}])
def test_a_stream_has_the_pieces_of_the_engine_s_own(engine: slipstream.Engine, settings: dict[str, Any]) -> None:
    async def work(running: slipstream.AsyncEngine) -> list[Piece]:
        return [piece async for piece in running.stream(PROMPTS[0], max_new_tokens=20, **settings)]

    want = list(engine.stream(PROMPTS[0], max_new_tokens=20, **settings))
    assert [(one.text, one.token, one.source, one.logprobs) for one in served(engine, work)] == [
        (one.text, one.token, one.source, one.logprobs) for one in want
    ]
    assert list(engine.decoder.target.lengths) == []


def test_the_loop_is_free_while_a_round_runs_and_cancelling_ends_after_it(
    engine: slipstream.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go, rounds = threading.Event(), threading.Event(), [0]
    propose = engine.decoder.drafter.propose

    def waiting(*args: Any) -> Any:
        rounds[0] += 1
        begun.set()
        assert go.wait(20), "the event loop was blocked"
        return propose(*args)

    async def work(running: slipstream.AsyncEngine) -> None:
        monkeypatch.setattr(engine.decoder.drafter, "propose", waiting)
        task = asyncio.create_task(running.generate(PROMPTS[0], max_new_tokens=400, ignore_eos=True))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.sleep(0.01)
        go.set()  # only possible if the loop runs while the round does
        with pytest.raises(asyncio.CancelledError):
            await task
        while engine.decoder.target.lengths:
            await asyncio.sleep(0.001)
        assert rounds[0] == 1
        assert (await running.generate("x =", max_new_tokens=2))[0].tokens

    served(engine, work)


def test_what_fails_in_the_thread_arrives_in_the_loop(
    engine: slipstream.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> Any:
        raise RuntimeError("the draft broke")

    async def work(running: slipstream.AsyncEngine) -> None:
        monkeypatch.setattr(engine.decoder.drafter, "propose", broken)
        with pytest.raises(Unavailable, match="has failed"):
            await running.generate("x =", max_new_tokens=4)

    served(engine, work)
    monkeypatch.undo()
    assert engine.generate("x =", max_new_tokens=2)[0].tokens


def test_pieces_are_the_text_and_closing_a_stream_frees_its_place(engine: slipstream.Engine) -> None:
    async def work(running: slipstream.AsyncEngine) -> tuple[str, str]:
        endless = running.stream(PROMPTS[0], max_new_tokens=900, ignore_eos=True)
        first = (await anext(endless)).text
        await endless.aclose()  # type: ignore[attr-defined]
        return first, "".join([piece.text async for piece in running.stream(PROMPTS[1], **OPTIONS)])

    first, text = served(engine, work)
    assert text == engine.generate(PROMPTS[1], **OPTIONS)[0].text
    assert engine.generate(PROMPTS[0], max_new_tokens=20)[0].text.startswith(first)


def test_what_cannot_be_is_said(engine: slipstream.Engine) -> None:
    async def work(running: slipstream.AsyncEngine) -> None:
        with pytest.raises(QueueFull, match="try again later"):
            await running.generate(PROMPTS, max_new_tokens=4)
        with pytest.raises(ValueError, match="temperature"):
            await running.generate("x", temperature=-1)
        with pytest.raises(ValueError, match="num_beams"):
            await anext(running.stream("x", num_beams=2))
        with pytest.raises(ValueError, match="n=2 asks for several: use stream_batch"):
            await anext(running.stream("x", n=2))

    served(engine, work, max_queue=2)
    with pytest.raises(Unavailable, match="enter it, as `async with"):
        asyncio.run(slipstream.AsyncEngine(engine).generate("x"))
    for given, fault in (((3,), "no int"), ((engine, 0), "max_queue=0"), ((engine, 1, "5M"), "cache_bytes='5M'")):
        with pytest.raises(ValueError, match=fault):
            slipstream.AsyncEngine(given[0], **dict(zip(("max_queue", "cache_bytes"), given[1:], strict=False)))
