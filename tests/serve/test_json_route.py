"""JSON bodies: what is counted before they are read, how little is said of a wrong one, and where the work is done."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from types import SimpleNamespace
from typing import Any, get_args

import httpx
import pytest
from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, WrapValidator, model_validator
from starlette.requests import Request

from slipstream.serve import json_route
from slipstream.serve.faults import BadRequest, ServeError
from slipstream.serve.json_route import JsonRoute, JsonSize, Once, off_loop, read_json
from slipstream.serve.routes import chat, completions, models, responses
from slipstream.serve.schema import CompletionRequest
from slipstream.serve.settings import Limits


def made(rng: random.Random, depth: int) -> Any:
    """A JSON value with the marks of JSON in its texts."""
    kind = rng.randrange(6 if depth else 3)
    if kind == 0:
        return "".join(rng.choice('a"\\,[]{}:\n') for _ in range(rng.randrange(9)))
    if kind < 3:
        return rng.random()
    if kind < 5:
        return [made(rng, depth - 1) for _ in range(rng.randrange(4))]
    return {f'{place}",:\\': made(rng, depth - 1) for place in range(rng.randrange(4))}


def size(value: Any) -> tuple[int, int]:
    """The structure of a value, and its commas."""
    if not isinstance(value, list | dict):
        return 0, 0
    inner = [size(each) for each in (value.values() if isinstance(value, dict) else value)]
    structure = 1 + (len(value) if isinstance(value, dict) else 0) + sum(each[0] for each in inner)
    return structure, max(0, len(value) - 1) + sum(each[1] for each in inner)


@pytest.mark.parametrize("window", [1, 7, json_route.WINDOW])
def test_values_are_counted_outside_of_texts_alone(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_route, "WINDOW", window)
    rng = random.Random(1)
    for _ in range(300):
        value = made(rng, 3)
        text = json.dumps(value)
        found, (structure, commas) = JsonSize.of(text.encode(), 1 << 30), size(value)
        assert (found.structure, found.values) == (structure, structure + commas), text
        assert found.escapes == text.count("\\")


MANY = {
    "values": ("[" + "1," * 2000 + "1]", "1000 values"),
    "objects": ("[" + "{}," * 200 + "{}]", "125 lists, objects and fields"),
    "fields": (json.dumps({str(i): 1 for i in range(200)}), "125 lists, objects and fields"),
    "escapes": (json.dumps("\n" * 5000), "4000 escapes"),
    "numbers": (f"[{'9' * 9000},{'9' * 9000}]", "16000 characters outside"),
    "depth": ("[" * 120, "EOF"),
    "half a character": ('"\\ud800"', "Invalid JSON"),
    "nothing": ("{]", "Invalid JSON"),
}


@pytest.mark.parametrize("case", MANY)
def test_what_is_too_much_is_refused_before_it_is_read(case: str) -> None:
    text, says = MANY[case]
    with pytest.raises((BadRequest, RequestValidationError)) as caught:
        read_json(text.encode(), 1000)
    said = caught.value.message if isinstance(caught.value, ServeError) else caught.value.errors()[0]["msg"]
    assert says in said
    fine = json.dumps({"prompt": 'a",[{:' * 1000, "stop": ["a"] * 100})
    assert read_json(fine.encode(), 1000) == json.loads(fine)


@pytest.mark.parametrize("field", ["prompt", "stop", "stop_token_ids", "logit_bias", "bad_words"])
def test_a_wrong_list_is_left_at_its_first_error(field: str) -> None:
    wrong: Any = {str(i): "x" for i in range(500)} if field == "logit_bias" else ["a", *[1.5] * 500]
    with pytest.raises(ValueError) as caught:
        CompletionRequest.model_validate({"prompt": "a", field: wrong})
    assert len(caught.value.errors()) < 10  # type: ignore[attr-defined]


def test_every_route_with_a_json_body_reads_it_so() -> None:
    routes = [route for module in (chat, completions, models, responses) for route in module.router.routes]
    assert len(routes) > 8
    assert all(isinstance(route, JsonRoute) for route in routes)
    bodies = [route.body_field.field_info for route in routes if route.body_field]  # type: ignore[attr-defined]
    assert len(bodies) >= 5
    parts = [[*body.metadata, *get_args(body.annotation)] for body in bodies]  # FastAPI 0.115 leaves them together
    assert all(any(isinstance(each, WrapValidator) for each in body) for body in parts)


SEEN: list[tuple[str, int]] = []  # threads of the work, and how many pieces of it ran together
RUNNING: list[str] = []


def work(value: Any) -> Any:
    name = threading.current_thread().name
    RUNNING.append(name)
    threading.Event().wait(0.02)
    SEEN.append((name, len(RUNNING)))
    RUNNING.remove(name)
    return value


class Body(BaseModel):
    text: str

    @model_validator(mode="after")
    def _work(self) -> Body:
        return work(self)


def application() -> FastAPI:
    app, router = FastAPI(), APIRouter(route_class=JsonRoute)

    @router.post("/")
    async def answer(body: Once[Body], request: Request) -> int:
        return len(await off_loop(request, work, body.text))

    server = SimpleNamespace(
        settings=SimpleNamespace(limits=Limits()), readers=asyncio.Semaphore(2), heavy=asyncio.Semaphore(1)
    )
    app.state.server = server
    app.include_router(router)
    return app


def asked(length: int) -> list[tuple[str, int]]:
    """Send six bodies at once -> who worked on them, and with how many others."""

    async def ask() -> list[httpx.Response]:
        transport = httpx.ASGITransport(application())
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await asyncio.gather(*(client.post("/", json={"text": "a" * length}) for _ in range(6)))

    SEEN.clear()
    assert [answer.json() for answer in asyncio.run(ask())] == [length] * 6
    return list(SEEN)


def test_bodies_are_read_and_validated_off_the_event_loop_heavy_ones_one_by_one() -> None:
    light, heavy = asked(10), asked(json_route.LIGHT)
    assert len(light) == len(heavy) == 12
    assert threading.main_thread().name not in {name for name, _ in light + heavy}
    assert max(count for _, count in heavy) == 1 < max(count for _, count in light)


def test_an_error_of_the_work_is_raised_as_it_is() -> None:
    async def ask() -> None:
        request: Any = SimpleNamespace(state=SimpleNamespace(), app=application())
        await off_loop(request, {}.__getitem__, "missing")

    with pytest.raises(KeyError, match="missing"):
        asyncio.run(ask())
