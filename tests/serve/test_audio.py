"""/v1/audio of a real server process, with a tiny random Whisper; and encoder-decoders under /v1/completions."""

import io
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import soundfile
import torch
from transformers import AutoTokenizer, GenerationMixin, LogitsProcessorList, WhisperFeatureExtractor
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

import slipstream
from serve.conftest import ServerProcess
from slipstream.engine import transcription
from slipstream.engine.plan_file import Plan
from slipstream.models.loading.pairings import EMBEDDED
from terminal import run
from toys import SEQ2SEQ, WHISPER, Family, rare, tiny

RATE = 16_000
VOCABULARY = 4096
END, ENGLISH, GERMAN, TRANSCRIBE, TRANSLATE, SILENT = range(VOCABULARY - 57, VOCABULARY - 51)
"""As Whisper lays its tokens out: words, the end, languages, tasks, no times, and a time per 20 ms of the second."""
SETTINGS = {
    "eos_token_id": END,
    "pad_token_id": 1,
    "decoder_start_token_id": 2,
    "lang_to_id": {"<|en|>": ENGLISH, "<|de|>": GERMAN},
    "task_to_id": {"transcribe": TRANSCRIBE, "translate": TRANSLATE},
    "no_timestamps_token_id": SILENT,
    "begin_suppress_tokens": [7, 8],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Whisper of two languages that takes one second at once, with the embedded pair's tokenizer."""
    path = tmp_path_factory.mktemp("whisper")
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED / "target")
    config = {**WHISPER, "vocab_size": VOCABULARY, "eos_token_id": END, "max_source_positions": 50}
    assert len(tokenizer) == VOCABULARY
    model = tiny(Family("WhisperConfig", config, {}), seed=4)
    with torch.no_grad():
        model.get_output_embeddings().weight[SILENT:] *= 1.5  # so that it writes times now and then
    model.save_pretrained(path)
    (path / "generation_config.json").write_text(json.dumps(SETTINGS))
    tokenizer.save_pretrained(path)
    WhisperFeatureExtractor(feature_size=8, chunk_length=1, n_fft=400, hop_length=160).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def listening(folder: Path) -> Iterator[ServerProcess]:
    with ServerProcess.start("--target", str(folder), "--draft", str(folder), "--served-model-name", "w") as started:
        yield started


def sound(seconds: float, rate: int = RATE, channels: int = 1) -> bytes:
    samples = np.random.default_rng(0).normal(0, 3000, (int(seconds * rate), channels)).astype("<i2")
    file = io.BytesIO()
    soundfile.write(file, samples, rate, "PCM_16", format="WAV")
    return file.getvalue()


def by_transformers(folder: Path, content: bytes, begin: Sequence[int], timed: bool = False) -> list[int]:
    """The tokens, without the end, of transformers' own greedy decoding of a sound of one window."""
    model, samples = slipstream.load(str(folder)).decoder.target.model, np.frombuffer(content[44:], "<i2") / 32768
    extractor = WhisperFeatureExtractor.from_pretrained(folder)
    features = extractor(samples, sampling_rate=RATE, return_tensors="pt").input_features
    first = torch.tensor([[model.config.decoder_start_token_id, *begin]])
    rules = [WhisperTimeStampLogitsProcessor(model.generation_config, first.shape[1])] if timed else []
    how = {"do_sample": False, "max_new_tokens": 128 - first.shape[1], "logits_processor": LogitsProcessorList(rules)}
    made = GenerationMixin.generate(model, input_features=features, decoder_input_ids=first, **how)
    return [token for token in made[0, first.shape[1] :].tolist() if token != END]


def test_a_transcription_is_the_models_own(listening: ServerProcess, folder: Path) -> None:
    client, content = listening.client(), sound(0.3)
    for language, token in ((None, ENGLISH), ("de", GERMAN)):
        alone = by_transformers(folder, content, (token, TRANSCRIBE, SILENT))
        decoded = AutoTokenizer.from_pretrained(folder).decode(alone, skip_special_tokens=True)
        more = {} if language is None else {"language": language}
        found = client.audio.transcriptions.create(model="w", file=("x.wav", content), **more)
        assert found.text == decoded.strip()


