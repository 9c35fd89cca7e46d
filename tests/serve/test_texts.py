"""The texts of answers from real kinds of tokenizers, by a server whose model writes what the test says."""

import asyncio
import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import fastapi
import pytest
from httpx import ASGITransport, AsyncClient

from slipstream.decoding.controllers import Fixed
from slipstream.decoding.decoder import Decoder, NoDraft
from slipstream.engine.defaults import Defaults
from slipstream.engine.engine import Engine
from slipstream.engine.worker import Capacity
from slipstream.serve.app import create_app
from slipstream.serve.settings import ServeSettings
from slipstream.serve.state import ServerState
from tongues import SENTENCEPIECE, tongue
from toys import scorer


def writing(name: str, prompt: Sequence[int], output: Sequence[int], rivals: Mapping[int, float]) -> Engine:
    """An engine that continues a prompt with `output`; `rivals` share what the first token leaves of its place."""
    tokenizer, size = tongue(name), len(tongue(name))

    def law(prefix: tuple[int, ...]) -> list[float]:
        place, weights = len(prefix) - len(prompt), [0.0] * size
        if place == 0 and prefix == tuple(prompt):
            for token, weight in rivals.items():
                weights[token] = weight
            weights[output[0]] = 1 - sum(rivals.values())
        else:
            weights[output[place] if 0 <= place < len(output) else 0] = 1.0
        return weights

    decoder = Decoder(scorer(law, "scripted", size), NoDraft(), controller=Fixed(0), batch_size=2)
    return Engine(decoder, tokenizer, frozenset([tokenizer.eos_token_id]))


