"""The server as a whole: health, keys, limits, clients that go away, signals, and a worker that dies."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest

import slipstream
from processes import Command
from serve.conftest import ServerProcess
from slipstream.core.round import Round
from slipstream.decoding.scheduler import Scheduler
from slipstream.engine.engine import Engine
from terminal import run

PROMPT = "def moving_average(values, window):"


def running(http: httpx.Client) -> tuple[int, int]:
    properties = http.get("/props").json()
    return properties["running"], properties["waiting"]


def until(condition: Any, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to be"
        time.sleep(0.02)


def long_body(**more: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "max_tokens": 1500, "temperature": 1, "ignore_eos": True, **more}


def take_time() -> None:
    step = Scheduler.step
    Scheduler.step = lambda scheduler: (time.sleep(0.05), step(scheduler))[1]  # type: ignore[method-assign]


def slow_server() -> ServerProcess:
    return ServerProcess.of(Command("serve", "--port", "0", "--target", "embedded", first=take_time))


@pytest.fixture(scope="module")
def slow() -> Iterator[ServerProcess]:
    with slow_server() as started:
        yield started


def test_what_runs_is_told(http: httpx.Client) -> None:
    assert http.get("/health").json() == http.get("/ping").json() == {"status": "ok"}
    assert http.get("/version").json() == {"version": slipstream.__version__}
    assert http.get("/tokenizer_info").json()["chat_template"].startswith("{% for tool in tools")
    assert [model["id"] for model in http.get("/v1/models").json()["data"]] == ["embedded"]
    assert http.get("/v1/models/embedded").json()["id"] == "embedded"
    assert http.get("/v1/models/other").status_code == 404
    properties = http.get("/props").json()
    assert properties["draft"] == "embedded" and properties["rule"] == "block" and properties["lossless"]
    assert http.get("/models").json() == http.get("/v1/models").json()
    for path in ("/health", "/ping"):
        assert (head := http.head(path)).status_code == 200 and head.content == b""
    for host, status in (("evil.example", 403), ("here:80", 200), ("localhost", 200)):
        assert http.get("/health", headers={"Host": host}).status_code == status
    assert http.get("/v1/completions").status_code == 405


def test_texts_become_tokens_and_back(http: httpx.Client, engine: slipstream.Engine) -> None:
    found = http.post("/tokenize", json={"prompt": PROMPT, "return_token_strs": True}).json()
    assert tuple(found["tokens"]) == engine.encode(PROMPT) and found["count"] == len(found["tokens"])
    assert len(found["token_strs"]) == found["count"]
    assert http.post("/detokenize", json={"tokens": found["tokens"]}).json()["prompt"] == PROMPT
    pieces = http.post("/tokenize", json={"content": PROMPT, "with_pieces": True}).json()["tokens"]
    told = zip(found["tokens"], found["token_strs"], strict=True)
    assert pieces == [{"id": token, "piece": text} for token, text in told]
    chat = http.post("/tokenize", json={"messages": [{"role": "user", "content": "x"}]}).json()
    assert http.post("/detokenize", json={"tokens": chat["tokens"]}).json()["prompt"].startswith("# user: x")
    bare = {"messages": [{"role": "user", "content": "x"}], "add_generation_prompt": False}
    assert http.post("/tokenize", json=bare).json()["count"] < chat["count"]
    many = engine.encode("ä 😀\n") * 2000  # more than are decoded in one go
    assert http.post("/detokenize", json={"tokens": many}).json()["content"] == engine.tokenizer.decode(many)
    assert http.post("/tokenize", json={}).json()["error"]["param"] == "prompt"
    assert http.post("/detokenize", json={"tokens": [1 << 30]}).json()["error"]["param"] == "tokens"


def test_bodies_that_are_none(http: httpx.Client) -> None:
    for content in (b"", b"{", b"[]", b'"text"', b"\xff\xfe", b'{"prompt": "\xff"}', b"null", b"NaN"):
        answer = http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400, content
        assert answer.json()["error"]["type"] == "invalid_request_error"
    assert "send it uncompressed" in http.post("/v1/completions", headers={**JSON, "Content-Encoding": "br"}).text
    halved = http.post("/v1/completions", content=b'{"prompt": "\\ud800"}', headers=JSON)
    assert halved.status_code == 400
    assert http.post("/v1/completions", content=b"x" * (17 << 20), headers=JSON).status_code == 413
    assert http.post("/v1/completions", content=iter([b"x" * (1 << 20)] * 17), headers=JSON).status_code == 413
    many = {f"X-Header-{i}": "y" * 100 for i in range(2000)}
    with suppress(httpx.ReadError):  # the connection is closed while headers still come: the answer may be lost
        assert http.get("/health", headers=many).status_code in (400, 431)
    assert http.get("/health").status_code == 200


JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize("megabytes", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_a_prompt_of_megabytes_is_refused_in_a_sentence(http: httpx.Client, megabytes: int) -> None:
    answer = http.post("/v1/completions", json={"prompt": "x = 1\n" * ((megabytes << 20) // 6)})
    assert answer.status_code in (400, 413) and answer.json()["error"]["message"]
    assert http.get("/health").status_code == 200


HALF = "\ud800"
TEXTS: dict[str, list[Any]] = {  # bodies with half of a character, in every field that holds a text
    "/v1/completions": [
        *({"prompt": "x", "max_tokens": 1, name: HALF} for name in ("stop", "cache_salt", "user", "model", "prompt")),
        {"prompt": ["x", HALF]},
        {"prompt": "x", "bad_words": [HALF]},
        {"prompt": "x", HALF: 1},
        {"prompt": "x", "prediction": {"type": "content", "content": HALF}},
        {"prompt": "x", "speculative": {"verify": HALF}},
        {"prompt": "x", "structured_outputs": {"regex": HALF}},
        {"prompt": "x", "structured_outputs": {"choice": [HALF]}},
        {"prompt": "x", "structured_outputs": {"json": {"const": HALF}}},
    ],
    "/v1/chat/completions": [
        {"messages": [{"role": "user", "content": HALF}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": HALF}]}]},
        {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {HALF: HALF}},
    ],
    "/v1/responses": [{"input": HALF}, {"input": "x", "instructions": HALF}, {"input": "x", "metadata": {HALF: "x"}}],
    "/tokenize": [{"prompt": HALF}, {"messages": [{"role": "user", "content": HALF}]}],
}


@pytest.mark.parametrize("path", TEXTS)
def test_half_of_a_character_is_refused_wherever_it_stands(http: httpx.Client, path: str) -> None:
    for body in TEXTS[path]:
        answer = http.post(path, content=json.dumps(body), headers=JSON)
        assert answer.status_code == 400 and answer.json()["error"]["message"], body


LONG = "a" * 50_000
LONG_ONES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: ("/v1/completions", {"prompt": "x", name: [LONG]}) for name in ("prompt", "stop", "bad_words")},
    "prediction": ("/v1/completions", {"prompt": "x", "prediction": {"type": "content", "content": LONG}}),
    "messages": ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
    "input": ("/v1/responses", {"input": LONG}),
    "tokenize": ("/tokenize", {"prompt": LONG}),
    "a chat to tokenize": ("/tokenize", {"messages": [{"role": "user", "content": LONG}]}),
}


@pytest.mark.parametrize("field", LONG_ONES)
def test_a_text_that_cannot_fit_is_refused_by_its_characters(http: httpx.Client, field: str) -> None:
    path, body = LONG_ONES[field]
    answer = http.post(path, json=body)
    assert answer.status_code == 400
    assert "tokens of at most 40 characters each: shorten it" in answer.json()["error"]["message"]


def test_what_can_never_be_served_is_no_429(http: httpx.Client) -> None:
    many = http.post("/v1/completions", json={"prompt": ["x"] * 128, "n": 32})
    assert many.status_code == 400 and "4096 texts" in many.json()["error"]["message"]
    other = http.post("/v1/completions", json={"prompt": "x", "speculative": {"draft": "nonsense"}})
    assert other.status_code == 400 and "'nonsense'" in other.json()["error"]["message"]
    same = {"prompt": "x", "max_tokens": 1, "speculative": {"draft": "embedded"}}
    assert http.post("/v1/completions", json=same).status_code == 200
    impossible = {"structured_outputs": {"choice": ["x"]}, "logit_bias": {"88": -100}}
    answer = http.post("/v1/completions", json={"prompt": "x", **impossible})
    assert answer.status_code == 400 and "no token is possible" in answer.json()["error"]["message"]


def test_gauges_follow_clients_that_leave(slow: ServerProcess) -> None:
    with slow.http() as http:

        def gauges() -> list[float]:
            lines = http.get("/metrics").text.splitlines()
            return [float(line.split()[1]) for line in lines if line.startswith("slipstream:num_requests_")]

        until(lambda: gauges() == [0, 0])
        with http.stream("POST", "/v1/completions", json=long_body(stream=True)) as stream:
            lines = stream.iter_lines()  # a name, since a stream whose lines nobody holds is closed
            next(lines)
            assert gauges() == [1, 0]
        until(lambda: gauges() == [0, 0])


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_ends_its_request(slow: ServerProcess, stream: bool) -> None:
    with slow.http() as http:
        until(lambda: running(http) == (0, 0))
        connection = socket.create_connection((urlsplit(slow.url).hostname, urlsplit(slow.url).port))
        body = json.dumps(long_body(stream=stream)).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        connection.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
        until(lambda: running(http) == (1, 0))
        connection.close()
        until(lambda: running(http) == (0, 0))


def test_hanging_up_while_others_run_changes_nothing(server: ServerProcess, engine: slipstream.Engine) -> None:
    [expected] = engine.generate(PROMPT, max_new_tokens=64)
    with server.http() as http, ThreadPoolExecutor(4) as pool:
        texts = [
            pool.submit(http.post, "/v1/completions", json={"prompt": PROMPT, "max_tokens": 64, "temperature": 0})
            for _ in range(3)
        ]
        with http.stream("POST", "/v1/completions", json=long_body(stream=True)) as other:
            next(other.iter_lines())
        assert {text.result().json()["choices"][0]["text"] for text in texts} == {expected.text}
        until(lambda: running(http) == (0, 0))


def test_a_key_is_asked_for(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# ours\nalice secret-of-alice\nsecret-of-nobody\n")
    log = tmp_path / "log"
    with ServerProcess.start("--api-key-file", str(keys), "--access-log", str(log)) as server:
        with server.http() as http:
            assert http.get("/health").status_code == 200
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic secret-of-alice"}):
                refused = http.post("/v1/completions", json={"prompt": "x"}, headers=headers)
                assert refused.status_code == 401 and refused.headers["WWW-Authenticate"] == "Bearer"
                assert refused.json()["error"]["code"] == "invalid_api_key"
            assert http.get("/metrics").status_code == 401
            wrong = http.post("/v1/messages", json={}, headers={"x-api-key": "wrong"})
            assert wrong.status_code == 401 and wrong.json()["error"]["type"] == "authentication_error"
            assert http.post("/v1/messages", json={}, headers={"x-api-key": "secret-of-alice"}).status_code == 400
            assert http.head("/ping").status_code == 200
        with pytest.raises(openai.AuthenticationError):
            server.client().models.list()
        client = server.client(api_key="secret-of-alice")
        assert client.models.list().data[0].id == "embedded"
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model="embedded", prompt="very private", temperature=-1)
        client.completions.create(model="embedded", prompt="very private", max_tokens=2)
        searched = {"use_beam_search": True}
        client.completions.create(model="embedded", prompt="private too", n=2, max_tokens=2, extra_body=searched)
        assert server.stop() == 0
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert lines[-1]["tenant"] == "alice" and lines[-1]["status"] == 200 and lines[-1]["seconds"] > 0
    assert [line["status"] for line in lines].count(401) == 6
    assert all(("error" in line) == (line["status"] >= 400) for line in lines)
    refused = [line["error"] for line in lines if line["status"] == 400 and line["path"] != "/v1/messages"]
    assert "temperature" in refused[0]
    assert lines[-2]["completion_tokens"] == 2 and lines[-2]["finish_reasons"] == ["length"]
    assert lines[-1]["completion_tokens"] == 4 and lines[-1]["finish_reasons"] == ["length", "length"]
    assert "private" not in log.read_text()


@pytest.mark.slow
def test_prompts_are_logged_where_that_is_wanted(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with ServerProcess.start("--access-log", str(log), "--log-prompts") as server, server.http() as http:
        text = http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 4}).json()["choices"][0]["text"]
        assert server.stop() == 0
    [line] = [json.loads(line) for line in log.read_text().splitlines()]
    assert line["prompts"] == [PROMPT] and line["answers"] == [text]


@pytest.mark.slow  # the library's limit is tested in tests/engine
def test_a_search_that_memory_cannot_hold_is_refused() -> None:
    searched = {"prompt": PROMPT, "n": 2, "best_of": 4, "use_beam_search": True}
    with ServerProcess.start("--memory", "4M") as server, server.http() as http:
        refused = http.post("/v1/completions", json={**searched, "max_tokens": 2000})
        assert refused.status_code == 400
        assert "use_beam_search=4 is not possible for prompt 0" in refused.json()["error"]["message"]
        assert http.post("/v1/completions", json={**searched, "max_tokens": 4}).status_code == 200


def test_a_full_queue_is_a_429_and_a_full_disk_ends_the_log_alone() -> None:
    with (
        ServerProcess.start("--max-rows", "1", "--max-queue", "1", "--access-log", "/dev/full") as server,
        server.http() as http,
        ThreadPoolExecutor(2) as pool,
    ):
        waiting = []
        for expected in ((1, 0), (1, 1)):
            waiting.append(pool.submit(http.post, "/v1/completions", json=long_body()))
            until(lambda expected=expected: running(http) == expected)
        refused = http.post("/v1/completions", json=long_body())
        assert refused.status_code == 429 and int(refused.headers["Retry-After"]) >= 1
        server.close()
        assert all(each.exception() for each in waiting)
        assert sum("the access log cannot be written" in line for line in server.lines) == 1


@pytest.mark.parametrize("signals", [1, 2])
def test_a_signal_lets_begun_answers_end_and_a_second_one_does_not(signals: int) -> None:
    count, seen = 100 if signals == 1 else 900, set[str]()
    with slow_server() as server, server.http() as http, ThreadPoolExecutor(3) as pool:

        def streamed(path: str, body: Any) -> list[str]:
            with httpx.stream("POST", f"{server.url}{path}", json={**body, "stream": True}, timeout=300) as response:
                lines = (line for line in response.iter_lines() if line.startswith("data:"))
                return [line for line in lines if seen.add(path) is None]

        answer = pool.submit(http.post, "/v1/completions", json=long_body(max_tokens=count))
        stream = pool.submit(streamed, "/v1/completions", long_body(max_tokens=count))
        asked = {"input": PROMPT, "max_output_tokens": count, "temperature": 0}
        events = pool.submit(streamed, "/v1/responses", asked)
        until(lambda: running(http)[0] == 3 and len(seen) == 2)
        for _ in range(signals):
            server.process.send_signal(signal.SIGTERM)
            until(lambda: any("once more to end at once" in line for line in server.lines))
        if signals == 1:
            assert answer.result().json()["usage"]["completion_tokens"] == count
            assert stream.result()[-1] == "data: [DONE]"
        else:
            assert ended_early(answer.result())
            assert cut(stream.result())
        last = json.loads(events.result()[-1].removeprefix("data:"))
        ended = ["response.completed", "response.incomplete"] if signals == 1 else ["response.failed"]
        assert last["type"] in ended and (signals == 1 or last["response"]["error"]["code"] == "unavailable")
        assert server.process.wait(120) == 0


def ended_early(answer: httpx.Response) -> bool:
    return answer.status_code == 503 and answer.json()["error"]["code"] == "unavailable"


def cut(lines: list[str]) -> bool:
    """Whether a stream that had begun ended by an error, and not as a text of that length does."""
    *begun, last = lines
    told = json.loads(last.removeprefix("data:"))["error"]["code"] == "unavailable"
    return bool(told and begun) and not any('"finish_reason":"' in line or "DONE" in line for line in begun)


STRUCK = """  # `slipstream` with a signal when a module is imported, or just before it says that it is ready
import os
import signal
import sys