def test_long_sound_is_read_in_windows_and_other_rates_are_converted(listening: ServerProcess) -> None:
    client = listening.client()
    assert client.audio.transcriptions.create(model="w", file=("x.wav", sound(2.5, 8000, 2)), response_format="text")
    with listening.http() as http:
        answer = http.post("/v1/audio/translations", files={"file": ("x.wav", sound(0.2))}, data={"model": "w"})
        assert answer.json()["text"]
        more = {"language": "null", "temperature": "", "user": "x", "chunking_strategy": "auto"}
        same = http.post("/v1/audio/translations", files={"file": ("x.wav", sound(0.2))}, data=more)
        assert same.json() == answer.json()
        assert same.headers["x-slipstream-ignored"] == "user, chunking_strategy"


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


def test_times_are_those_of_transformers(folder: Path, tmp_path: Path) -> None:
    content = sound(0.9)
    expected = by_transformers(folder, content, (ENGLISH, TRANSCRIBE), timed=True)
    assert sum(token > SILENT for token in expected) > 2
    texts = [token for token in expected if token < SILENT]
    (tmp_path / "x.wav").write_bytes(content)
    for draft in (None, str(folder)):
        engine = slipstream.load(str(folder), draft)
        found = engine.transcribe(tmp_path / "x.wav", timestamps=True)
        assert found.duration == pytest.approx(0.9)
        assert [token for segment in found.segments for token in segment.tokens if token != END] == texts
        ends = [time for segment in found.segments for time in (segment.start, segment.end)]
        assert ends == sorted(ends) and ends[-1] <= 0.9


def test_a_transcript_is_one_text_also_of_beams(folder: Path) -> None:
    engine, content = slipstream.load(str(folder), str(folder)), sound(0.9)
    plain = slipstream.load(str(folder)).transcribe(content, num_beams=2)
    assert engine.transcribe(content, num_beams=2).segments == plain.segments
    for several in ({"n": 2}, {"num_beams": 2, "num_return_sequences": 2}):
        with pytest.raises(ValueError, match="one text of the sound"):
            engine.transcribe(content, **several)