def ask(engine: Engine, body: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Ask for a completion, whole and as a stream -> the choice, and the choices of all chunks."""

    async def both() -> tuple[dict[str, Any], list[dict[str, Any]]]:
        state = ServerState.new(engine, ServeSettings(("scripted",)), Capacity(2), None)
        ready, app = asyncio.Event(), create_app(state)
        state.worker.on_ready = state.worker.on_death = ready.set
        async with (
            app.router.lifespan_context(app),
            AsyncClient(transport=ASGITransport(app), base_url="http://127.0.0.1") as client,
        ):
            await ready.wait()
            whole = await client.post("/v1/completions", json=body)
            stream = await client.post("/v1/completions", json={**body, "stream": True})
        assert whole.status_code == stream.status_code == 200, (whole.text, stream.text)
        events = [line.removeprefix("data: ") for line in stream.text.splitlines() if line.startswith("data: ")]
        chunks = [json.loads(each)["choices"][0] for each in events[:-1] if json.loads(each)["choices"]]
        return whole.json()["choices"][0], chunks

    return asyncio.run(both())


def joined(chunks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The choice that the chunks of a stream add up to."""
    parts = [chunk["logprobs"] for chunk in chunks if chunk["logprobs"]]
    found = {name: [item for part in parts for item in part[name]] for name in parts[0]} if parts else None
    text, reason = "".join(chunk["text"] for chunk in chunks), chunks[-1]["finish_reason"]
    return {"index": 0, "text": text, "logprobs": found, "finish_reason": reason}


def answers(
    name: str, prompt: str, output: str, cut: int = 0, rivals: Mapping[int, float] | None = None, **body: Any
) -> dict[str, Any]:
    """The choice of an answer that writes `output` without its last `cut` tokens; the stream adds up to the same."""
    both, before = tongue(name)(prompt + output)["input_ids"], tongue(name)(prompt)["input_ids"]
    assert both[: len(before)] == before
    written = both[len(before) : len(both) - cut]
    engine = writing(name, before, written, rivals or {})
    more = {"prompt": prompt, "max_tokens": len(written), "temperature": 0, **body}
    whole, chunks = ask(engine, more)
    assert joined(chunks) == whole
    return whole


@pytest.mark.parametrize("name", SENTENCEPIECE)
def test_an_answer_keeps_the_space_that_it_begins_with(name: str) -> None:
    found = answers(name, "it", " is true", logprobs=1)
    assert found["text"] == "".join(found["logprobs"]["tokens"]) == " is true"
    assert answers(name, "it", " is true", echo=True)["text"] == "it is true"
    assert answers(name, "it", " is true", stop=" true")["text"] == " is"


def test_text_offsets_count_from_the_beginning_of_the_text() -> None:
    plain = answers("prepended", "it's", " is true", logprobs=1)
    assert (plain["logprobs"]["text_offset"], plain["logprobs"]["tokens"]) == ([0, 3], [" is", " true"])


@pytest.mark.parametrize("name", ["bytes", *SENTENCEPIECE])
def test_a_character_that_max_tokens_cuts_is_one_broken_one(name: str) -> None:
    for body in ({}, {"stop": ["never"]}, {"logprobs": 2}):
        found = answers(name, "it", "ok😀😃😄你", cut=1, **body)
        assert (found["text"], found["finish_reason"]) == ("ok😀😃😄\ufffd", "length")


def test_bytes_of_a_character_begin_where_it_does() -> None:
    found = answers("prepended", "it", "😀 is", logprobs=0)["logprobs"]
    assert found["tokens"] == ["bytes:\\xf0", "bytes:\\x9f", "bytes:\\x98", "bytes:\\x80", " is"]
    assert found["text_offset"] == [0, 0, 0, 0, 1]


def test_tokens_that_look_alike_are_entries_of_their_own() -> None:
    vocabulary = tongue("prepended").get_vocab()
    rivals = {vocabulary["<0x9F>"]: 0.2, vocabulary["<0x69>"]: 0.05, vocabulary["i"]: 0.1}
    found = answers("prepended", "it", "😀", rivals=rivals, logprobs=4)["logprobs"]
    names = ["bytes:\\xf0", "bytes:\\x9f", "i", f"token_id:{vocabulary['<0x69>']}"]
    assert list(found["top_logprobs"][0]) == names


def test_a_special_token_named_in_stop_ends_the_text() -> None:
    tokenizer = tongue("prepended")
    prompt, output = tokenizer("it")["input_ids"], tokenizer(" is<s> true", add_special_tokens=False)["input_ids"][1:]
    engine = writing("prepended", prompt, output, {})
    body = {"prompt": "it", "max_tokens": len(output), "temperature": 0}
    plain, chunks = ask(engine, body)
    assert plain["text"] == joined(chunks)["text"] and plain["finish_reason"] == "length"
    ended, chunks = ask(engine, {**body, "stop": ["<s>"]})
    assert ended["text"] == joined(chunks)["text"] and ended["finish_reason"] == "stop"
    assert plain["text"].startswith(ended["text"]) and len(ended["text"]) < len(plain["text"])


def test_the_description_of_the_server_is_made_beside_the_event_loop_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, make = list[str](), fastapi.applications.get_openapi

    def made(**about: Any) -> dict[str, Any]:
        threads.append(threading.current_thread().name)
        return make(**about)

    async def ask() -> list[Any]:
        state = ServerState.new(writing("bytes", [1], [2], {}), ServeSettings(("scripted",)), Capacity(2), None)
        app = create_app(state)
        async with AsyncClient(transport=ASGITransport(app), base_url="http://127.0.0.1") as client:
            return [(await client.get("/openapi.json")).json() for _ in range(2)]

    monkeypatch.setattr(fastapi.applications, "get_openapi", made)
    first, second = asyncio.run(ask())
    assert first == second and first["paths"].keys() > {"/v1/completions", "/health"}
    assert len(threads) == 1 and threads[0] != threading.main_thread().name


def test_what_a_request_leaves_out_is_the_models_own() -> None:
    """The texts are those of the likeliest token only where the model's top_k of 1 applies."""
    output = tongue("bytes")("it is true and so is that, and so on and on")["input_ids"]

    def law(prefix: tuple[int, ...]) -> list[float]:
        weights = [0.5 / len(tongue("bytes"))] * len(tongue("bytes"))
        weights[output[min(len(prefix), len(output) - 1)]] += 0.5
        return weights

    table = scorer(law, "half", len(tongue("bytes")))
    decoder = Decoder(table, NoDraft(), controller=Fixed(0), batch_size=2)
    engine = Engine(decoder, tongue("bytes"), defaults=Defaults({"top_k": 1, "temperature": 0.8}))
    body = {"prompt": output[:1], "max_tokens": len(output) - 1, "seed": 3}
    want = tongue("bytes").decode(output[1:])
    assert ask(engine, body)[0]["text"] == want
    assert ask(engine, {**body, "top_k": 0})[0]["text"] != want
    assert ask(engine, {**body, "top_k": -1, "temperature": 0})[0]["text"] == want
