"""Many streams at a time: none is lost, none is mixed up with another; and memory stays what it was."""

import asyncio
import json
import random
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import jsonschema_rs
import pytest

import slipstream
from serve.conftest import ServerProcess
from serve.test_server import running, until
from toys import closed

TOKENS = (6, 11, 24)
LEAVE = 5  # one stream of so many hangs up


SCHEMA = closed(done={"type": "boolean"}, color={"enum": ["red", "blue"]}, place={"type": "null"})
PATTERN = "[A-Z]{2}-[0-9]{3}"
ENOUGH = 60  # tokens in which every text of the schema and the pattern fits


@dataclass(frozen=True)
class Form:
    """What a text has to be: the field of a request, how the library makes its grammar, and a check of the text."""

    field: Mapping[str, Any]
    grammar: Callable[[slipstream.Engine], Any]
    fits: Callable[[str], bool]


def fits_schema(text: str) -> bool:
    try:
        return jsonschema_rs.validator_for(SCHEMA).is_valid(json.loads(text))
    except json.JSONDecodeError:
        return False


FORMS = (
    Form(
        {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}},
        lambda engine: engine.grammars.json_schema(SCHEMA),
        fits_schema,
    ),
    Form(
        {"structured_outputs": {"regex": PATTERN}},
        lambda engine: engine.grammars.regex(PATTERN),
        lambda text: re.fullmatch(PATTERN, text) is not None,
    ),
)


@dataclass(frozen=True)
class Asked:
    """One stream: its prompt, length and seed (None: greedy), after how many events it hangs up (None: never), and
    what its text has to be (None: anything)."""

    prompt: str
    tokens: int
    seed: int | None
    leaves: int | None
    form: Form | None = None

    @property
    def body(self) -> dict[str, Any]:
        decoding = {"temperature": 0} if self.seed is None else {"temperature": 1, "seed": self.seed}
        field = {} if self.form is None else self.form.field
        return {"prompt": self.prompt, "max_tokens": self.tokens, "stream": True, **decoding, **field}

    def alone(self, engine: slipstream.Engine) -> str:
        options: dict[str, Any] = {} if self.form is None else {"grammar": self.form.grammar(engine)}
        if self.seed is not None:
            options |= {"temperature": 1.0, "seed": self.seed, "verify": "coupled"}
        return engine.generate(self.prompt, max_new_tokens=self.tokens, **options)[0].text


@dataclass(frozen=True)
class Got:
    """What came of a stream: its text so far, and whether it was whole."""

    text: str
    whole: bool