def test_long_sounds_are_decoded_a_few_windows_at_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six windows by a call for two at a time, and one for all: the same text; the windows are told as they end."""
    engine, content, told, calls = slipstream.load(str(folder), batch_size=2), sound(5.5), [], []
    whole = engine.transcribe(content, max_new_tokens=8)
    generate = engine.generate
    monkeypatch.setattr(transcription, "WINDOWS", 1)
    monkeypatch.setattr(engine, "generate", lambda some, **how: calls.append(len(some)) or generate(some, **how))
    parts = engine.transcribe(content, max_new_tokens=8, on_window=lambda *window: told.append(window))
    assert parts == whole and len(parts.segments) == 6
    assert calls == [2, 2, 2] and told == [(done, 6) for done in range(7)]


def test_answers_with_times(listening: ServerProcess, folder: Path) -> None:
    content = sound(1.4)
    expected = slipstream.load(str(folder)).transcribe(content, timestamps=True)
    client = listening.client()
    verbose = client.audio.transcriptions.create(
        model="w", file=("x.wav", content), response_format="verbose_json", timestamp_granularities=["segment"]
    )
    assert verbose.duration == pytest.approx(1.4) and verbose.text == expected.text and verbose.language == "en"
    found, want = ([(each.start, each.end, each.text) for each in one.segments] for one in (verbose, expected))
    assert found == want
    for form, subtitles in (("srt", expected.srt()), ("vtt", expected.vtt())):
        assert client.audio.transcriptions.create(model="w", file=("x.wav", content), response_format=form) == subtitles
    with pytest.raises(openai.BadRequestError) as caught:
        client.audio.transcriptions.create(
            model="w", file=("x.wav", content), response_format="verbose_json", timestamp_granularities=["word"]
        )
    assert "timestamp_granularities" in caught.value.message


@pytest.mark.parametrize("form", ["srt", "json", *rare("text", "vtt")])
def test_the_command_writes_down_files(folder: Path, tmp_path: Path, form: str) -> None:
    content = sound(0.9)
    samples = np.frombuffer(content[44:], "<i2")
    soundfile.write(tmp_path / "x.flac", samples, RATE, subtype="PCM_16")
    engine = slipstream.load(str(folder))
    expected = engine.transcribe(content, timestamps=form != "text")
    models = ("--target", str(folder), "--draft", str(folder))
    done = run("transcribe", str(tmp_path / "x.flac"), *models, "--format", form)
    assert done.exit_code == 0, done.stderr
    if form == "json":
        made = json.loads(done.stdout)
        assert made["text"] == expected.text and len(made["segments"]) == len(expected.segments)
    else:
        wanted = expected.text if form == "text" else getattr(expected, form)()
        assert done.stdout.strip() == wanted.strip()


def test_a_plan_for_recordings(folder: Path, tmp_path: Path) -> None:
    files, saved = [str(tmp_path / f"{name}.wav") for name in "xy"], str(tmp_path / "plan.json")
    for file, seconds in zip(files, (0.9, 2.5), strict=True):
        Path(file).write_bytes(sound(seconds))
    models = ("--target", str(folder), "--draft", str(folder), "--gamma", "2", "--repetitions", "1", "--save", saved)
    assert not run("plan", *models, "--audio", files[0], "--audio", files[1], "--language", "de").exit_code
    made = Plan.read(saved)
    outlook = made.figures["outlooks"]["3"][str(folder)]
    assert made.figures["texts"] == "4 windows of sound" and set(made.gammas) == {1, 3}
    assert outlook["survival"] == [1, 1] and outlook["source_milliseconds"] > 0
    replace(made, models=replace(made.models, draft=str(folder)), gammas={1: 0, 3: 2}).save(saved)
    expected = slipstream.load(str(folder)).transcribe(files[1], language="de").text
    assert run("transcribe", files[1], "--plan", saved, "--language", "de").stdout.strip() == expected.strip()


@pytest.mark.slow
@pytest.mark.parametrize("given", [each] if (each := os.environ.get("SLIPSTREAM_WHISPER")) else [])
def test_a_plan_for_a_real_whisper(given: str, tmp_path: Path) -> None:
    """SLIPSTREAM_WHISPER=MODEL:FILE:... names it and recordings."""
    (model, *files), saved = given.split(os.pathsep), str(tmp_path / "plan.json")
    audio = [word for file in files for word in ("--audio", file)]
    assert run("plan", "--target", model, "--draft", "int8", "--quick", "--save", saved, *audio).exit_code == 0
    assert all(each["int8"]["alpha"] > 0.9 for each in Plan.read(saved).figures["outlooks"].values())
    texts = [run("transcribe", *files, *how).stdout for how in (("--target", model), ("--plan", saved))]
    assert texts[0] == texts[1] != ""


def test_what_the_command_cannot_hear_is_told_in_a_sentence(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "x.wav").write_bytes(sound(0))
    (tmp_path / "x.ogg").write_bytes(b"no sound at all")
    for arguments, reason in (
        ([str(tmp_path / "x.wav"), "--target", str(folder)], "the file holds no sound."),
        ([str(tmp_path / "x.ogg"), "--target", str(folder)], "x.ogg: the file"),  # the rest is soundfile's
        ([str(tmp_path / "none.wav"), "--target", str(folder)], "cannot be read"),
        ([str(tmp_path / "x.wav")], "name a Whisper"),
    ):
        done = run("transcribe", *arguments)
        assert done.exit_code == 2 and reason in done.stderr and "Traceback" not in done.stderr
    (tmp_path / "y.wav").write_bytes(sound(0.9))
    done = run("transcribe", str(tmp_path / "x.ogg"), str(tmp_path / "y.wav"), "--target", str(folder))
    assert done.exit_code == 2 and "x.ogg: the file" in done.stderr and done.stdout.strip()


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
