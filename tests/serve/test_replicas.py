"""Replicas on a Ray cluster: which one is asked, what happens when one is killed, and the files that deploy them."""

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import pytest
import yaml

from serve.conftest import ServerProcess
from slipstream.serve.cluster.scale import Scale, routing_key


def obj(*required: str, **properties: Any) -> dict[str, Any]:
    closed = {"additionalProperties": False} if properties else {}
    return {"type": "object", "required": [*required], "properties": properties, **closed}


POD = {"type": "object", "required": ["spec"], "properties": {"spec": obj("containers")}}
GROUP = {"rayStartParams": {"type": "object"}, "template": POD}
WORKERS = {name: {"type": "integer", "minimum": 0} for name in ("replicas", "minReplicas", "maxReplicas")}
WORKER = obj("groupName", "template", groupName={"type": "string"}, **WORKERS, **GROUP)
HEAD = obj("template", **GROUP)
RAY_SERVICE = {  # what KubeRay's definition of a RayService says of the fields that our manifest has
    "type": "object",
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "ray.io/v1"},
        "kind": {"const": "RayService"},
        "spec": obj(
            serveConfigV2={"type": "string"},
            rayClusterConfig=obj(
                "headGroupSpec", headGroupSpec=HEAD, workerGroupSpecs={"type": "array", "items": WORKER}
            ),
        ),
    },
}
DOCS = Path(__file__).parents[2] / "docs"


def key(**body: Any) -> str:
    return routing_key(json.dumps(body).encode())


def test_turns_of_a_conversation_have_one_key() -> None:
    system, question = {"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello"}
    turns = [{"role": "assistant", "content": "Hi"}, {"role": "user", "content": "What is new?"}]
    assert key(messages=[system, question]) == key(messages=[system, question, *turns]) != key(messages=[question])
    assert key(messages=[system, question]) != key(messages=[system, turns[1]]), "another conversation"
    assert key(prompt="x" * 3000) == key(prompt="x" * 2000) != key(prompt="y" * 2000)
    assert key(prompt="x" * 3000) != key(prompt="x" * 3000, cache_salt="a"), "prefixes are not shared with other salts"
    assert key(prompt=[1] * 300) == key(prompt=[1] * 400) != key(prompt=[2] * 300)
    assert routing_key(b"") == routing_key(b"nonsense") == routing_key(b"[1]") == key(model="m") == ""


@pytest.mark.parametrize(("text", "found"), [("4", (4, 4)), ("1..4", (1, 4)), (2, (2, 2))])
def test_a_number_of_replicas_is_read(text: str | int, found: tuple[int, int]) -> None:
    scale = Scale.read(text)
    assert (scale.least, scale.most) == found
    for wrong in ("", "0", "4..1", "a", "1..b", "-1"):
        with pytest.raises(ValueError, match="possible"):
            Scale.read(wrong)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's own, of pydantic
def test_the_files_that_deploy_are_valid() -> None:
    from ray.serve.schema import ServeDeploySchema

    from slipstream.serve.cluster.replicas import deploy

    config = yaml.safe_load((DOCS / "ray-serve.yaml").read_text())
    manifest = yaml.safe_load((DOCS / "kuberay.yaml").read_text())
    jsonschema_rs.validate(RAY_SERVICE, manifest)
    for deployment in (config, yaml.safe_load(manifest["spec"]["serveConfigV2"])):
        (application,) = ServeDeploySchema(**deployment).applications
        assert application.import_path == f"{deploy.__module__}:{deploy.__name__}"
        assert deploy(application.args) is not None


def answer(http: httpx.Client, prompt: str, **more: Any) -> httpx.Response:
    return http.post("/v1/completions", json={"prompt": prompt, "temperature": 0, **more})


def workers(server: ServerProcess) -> list[int]:
    found = subprocess.run(["pgrep", "-f", "^ray::ServeReplica:slipstream:Replica"], capture_output=True, text=True)
    return [pid for pid in map(int, found.stdout.split()) if server.process.pid in ancestors(pid)]


def ancestors(pid: int) -> Iterator[int]:
    while pid > 1:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except FileNotFoundError:
            return
        pid = int(stat.rpartition(")")[2].split()[1])
        yield pid


def wait_for_two(server: ServerProcess) -> None:
    end = time.monotonic() + 300
    while len(workers(server)) < 2 and time.monotonic() < end:
        time.sleep(0.5)
    assert len(workers(server)) == 2


