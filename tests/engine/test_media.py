"""Models with their processors, loaded by name: what users pass gives the tokens of `generate` for the same media."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import slipstream
from audios import KINDS, MARK, RATE, save_audio, sound
from slipstream.core.media import Modality
from slipstream.engine.engine import Engine
from visions import SAVED, picture, save_vision

TOKENS = 12
QUESTION = " What is this?"


def similar(kinds: Iterable[str]) -> list[Any]:
    """The first kind, and with the slow tests the others."""
    first, *others = kinds
    return [first, *(pytest.param(kind, marks=pytest.mark.slow) for kind in others)]


def generated(engine: Engine, text: str, **media: Any) -> list[int]:
    model, processor = engine.decoder.target.model, engine.media.processor  # type: ignore[attr-defined, union-attr]
    read = (processor if media else processor.tokenizer)(text=[text], return_tensors="pt", **media)
    options = {"do_sample": False, "max_new_tokens": TOKENS, "pad_token_id": 0}
    return model.generate(**read, **options)[0, read["input_ids"].shape[1] :].tolist()


def check(engine: Engine, prompts: list[Any], wanted: list[list[int]]) -> None:
    """Plainly and with copied drafts, in one ragged batch."""
    for plain in (True, False):
        done = engine.generate(prompts, max_new_tokens=TOKENS, plain=plain)
        assert [list(each.tokens) for each in done] == wanted
    assert sum(each.stats.drafted for each in done)


@pytest.mark.parametrize("kind", similar(SAVED))
def test_pictures_as_users_pass_them(kind: str, tmp_path: Path) -> None:
    if kind == "smolvlm":
        pytest.importorskip("num2words", reason="its processor asks for it")
    engine, mark = slipstream.load(save_vision(kind, tmp_path), "lookup", gamma=4), SAVED[kind].mark
    assert all("without a program" in note for note in engine.notes)
    text, pair = f"user: {mark}{QUESTION}\nassistant: ", f"user: {mark} or {mark}, which of the two?\nassistant: "
    content = [{"type": "image", "image": picture(1, 40)}, {"type": "text", "text": QUESTION}]
    chat = [{"role": "user", "content": content}]

    def wanted(asked: str, *images: Image.Image) -> list[int]:
        return generated(engine, asked, **({"images": [list(images)]} if images else {}))

    check(
        engine,
        [
            {"text": text, "images": [picture(1, 40)]},
            chat,
            "def f(x):",
            {"text": pair, "images": [picture(2), picture(3)]},
        ],
        [wanted(text, picture(1, 40))] * 2 + [wanted("def f(x):"), wanted(pair, picture(2), picture(3))],
    )
    assert wanted(text, picture(1, 40)) != wanted(text, picture(2, 40))


@pytest.mark.parametrize("kind", similar(KINDS))
def test_sounds_as_users_pass_them(kind: str, tmp_path: Path) -> None:
    engine = slipstream.load(save_audio(kind, tmp_path), "lookup", gamma=4)
    assert ["runs without a program" in note for note in engine.notes] == [True] * (kind == "qwen2.5-omni")
    assert Modality.AUDIO in engine.media.modalities  # type: ignore[union-attr]
    text = f"user: {MARK}{QUESTION}\nassistant: "
    chat = [{"role": "user", "content": [{"type": "audio", "audio": sound(1)}, {"type": "text", "text": QUESTION}]}]

    def wanted(asked: str, *sounds: np.ndarray) -> list[int]:
        return generated(engine, asked, **({"audio": list(sounds), "sampling_rate": RATE} if sounds else {}))

    check(
        engine,
        [{"text": text, "audio": [sound(1)]}, chat, "def f(x):", {"text": text, "audio": [sound(2, 0.7)]}],
        [wanted(text, sound(1))] * 2 + [wanted("def f(x):"), wanted(text, sound(2, 0.7))],
    )
    assert wanted(text, sound(1)) != wanted(text, sound(2))


def test_pictures_and_sounds_in_one_prompt(tmp_path: Path) -> None:
    engine = slipstream.load(save_audio("qwen2.5-omni", tmp_path), "lookup", gamma=4)
    text = f"user: {MARK} and <|IMAGE|>, do they belong together?\nassistant: "
    prompt = {"text": text, "images": [picture(1)], "audio": [sound(1)]}
    wanted = generated(engine, text, images=[[picture(1)]], audio=[sound(1)], sampling_rate=RATE)
    check(engine, [prompt, "def f(x):"], [wanted, generated(engine, "def f(x):")])
    assert wanted != generated(engine, text, images=[[picture(1)]], audio=[sound(2)], sampling_rate=RATE)
    [unplaced] = engine.generate({**prompt, "text": "do they belong together?"}, max_new_tokens=TOKENS)
    text = "<|vision_bos|><|IMAGE|><|vision_eos|><|audio_bos|><|AUDIO|><|audio_eos|>do they belong together?"
    assert list(unplaced.tokens) == generated(engine, text, images=[[picture(1)]], audio=[sound(1)], sampling_rate=RATE)
