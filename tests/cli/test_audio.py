"""`slipstream generate --audio`: the text is that of the library with the same sound."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import slipstream
from audios import save_audio, sound, wav
from terminal import run

QUESTION = "What is heard?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_audio("qwen2-audio", tmp_path_factory.mktemp("hears"))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sounds") / "sound.wav"
    path.write_bytes(wav(sound(1)))
    return path


def test_sounds_go_with_texts_and_chats(folder: Path, file: Path) -> None:
    engine = slipstream.load(folder)
    command = ["generate", QUESTION, "--target", str(folder), "--audio", str(file), "--max-new-tokens", "8", "--json"]
    parts = [{"type": "audio", "path": str(file)}, {"type": "text", "text": QUESTION}]
    for more, prompt in (
        ([], {"text": QUESTION, "audio": [file]}),
        (["--audio", str(file)], {"text": QUESTION, "audio": [file] * 2}),
        (["--chat", "--draft", "lookup"], [[{"role": "user", "content": parts}]]),
    ):
        result = run(*command, *more)
        assert result.exit_code == 0, result.stderr
        assert json.loads(result.stdout)["tokens"] == list(engine.generate(prompt, max_new_tokens=8)[0].tokens)


def test_what_cannot_be_heard_is_told(folder: Path, file: Path, tmp_path: Path) -> None:
    lost = run("generate", QUESTION, "--target", str(folder), "--audio", str(tmp_path / "none.wav"))
    assert lost.exit_code and "the sound cannot be read: No such file" in lost.stderr
    deaf = run("generate", QUESTION, "--audio", str(file))
    assert deaf.exit_code and "reads text only here" in deaf.stderr
    ids = tmp_path / "ids.jsonl"
    ids.write_text('{"tokens": [5, 6]}')
    both = run("generate", "--prompts", str(ids), "--target", str(folder), "--audio", str(file))
    assert both.exit_code and "--audio cannot go with token ids" in both.stderr