@pytest.mark.slow
def test_replicas_answer_as_one_server_does(replicas: ServerProcess, server: ServerProcess) -> None:
    with replicas.http() as many, server.http() as one:
        assert many.get("/health").json() == {"status": "ok"}
        for path, body in (
            ("/v1/completions", {"prompt": "x", "temperature": 0}),
            ("/v1/completions", {"nonsense": 1}),
        ):
            ours, expected = many.post(path, json=body), one.post(path, json=body)
            assert ours.status_code == expected.status_code
            assert ours.json().get("choices") == expected.json().get("choices")
            assert ours.json().get("error") == expected.json().get("error")
        assert many.get("/nowhere").status_code == 404
    assert len(workers(replicas)) == 2
    asked: dict[str, Any] = {"model": "embedded", "prompt": "x", "max_tokens": 8, "temperature": 0}
    stream = replicas.client().completions.create(**asked, stream=True)
    whole = replicas.client().completions.create(**asked)
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text


@pytest.mark.slow
def test_a_conversation_finds_its_prefix_on_its_replica(replicas: ServerProcess) -> None:
    with replicas.http() as http:
        for number in range(4):
            prompt = f"# {number}\n" + f"value_{number} = compute({number})\n" * 40
            assert answer(http, prompt, max_tokens=1).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            again = answer(http, prompt + "x = 1\n", max_tokens=1).json()["usage"]
            assert again["prompt_tokens_details"]["cached_tokens"] > 100


@pytest.mark.slow
def test_a_killed_replica_ends_its_streams_and_its_queue_goes_elsewhere(replicas: ServerProcess) -> None:
    ends: dict[int, str] = {}
    began = threading.Semaphore(0)

    def stream(number: int) -> None:
        body = {"prompt": f"# {number}", "max_tokens": 1500, "temperature": 1, "ignore_eos": True, "stream": True}
        with replicas.http() as http, http.stream("POST", "/v1/completions", json=body) as response:
            for place, line in enumerate(response.iter_lines()):
                ends[number] = line or ends.get(number, "")
                if place == 0:
                    began.release()

    def whole(number: int) -> None:
        with replicas.http() as http:
            ends[number] = str(answer(http, f"# {number}", max_tokens=40).status_code)

    threads = [threading.Thread(target=stream, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for _ in range(8):
        assert began.acquire(timeout=120)
    queued = [threading.Thread(target=whole, args=(number,)) for number in range(8, 14)]
    for thread in queued:
        thread.start()
    time.sleep(0.2)
    os.kill(workers(replicas)[0], signal.SIGKILL)
    for thread in [*threads, *queued]:
        thread.join(300)
        assert not thread.is_alive(), "nothing hangs"
    streams = [ends[number] for number in range(8)]
    lost = [end for end in streams if "error" in end]
    assert lost and all("is gone: ask again" in end for end in lost)
    assert all(end == "data: [DONE]" for end in streams if end not in lost)
    assert [ends[number] for number in range(8, 14)] == ["200"] * 6, "what waited was answered elsewhere"
    wait_for_two(replicas)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_replica_that_is_killed_under_a_hundred_streams_loses_none_that_waited(replicas: ServerProcess) -> None:
    """Four run, the others wait: those that had begun may end with the error event, all others end as they should."""
    lines: dict[int, list[str]] = {number: [] for number in range(100)}
    began = threading.Semaphore(0)

    def stream(number: int) -> None:
        body = {"prompt": f"# {number}", "max_tokens": 40, "temperature": 0, "ignore_eos": True, "stream": True}
        with replicas.http(timeout=1500) as http, http.stream("POST", "/v1/completions", json=body) as response:
            for line in filter(None, response.iter_lines()):
                lines[number].append(line)
                if len(lines[number]) == 1:
                    began.release()

    threads = [threading.Thread(target=stream, args=(number,)) for number in lines]
    for thread in threads:
        thread.start()
    for _ in range(5):
        assert began.acquire(timeout=300)
    killed = workers(replicas)[0]
    begun = {number for number, found in lines.items() if found}
    os.kill(killed, signal.SIGKILL)
    for thread in threads:
        thread.join(1500)
        assert not thread.is_alive(), "nothing hangs"
    lost = {number for number, found in lines.items() if found[-1] != "data: [DONE]"}
    assert all("is gone: ask again" in lines[number][-1] for number in lost)
    assert len(begun) < 50 and len(lost) <= 4 and len(lost - begun) <= 2, "what waits has not begun"
    wait_for_two(replicas)