kind, moment, sys.argv = signal.Signals[sys.argv[1]], sys.argv[2], ["slipstream", *sys.argv[3:]]
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell would have it ignored


def strike():
    os.kill(os.getpid(), kind)


class Watch:  # strikes when a module is looked for
    def find_spec(self, name, *_):
        if name == moment:
            sys.meta_path.remove(self)
            strike()


sys.meta_path.insert(0, Watch())
if moment == "ready":
    from slipstream.serve.server import Server

    say = Server._say_ready
    Server._say_ready = lambda server: (strike(), server.listener.close(), say(server))
from slipstream.__main__ import main

main()
"""


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize(
    ("kind", "moment", "command", "code", "line"),
    [
        ("SIGTERM", "slipstream.cli.serve", "serve", 130, "interrupted"),
        *(
            pytest.param(kind, *case, marks=pytest.mark.slow)
            for kind in ("SIGINT", "SIGTERM")
            for case in (
                ("slipstream.engine.load", "generate x", 130, "interrupted"),
                ("slipstream.engine.load", "serve", 130, "interrupted"),
                ("transformers.models.llama", "serve", 130, "interrupted"),
                ("ready", "serve --target embedded", 0, "ending: what was begun is finished; once more to end at once"),
                ("slipstream.serve.drafts.server", "serve-draft", 130, "interrupted"),
                ("slipstream.engine.load", "chat", 130, "interrupted"),
            )
        ),
    ],
)
def test_a_signal_before_it_is_ready_ends_a_command_in_one_line(
    kind: str, moment: str, command: str, code: int, line: str
) -> None:
    port = ["--port", "0"] if "serve" in command else []
    arguments = [sys.executable, "-c", STRUCK, kind, moment, *command.split(), *port]
    quiet = {**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}  # before the command says so itself
    done = subprocess.run(arguments, capture_output=True, text=True, env=quiet)
    assert (done.stderr, done.returncode) == (f"slipstream: {line}.\n", code)


def interrupt(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGINT)
    threading.Event().wait()


def test_ctrl_c_while_it_warms_up_ends_a_server_in_one_line() -> None:
    interrupted = partial(setattr, Engine, "warm_up", interrupt)
    process = Command("serve", "--port", "0", "--target", "embedded", first=interrupted)
    *bars, line = process.stderr.read().splitlines()
    assert line == "slipstream: interrupted before the models were ready."
    assert all("Loading weights" in bar for bar in bars if bar), bars
    assert process.wait(60) == 130
    process.stderr.close()


def break_when_asked(flag: Path) -> None:
    take_time()
    step = Scheduler.step

    def dying(scheduler: Scheduler) -> Round | None:
        if flag.exists():
            raise RuntimeError("the accelerator fell off")
        return step(scheduler)

    Scheduler.step = dying  # type: ignore[method-assign]


def test_a_worker_that_dies_gives_503_and_a_non_zero_exit(tmp_path: Path) -> None:
    process = Command("serve", "--port", "0", first=partial(break_when_asked, tmp_path / "die"))
    with ServerProcess.of(process) as server, server.http() as http, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(http.post, "/v1/completions", json=long_body())
        until(lambda: running(http)[0] == 1)
        (tmp_path / "die").touch()
        assert answer.result().status_code == 503
        assert server.process.wait(120) == 1
        server.close()
        assert any("the accelerator fell off" in line for line in server.lines)


def test_an_address_in_use_is_a_sentence(server: ServerProcess) -> None:
    port = str(urlsplit(server.url).port)
    done = run("serve", "--port", port)
    assert done.exit_code == 2 and "Traceback" not in done.stderr and "choose another --port" in done.stderr


def test_metrics_count_what_was_served(http: httpx.Client) -> None:
    http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 8})
    lines = http.get("/metrics").text.splitlines()
    values = {line.split(" ")[0]: float(line.split(" ")[1]) for line in lines if not line.startswith("#")}
    for prefix in ("slipstream", "vllm"):
        label = '{model_name="embedded"}'
        assert values[f"{prefix}:generation_tokens_total{label}"] >= 8
        accepted = values[f"{prefix}:spec_decode_num_accepted_tokens_total{label}"]
        assert accepted <= values[f"{prefix}:spec_decode_num_draft_tokens_total{label}"]
        series = f"{prefix}:spec_decode_num_accepted_tokens_per_pos_total"
        by_position = [value for name, value in values.items() if name.startswith(series)]
        assert sum(by_position) == accepted
        assert values[f"{prefix}:time_to_first_token_seconds_count{label}"] >= 1
        assert f"{prefix}:num_requests_waiting{label}" in values
    assert {f'slipstream:graphs_total{{model_name="embedded",origin="{origin}"}}' for origin in ORIGINS} <= set(values)


def test_the_dashboard_asks_for_series_that_are_there(http: httpx.Client) -> None:
    board = json.loads((Path(__file__).parents[2] / "docs" / "grafana.json").read_text())
    targets = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked = {name for expression in targets for name in SERIES.findall(expression)}
    http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 8})
    found = set(SERIES.findall(http.get("/metrics").text))
    assert len(asked) > 8 and asked <= found


SERIES = re.compile(r"slipstream:\w+")
ORIGINS = ("compiled", "captured")
