"""`slipstream generate --image`: the text is that of the library with the same image."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import slipstream
from terminal import run
from visions import picture, png, save_llava

QUESTION = "What is this?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llava(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("images") / "picture.png"
    path.write_bytes(png(picture(1)))
    return path


def test_images_go_with_texts_and_chats(folder: Path, image: Path) -> None:
    engine = slipstream.load(folder)
    command = ["generate", QUESTION, "--target", str(folder), "--image", str(image), "--max-new-tokens", "8", "--json"]
    parts = [{"type": "image", "image": picture(1)}, {"type": "text", "text": QUESTION}]
    for more, prompt in (
        ([], {"text": QUESTION, "images": [picture(1)]}),
        (["--image", str(image)], {"text": QUESTION, "images": [picture(1)] * 2}),
        (["--chat", "--draft", "lookup"], [[{"role": "user", "content": parts}]]),
    ):
        result = run(*command, *more)
        assert result.exit_code == 0, result.stderr
        assert json.loads(result.stdout)["tokens"] == list(engine.generate(prompt, max_new_tokens=8)[0].tokens)


def test_what_cannot_be_shown_is_told(folder: Path, image: Path, tmp_path: Path) -> None:
    lost = run("generate", QUESTION, "--target", str(folder), "--image", str(tmp_path / "none.png"))
    assert lost.exit_code and "cannot be read: No such file" in lost.stderr
    blind = run("generate", QUESTION, "--image", str(image))
    assert blind.exit_code and "reads text only here" in blind.stderr
    ids = tmp_path / "ids.jsonl"
    ids.write_text('{"tokens": [5, 6]}')
    both = run("generate", "--prompts", str(ids), "--target", str(folder), "--image", str(image))
    assert both.exit_code and "--image cannot go with token ids" in both.stderr
