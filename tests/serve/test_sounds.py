"""Sounds over HTTP: in the request itself, and never a file of the server or an address."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import slipstream
from audios import input_audio, rounded, save_audio, sound, wav
from serve.conftest import ServerProcess

QUESTION = "What is heard?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_audio("qwen2-audio", tmp_path_factory.mktemp("hears"))


@pytest.fixture(scope="module")
def hearing(folder: Path) -> Iterator[httpx.Client]:
    with ServerProcess.start("--target", str(folder), "--draft", "lookup") as started, started.http() as client:
        yield client


def asked(*parts: dict[str, Any]) -> dict[str, Any]:
    content = [*parts, {"type": "text", "text": QUESTION}]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 10, "temperature": 0}


def test_a_chat_about_a_sound(hearing: httpx.Client, folder: Path) -> None:
    samples = rounded(sound(1))
    chat = [{"role": "user", "content": [{"type": "audio", "audio": samples}, {"type": "text", "text": QUESTION}]}]
    [wanted] = slipstream.load(folder).generate([chat], max_new_tokens=10)
    body = asked(input_audio(wav(samples)))
    answer = hearing.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == wanted.text
    assert answer.json()["usage"]["prompt_tokens"] == wanted.prompt_tokens
    counted = hearing.post("/tokenize", json={"messages": body["messages"]})
    assert counted.json()["count"] == wanted.prompt_tokens


def test_other_sounds_are_refused(hearing: httpx.Client, http: httpx.Client) -> None:
    content = input_audio(wav(sound(1)))
    path = {"type": "input_audio", "input_audio": {"data": "/etc/passwd", "format": "wav"}}
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    cases = [
        (hearing, [path], "is no base64"),
        (hearing, [input_audio(b"RIFF")], "holds no sound"),
        (hearing, [input_audio(wav(sound(1), rate=1))], "at most 1800 s are taken"),
        (hearing, [content] * 17, "holds 17 sounds, but at most 16"),
        (hearing, [image], "holds images, but"),
        (http, [content], "holds sounds, but"),
    ]
    for which, parts, says in cases:
        answer = which.post("/v1/chat/completions", json=asked(*parts))
        assert answer.status_code == 400, answer.text
        assert says in answer.json()["error"]["message"] and answer.json()["error"]["param"] == "messages"
    for part in ({"type": "audio", "path": "/etc/passwd"}, {"type": "audio_url", "audio_url": {"url": "file:///a"}}):
        assert hearing.post("/v1/chat/completions", json=asked(part)).status_code in (400, 422)
