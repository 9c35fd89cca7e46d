"""Sounds as users pass them, to models that hear them beside a text."""

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

import slipstream
from audios import MARK, RATE, input_audio, rounded, save_audio, sound, wav
from slipstream.engine import sounds
from slipstream.engine.engine import Engine
from slipstream.engine.media import TextWithMedia
from slipstream.engine.sounds import opened, read_sound
from visions import picture

TEXT = f"user: {MARK}What is heard?\nassistant: "


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_audio("qwen2-audio", tmp_path_factory.mktemp("hears"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return slipstream.load(folder, "lookup", gamma=4)


def flac(samples: np.ndarray, rate: int = RATE, form: str = "FLAC", bits: int = 16) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, f"PCM_{bits}", format=form)
    return file.getvalue()


def test_all_ways_to_pass_a_sound_are_one(engine: Engine, tmp_path: Path) -> None:
    samples = rounded(sound(1))
    content = wav(samples)
    for same in (content, flac(samples, form="WAV", bits=24), flac(samples, form="WAV", bits=32)):
        assert np.array_equal(read_sound(same, RATE), samples)
    file = tmp_path / "sound.wav"
    file.write_bytes(content)
    url = f"data:audio/wav;base64,{base64.b64encode(content).decode()}"
    forms: list[Any] = [samples, torch.from_numpy(samples), content, flac(samples), file, str(file), url]
    parts = [
        input_audio(content),
        {"type": "audio_url", "audio_url": {"url": url}},
        {"type": "audio", "audio": samples},
        {"type": "audio", "path": str(file)},
    ]
    chats = [[{"role": "user", "content": [part, {"type": "text", "text": "What is heard?"}]}] for part in parts]
    prompts = [*({"text": TEXT, "audio": [form]} for form in forms), TextWithMedia(TEXT, audio=[content]), *chats]
    first, *others = [list(each.tokens) for each in engine.generate(prompts, max_new_tokens=8)]
    assert all(each == first for each in others)
    assert list(engine.generate({"text": TEXT, "audio": [sound(2)]}, max_new_tokens=8)[0].tokens) != first


def test_what_cannot_be_heard_is_refused(engine: Engine) -> None:
    silent = wav(sound(1))[:24] + bytes(4) + wav(sound(1))[28:]
    for prompt, says in (
        ({"text": TEXT, "images": [picture(1)]}, "has images, but .* reads text and sounds only here"),
        ({"text": TEXT, "audio": [sound(1), sound(2)]}, r"has 2 sounds, but <\|AUDIO\|> is there 1 times"),
        ({"text": TEXT, "audio": ["/there/is/none.wav"]}, "the sound cannot be read: No such file"),
        ({"text": TEXT, "audio": ["https://example.org/a.wav"]}, "the sound is a web address"),
        ({"text": TEXT, "audio": [silent[:16] + b"\xff" * 4 + silent[20:]]}, "that can be read: Error in WAV"),
        ({"text": TEXT, "audio": [silent]}, "the file has 0 samples per second of 16 bits"),
        ({"text": TEXT, "audio": [np.full(9, np.nan)]}, "pass numbers in -1 .. 1, none of them NaN"),
        ({"text": TEXT, "audio": [sound(1, 3.0)]}, "has 3 s of sound, and the model reads 1: shorten it"),
        ({"text": TEXT, "audio": [flac(sound(1, 5.0))[:-9000]]}, "the file is damaged after 0 s: "),
        ({"text": TEXT, "audio": [5]}, "the sound is of type int"),
        ({"text": TEXT, "audio": [np.zeros((2, 2))]}, "the sound is an array of shape"),
        ({"text": TEXT, "audio": 5}, "audio of prompt 0 is 5"),
        ([{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "%"}}]}], "is no base64"),
        ([{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}], "a part without its audio"),
    ):
        with pytest.raises(ValueError, match=says):
            engine.generate(prompt)
    with pytest.raises(ValueError, match=r"has sounds, but .* reads text only here"):
        slipstream.load().generate({"text": "x", "audio": [sound(1)]})


def test_sounds_that_are_too_long_are_refused_before_they_are_read() -> None:
    for content in (wav(sound(1, 2.0)), flac(sound(1, 2.0)), wav(sound(1), rate=1)):
        with pytest.raises(ValueError, match="at most 1 s are taken: cut it"):
            read_sound(content, RATE, longest=1)
    assert len(read_sound(wav(sound(1, 1.0)), RATE, longest=1)) == RATE


@pytest.mark.parametrize("rate", [RATE, 22_050, 8_000])
@pytest.mark.parametrize("write", [wav, flac])
def test_parts_of_a_sound_are_those_of_the_whole(rate: int, write: Any, tmp_path: Path) -> None:
    samples = rounded(sound(3, 3.3 * rate / RATE))  # of three seconds and a part at its rate
    file = tmp_path / "sound"
    file.write_bytes(write(samples, rate))
    whole = read_sound(file, RATE)
    with opened(file, RATE) as found:
        parts = [found.part(start, start + 1) for start in range(4)]
        late = found.part(2, 3)
    assert found.seconds == pytest.approx(3.3, abs=1e-3) and len(whole) == round(found.seconds * RATE)
    assert [len(part) for part in parts] == [RATE, RATE, RATE, len(whole) - 3 * RATE]
    assert np.array_equal(late, parts[2])
    error = np.abs(np.concatenate(parts) - whole)[100:-100].max()  # a spectrum ends where it begins
    assert error == 0 if rate == RATE else error < 0.01


def test_control_parts_without_margins_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sounds, "MARGIN", 0)
    content = wav(sound(3, 2.0 * 22_050 / RATE), 22_050)
    with opened(content, RATE) as found:
        assert np.abs(np.concatenate([found.part(0, 1), found.part(1, 2)]) - read_sound(content, RATE)).max() > 0.02


def test_a_file_whose_writer_did_not_know_its_length_ends_with_its_bytes() -> None:
    content = bytearray(wav(sound(1, 1.0)))
    content[40:44] = (0x7FFFFFF0).to_bytes(4, "little")
    assert len(read_sound(bytes(content), RATE, longest=2)) == RATE
