"""`slipstream generate --image | --audio`: the text is that of the library with the same image or sound."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import slipstream
from audios import save_audio, sound, wav
from terminal import run
from visions import picture, png, save_llava

QUESTION = "What is this?"


@dataclass(frozen=True)
class Medium:
    """A kind of media: its option, its field in a prompt, its file, and a model for it."""

    option: str
    field: str
    name: str
    data: Callable[[], bytes]
    model: Callable[[Path], Path]


MEDIA = {
    "image": Medium("--image", "images", "a.png", lambda: png(picture(1)), save_llava),
    "audio": Medium("--audio", "audio", "a.wav", lambda: wav(sound(1)), lambda path: save_audio("qwen2-audio", path)),
}


@pytest.fixture(scope="module", params=MEDIA)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Medium, Path, Path]:
    medium, folder = MEDIA[request.param], tmp_path_factory.mktemp(request.param)
    file = folder / medium.name
    file.write_bytes(medium.data())
    return request.param, medium, medium.model(folder / "model"), file


def test_media_go_with_texts_and_chats(made: tuple[str, Medium, Path, Path]) -> None:
    kind, medium, folder, file = made
    engine, given = slipstream.load(folder), picture(1) if kind == "image" else file
    command = ["generate", QUESTION, "--target", str(folder), medium.option, str(file), "--max-new-tokens", "8"]
    part = {"type": "image", "image": given} if kind == "image" else {"type": "audio", "path": str(file)}
    chat = [{"role": "user", "content": [part, {"type": "text", "text": QUESTION}]}]
    cases: list[tuple[list[str], Any]] = [
        ([], {"text": QUESTION, medium.field: [given]}),
        ([medium.option, str(file)], {"text": QUESTION, medium.field: [given] * 2}),
        (["--chat", "--draft", "lookup"], [chat]),
    ]
    for more, prompt in cases:
        result = run(*command, "--json", *more)
        assert result.exit_code == 0, result.stderr
        assert json.loads(result.stdout)["tokens"] == list(engine.generate(prompt, max_new_tokens=8)[0].tokens)


def test_what_cannot_be_read_is_told(made: tuple[str, Medium, Path, Path], tmp_path: Path) -> None:
    _, medium, folder, file = made
    for name, says in ((str(tmp_path / "none"), "read: No such"), ("https://example.org/there", "is a web address")):
        lost = run("generate", QUESTION, "--target", str(folder), medium.option, name)
        assert lost.exit_code and says in lost.stderr
    blind = run("generate", QUESTION, medium.option, str(file))
    assert blind.exit_code and "reads text only here" in blind.stderr
    ids = tmp_path / "ids.jsonl"
    ids.write_text('{"tokens": [5, 6]}')
    both = run("generate", "--prompts", str(ids), "--target", str(folder), medium.option, str(file))
    assert both.exit_code and f"{medium.option} cannot go with token ids" in both.stderr
