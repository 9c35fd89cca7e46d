"""/v1/audio of a real server process, with a tiny random Whisper; and encoder-decoders under /v1/completions."""

from __future__ import annotations

import io
import json
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from transformers import AutoTokenizer, GenerationMixin, WhisperFeatureExtractor

import slipstream
from serve.conftest import ServerProcess
from slipstream.models.loading import EMBEDDED
from toys import SEQ2SEQ, WHISPER, Family, tiny

RATE = 16_000
LANGUAGES = {
    "lang_to_id": {"<|en|>": 11, "<|de|>": 12},
    "task_to_id": {"transcribe": 13, "translate": 14},
    "no_timestamps_token_id": 15,
    "begin_suppress_tokens": [7, 8],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Whisper of two languages that hears one second at once, with the embedded pair's tokenizer."""
    path = tmp_path_factory.mktemp("whisper")
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED / "target")
    config = {**WHISPER, "vocab_size": len(tokenizer), "eos_token_id": 0, "max_source_positions": 50}
    model = tiny(Family("WhisperConfig", config, {}), seed=4)
    model.save_pretrained(path)
    settings = {"eos_token_id": 0, "pad_token_id": 1, "decoder_start_token_id": 2, **LANGUAGES}
    (path / "generation_config.json").write_text(json.dumps(settings))
    tokenizer.save_pretrained(path)
    WhisperFeatureExtractor(feature_size=8, chunk_length=1, n_fft=400, hop_length=160).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def listening(folder: Path) -> Iterator[ServerProcess]:
    with ServerProcess.start("--target", str(folder), "--draft", str(folder), "--served-model-name", "w") as started:
        yield started


def sound(seconds: float, rate: int = RATE, channels: int = 1) -> bytes:
    """A WAV file of noise."""
    samples = np.random.default_rng(0).normal(0, 3000, (int(seconds * rate), channels)).astype("<i2")
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(channels)
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes(samples.tobytes())
    return file.getvalue()


def test_a_transcription_is_the_models_own(listening: ServerProcess, folder: Path) -> None:
    client, content = listening.client(), sound(0.3)
    model = slipstream.load(str(folder)).decoder.target.model
    samples = np.frombuffer(content[44:], "<i2") / 32768
    extractor = WhisperFeatureExtractor.from_pretrained(folder)
    features = extractor(samples, sampling_rate=RATE, return_tensors="pt").input_features
    for language, token in ((None, 11), ("de", 12)):
        begin = torch.tensor([[model.config.decoder_start_token_id, token, 13, 15]])
        alone = GenerationMixin.generate(
            model, input_features=features, decoder_input_ids=begin, do_sample=False, max_new_tokens=124
        )
        tokenizer = AutoTokenizer.from_pretrained(folder)
        expected = tokenizer.decode(alone[0, 4:], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        more = {} if language is None else {"language": language}
        found = client.audio.transcriptions.create(model="w", file=("x.wav", content), **more)
        assert found.text == expected.strip()


def test_long_sound_is_read_in_windows_and_other_rates_are_converted(listening: ServerProcess) -> None:
    client = listening.client()
    assert client.audio.transcriptions.create(model="w", file=("x.wav", sound(2.5, 8000, 2)), response_format="text")
    with listening.http() as http:
        answer = http.post("/v1/audio/translations", files={"file": ("x.wav", sound(0.2))}, data={"model": "w"})
        assert answer.json()["text"]


@pytest.mark.parametrize(
    ("content", "more", "field"),
    [
        (b"no sound at all", {}, "file"),
        (sound(0), {}, "file"),
        (sound(0.1), {"language": "xx"}, "language"),
        (sound(0.1), {"extra_body": {"prompt": "x"}}, "prompt"),
        (sound(0.1), {"temperature": 7}, "temperature"),
    ],
)
def test_what_cannot_be_heard(listening: ServerProcess, content: bytes, more: dict[str, Any], field: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        listening.client().audio.transcriptions.create(model="w", file=("x.wav", content), **more)
    assert caught.value.param == field, caught.value.message


def test_a_model_of_texts_hears_nothing(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="does not read sound"):
        client.audio.transcriptions.create(model="embedded", file=("x.wav", sound(0.1)))


def test_a_source_is_the_prompt_of_a_completion(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED / "target")
    family = SEQ2SEQ["t5"]
    tiny(Family(family.config, {**family.base, "vocab_size": len(tokenizer)}, family.changes)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    expected = slipstream.load(str(tmp_path)).generate("def add(a, b):", max_new_tokens=12)[0]
    with ServerProcess.start("--target", str(tmp_path), "--served-model-name", "t5") as server:
        client = server.client()
        found = client.completions.create(model="t5", prompt="def add(a, b):", max_tokens=12, temperature=0)
        assert found.choices[0].text == expected.text
        assert found.usage.prompt_tokens == expected.prompt_tokens
        with pytest.raises(openai.BadRequestError, match="chat template"):
            client.chat.completions.create(model="t5", messages=[{"role": "user", "content": "x"}])