def mixed(count: int) -> list[Asked]:
    """Greedy and seeded streams of several lengths, some by a schema or a pattern; each prompt is another one."""
    rng = random.Random(0)
    asked = []
    for i in range(count):
        leaves = rng.randrange(8) if i % LEAVE == 0 else None
        form = (*FORMS, None, None, None, None)[i // 2 % 6]
        tokens = rng.choice(TOKENS) if form is None else ENOUGH
        asked.append(Asked(f"def task_{i}(values, {'ab'[i % 2]}):\n", tokens, i if i % 2 else None, leaves, form))
    return asked


async def events(server: ServerProcess, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any] | None]:
    """The events of a stream, of which the last one is None; whoever stops iterating hangs up."""
    place = urlsplit(server.url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    try:
        content = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {place.netloc}\r\nContent-Length: {len(content)}\r\n"
        writer.write(head.encode() + b"Content-Type: application/json\r\nConnection: close\r\n\r\n" + content)
        await writer.drain()
        while line := await reader.readline():  # the framing of chunks stands on lines of its own
            if line.startswith(b"data: [DONE]"):
                yield None
            elif line.startswith(b"data: "):
                yield json.loads(line[6:])
    finally:
        writer.close()


async def stream(server: ServerProcess, asked: Asked, delay: float) -> Got:
    await asyncio.sleep(delay)
    text, seen = "", 0
    found = events(server, asked.body)
    try:
        while seen != asked.leaves:
            event = await anext(found)
            if event is None:
                return Got(text, True)
            text += event["choices"][0]["text"]
            seen += 1
        return Got(text, False)
    except StopAsyncIteration:
        return Got(text, False)
    finally:
        await found.aclose()


async def stream_all(server: ServerProcess, asked: Sequence[Asked], seconds: float) -> list[Got]:
    rng = random.Random(1)
    return list(await asyncio.gather(*(stream(server, one, rng.uniform(0, seconds)) for one in asked)))


def faults(asked: Sequence[Asked], got: Sequence[Got], texts: Sequence[str]) -> list[str]:
    """Streams that were lost or mixed up; one that hung up has the beginning of its text."""
    found = []
    for one, came, text in zip(asked, got, texts, strict=True):
        if one.leaves is None and not came.whole:
            found.append(f"{one.prompt!r} was lost after {came.text!r}")
        elif came.text != text if came.whole else not text.startswith(came.text):
            found.append(f"{one.prompt!r} is {came.text!r}, alone {text!r}")
        elif came.whole and one.form is not None and not one.form.fits(came.text):
            found.append(f"{one.prompt!r} is {came.text!r}, which is not what was asked for")
    return found


def check_load(server: ServerProcess, engine: slipstream.Engine, count: int, seconds: float) -> None:
    asked = mixed(count)
    got = asyncio.run(stream_all(server, asked, seconds))
    assert faults(asked, got, [one.alone(engine) for one in asked]) == []
    assert sum(came.whole for came in got) >= count - count // LEAVE
    with server.http() as http:
        until(lambda: running(http) == (0, 0))


def test_streams_are_not_lost_and_not_mixed_up(server: ServerProcess, engine: slipstream.Engine) -> None:
    check_load(server, engine, 15, 0.5)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_thousand_streams_are_not_lost_and_not_mixed_up(engine: slipstream.Engine) -> None:
    with ServerProcess.start() as server:
        check_load(server, engine, 1000, 2)


VARIED: tuple[Mapping[str, Any], ...] = (  # requests of kinds that might want another graph
    {"n": 3, "temperature": 1, "seed": 5},
    {"logprobs": 2},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1, "top_k": 5, "min_p": 0.05},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.2},
    {"logit_bias": {"65": -5}, "echo": True},
    {"speculative": False},
    {"speculative": {"gamma": 1}},
    {"speculative": {"gamma": 7}, "temperature": 1},
    {"prediction": {"type": "content", "content": "    return values"}},
    {"prompt": "# a long prompt\n" * 60},
)


def graphs(http: httpx.Client) -> dict[str, float]:
    series = r'slipstream:graphs_total\{.*origin="(\w+)"\} (\S+)'
    return {origin: float(count) for origin, count in re.findall(series, http.get("/metrics").text)}


@pytest.mark.gpu  # on CPUs nothing is compiled
@pytest.mark.timeout(1800)
def test_a_compiled_server_makes_no_graph_while_requests_wait() -> None:
    with ServerProcess.start("--compile", "--device", "cuda", within=1200) as server, server.http() as http:
        ready = graphs(http)
        assert ready["compiled"]
        for fields in VARIED:
            answer = http.post("/v1/completions", json={"prompt": "def f(x):\n", "max_tokens": 12, **fields})
            assert answer.status_code == 200, answer.text
        asyncio.run(stream_all(server, mixed(40), 1))
        assert graphs(http) == ready


def test_lost_and_mixed_up_streams_are_found() -> None:
    asked = [Asked("a", 4, None, None), Asked("b", 4, 1, None), Asked("c", 4, None, 2)]
    texts = ["one", "two", "three"]
    right = [Got("one", True), Got("two", True), Got("th", False)]
    assert faults(asked, right, texts) == []
    for place, wrong in ((0, Got("two", True)), (0, Got("one", False)), (1, Got("tw", True)), (2, Got("tw", False))):
        assert len(faults(asked, [wrong if i == place else came for i, came in enumerate(right)], texts)) == 1
    for form in FORMS:
        assert len(faults([Asked("d", 4, None, None, form)], [Got("{}", True)], ["{}"])) == 1


def resident(server: ServerProcess) -> int:
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_memory_after_ten_thousand_requests_is_that_after_one_thousand() -> None:
    with ServerProcess.start("--cache-bytes", "16M") as server, server.http() as http, ThreadPoolExecutor(16) as pool:

        def ask(number: int) -> int:
            body = {"prompt": f"def task_{number}(values):\n", "max_tokens": 4, "temperature": number % 2}
            return http.post("/v1/completions", json=body).status_code

        assert set(pool.map(ask, range(1000))) == {200}
        early = resident(server)
        assert set(pool.map(ask, range(1000, 10_000))) == {200}
        assert resident(server) <= 1.05 * early, (early, resident(server))
