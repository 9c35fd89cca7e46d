"""Encoder-decoders through the engine and the command line: sources in, text out, tasks and languages."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import GenerationMixin, PreTrainedTokenizerFast

import slipstream
from slipstream.bench.race import measure
from slipstream.bench.records import QUICK
from slipstream.check import check
from slipstream.engine.load import Task, frame
from slipstream.measure.environment import environment
from slipstream.models.causal import CausalScorer
from slipstream.models.layers import part_of
from slipstream.plan.planner import PlanSettings, make
from terminal import run
from toys import SEQ2SEQ, WHISPER, Family, tiny

VOCAB = 257
TASKS = {"summarization": {"prefix": "summarize: "}, "translation_en_to_de": {"prefix": "translate: "}}
SOURCES = ["hello", "a longer text", "x"]


def save(folder: Path, family: str, seed: int = 0, **changes: Any) -> str:
    """A tiny model whose tokens are bytes; the tokenizer ends every text with <eos>."""
    model = tiny(SEQ2SEQ[family], seed=seed, vocab_size=VOCAB, eos_token_id=256, **changes)
    model.save_pretrained(folder)
    if family == "t5":  # as the models on the hub have it
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "task_specific_params": TASKS}))
    vocab = {sign: number for number, sign in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab={**vocab, "<eos>": 256}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing("$A <eos>", special_tokens=[("<eos>", 256)])
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>").save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    target, draft = map(tmp_path_factory.mktemp, ("target", "draft"))
    return save(target, "t5"), save(draft, "t5", seed=1, num_layers=1)


def by_transformers(folder: str, text: str, count: int) -> list[int]:
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder)
    inputs = transformers.AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt", return_token_type_ids=False)
    return model.generate(**inputs, do_sample=False, max_new_tokens=count)[0, 1:].tolist()


@pytest.mark.parametrize("draft", ["int8", "int4"])
def test_a_t5_drafts_for_itself_with_quantized_weights(pair: tuple[str, str], draft: str) -> None:
    """T5 asks a layer's weight for the type of its inputs, and quantized weights are none."""
    engine = slipstream.load(pair[0], draft, gamma=3, dtype="bfloat16")
    plain = engine.generate(SOURCES, max_new_tokens=8, plain=True)
    found = engine.generate(SOURCES, max_new_tokens=8)
    assert [each.tokens for each in found] == [each.tokens for each in plain]
    assert sum(each.stats.accepted for each in found) > 0


@pytest.mark.parametrize("options", [{}, {"quantize": "int8"}, {"kv_dtype": "int8"}])
def test_an_encoder_in_another_type_is_part_of_the_target(pair: tuple[str, str], options: dict[str, Any]) -> None:
    engine = slipstream.load(pair[0], **{"draft": pair[1], "gamma": 3, "encoder_dtype": "bfloat16", **options})
    facts = environment(engine)["target"]
    assert facts["encoder_dtype"] == "torch.bfloat16" and facts.get("kv_dtype") == options.get("kv_dtype")
    for temperature in (0.0, 1.0):
        drafted, again = (engine.generate(SOURCES, max_new_tokens=12, temperature=temperature) for _ in range(2))
        assert [each.tokens for each in drafted] == [each.tokens for each in again]
        assert sum(each.stats.drafted for each in drafted) > 0
    plain, found = (engine.generate(SOURCES, max_new_tokens=12, plain=plain) for plain in (True, False))
    assert [each.tokens for each in found] == [each.tokens for each in plain]


def test_the_command_line_takes_the_type_of_an_encoder(pair: tuple[str, str]) -> None:
    options = ["hello", "--target", pair[0], "--draft", pair[1], "--max-new-tokens", "12", "--json"]
    engine = slipstream.load(*pair, encoder_dtype="bfloat16")
    found = run("generate", *options, "--encoder-dtype", "bfloat16")
    assert json.loads(found.stdout)["tokens"] == list(engine.generate("hello", max_new_tokens=12)[0].tokens)
    causal = run("generate", "hello", "--encoder-dtype", "bfloat16")
    assert causal.exit_code == 2 and "is no encoder-decoder" in causal.stderr


def test_prompts_are_sources(pair: tuple[str, str]) -> None:
    engine = slipstream.load(*pair, gamma=3)
    done = engine.generate(SOURCES, max_new_tokens=20)
    assert [list(one.tokens) for one in done] == [by_transformers(pair[0], text, 20) for text in SOURCES]
    assert [one.prompt_tokens for one in done] == [len(text) + 1 for text in SOURCES]
    plain = engine.generate(SOURCES, max_new_tokens=20, plain=True)
    assert [one.tokens for one in plain] == [one.tokens for one in done]
    assert "".join(piece.text for piece in engine.stream("hello", max_new_tokens=20)) == done[0].text


def test_a_task_by_name_is_a_prefix(pair: tuple[str, str]) -> None:
    want = by_transformers(pair[0], "summarize: hello", 12)
    for task in ("summarization", "summarize: ", Task("summarization"), Task(prefix="summarize: ")):
        engine = slipstream.load(*pair, task=task)
        assert list(engine.generate("hello", max_new_tokens=12)[0].tokens) == want


def test_sampling_repeats_by_seed_and_equal_sources_differ(pair: tuple[str, str]) -> None:
    engine = slipstream.load(*pair)
    settings: dict[str, Any] = {"max_new_tokens": 16, "temperature": 1.0, "ignore_eos": True, "seed": 3}
    first = engine.generate(["hello"] * 2, **settings)
    assert first[0].tokens != first[1].tokens
    again = engine.generate(["hello", "other", "hello"], **settings)
    assert [again[0].tokens, again[2].tokens] == [one.tokens for one in first]
    assert engine.generate("other", **settings)[0].tokens == again[1].tokens


def test_an_engine_hears_features() -> None:
    model = tiny(SEQ2SEQ["whisper"], seed=2)
    engine = slipstream.load(model, model)
    sounds = list(torch.randn(2, 8, 40, generator=torch.Generator().manual_seed(0)))
    done = engine.generate(sounds, max_new_tokens=12)
    for one, sound in zip(done, sounds, strict=True):
        alone = GenerationMixin.generate(model, input_features=sound[None], do_sample=False, max_new_tokens=12)
        assert list(one.tokens) == alone[0, 1:].tolist()
    settings: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 12}
    twice = engine.generate(sounds[:1] * 2, **settings)
    assert twice[0].tokens != twice[1].tokens
    assert engine.generate(sounds[0], **settings)[0].tokens == twice[0].tokens
    together = engine.generate(torch.stack(sounds), max_new_tokens=12)
    assert [one.tokens for one in together] == [one.tokens for one in done]
    with pytest.raises(ValueError, match="audio features have no token ids"):
        engine.encode(sounds[0])
    with pytest.raises(ValueError, match=r"prompt 0 is token ids, but .* takes features"):
        engine.generate([3, 4, 5])


def test_tokens_that_the_makers_forbid_are_not_written() -> None:
    model = tiny(Family("MarianConfig", {**SEQ2SEQ["marian"].base, **SEQ2SEQ["marian"].changes}, {}))
    free = slipstream.load(model).generate([3, 4, 5], max_new_tokens=12)[0].tokens
    model.generation_config.bad_words_ids = [[free[0]]]
    model.generation_config.begin_suppress_tokens = [free[0] + 1]
    bound = slipstream.load(model, model).generate([3, 4, 5], max_new_tokens=12)[0].tokens
    assert free[0] not in bound
    ids = torch.tensor([[3, 4, 5]])
    want = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12)
    assert list(bound) == want[0, 1:].tolist()


# ---- the command line -------------------------------------------------------------------------------------------


def test_the_command_line_reads_sources(pair: tuple[str, str], tmp_path: Path) -> None:
    target, draft = pair
    file = tmp_path / "sources.txt"
    file.write_text("hello\nx\n")
    common = ("--target", target, "--draft", draft, "--max-new-tokens", "8", "--dtype", "float32")
    lines = run(
        "generate", *common, "--prompts", str(file), "--json", "--task", "translation_en_to_de"
    ).stdout.splitlines()
    engine = slipstream.load(target, draft, task="translation_en_to_de")
    want = engine.generate(["hello", "x"], max_new_tokens=8)
    assert [json.loads(line)["tokens"] for line in lines] == [list(one.tokens) for one in want]
    shown = run("generate", *common, "hello").stdout
    assert shown == f"hello\n{slipstream.load(*pair).generate('hello', max_new_tokens=8)[0].text}\n"


@pytest.mark.parametrize(
    ("task", "sentence"),
    [
        ("translation_xx", "does not know the task 'translation_xx': it knows summarization, translation_en_to_de."),
        ("eng>deu", "the tokenizer does not know the language 'eng'"),
    ],
)
def test_unknown_tasks_name_the_known(pair: tuple[str, str], task: str, sentence: str) -> None:
    result = run("generate", "--target", pair[0], "--task", task, "hello")
    assert result.exit_code == 2
    assert sentence in " ".join(result.stderr.split())


def test_a_causal_model_has_no_tasks() -> None:
    with pytest.raises(ValueError, match=r"is no encoder-decoder, so it has no tasks: write it into the prompt\.$"):
        slipstream.load(task="summarization")


def test_exact_shape_is_refused(pair: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match="exact_shape is not available"):
        slipstream.load(*pair, exact_shape=True)


def test_what_is_for_causal_models_says_so(pair: tuple[str, str]) -> None:
    target = CausalScorer(tiny(SEQ2SEQ["t5"]), "toy")
    with pytest.raises(ValueError, match=r"^toy is an encoder-decoder: only causal models can draft"):
        part_of(target, 1)
    with pytest.raises(ValueError, match="so it cannot draft for itself"):
        slipstream.load(pair[0], "exit:1")
    with pytest.raises(ValueError, match="every row needs a source"):
        target.add(1)
    with pytest.raises(ValueError, match="reads text, not audio features"):
        slipstream.load().generate(torch.zeros(2, 3))


def test_rounds_are_explained_with_the_source_before_them(pair: tuple[str, str]) -> None:
    result = run("generate", "--target", pair[0], "--draft", pair[1], "--max-new-tokens", "6", "--explain", "hello")
    assert result.exit_code == 0
    assert "hello\n" in result.stdout


def test_an_encoder_decoder_cannot_draft_for_a_causal_model(pair: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match=r"is an encoder-decoder, but .* reads no source that it could share\.$"):
        slipstream.load(draft=pair[1])


# ---- frames -----------------------------------------------------------------------------------------------------


class Languages:
    """A tokenizer that knows two languages, as those of NLLB and M2M100 do."""

    src_lang = "en"
    unk_token_id = 3

    def convert_tokens_to_ids(self, name: str) -> int:
        return {"en": 90, "de": 91}.get(name, 3)


def model(**settings: Any) -> SimpleNamespace:
    return SimpleNamespace(
        config=SimpleNamespace(), generation_config=SimpleNamespace(**{"decoder_start_token_id": 2, **settings})
    )


def test_the_language_to_write_begins_the_text() -> None:
    tokenizer = Languages()
    assert frame(model(), tokenizer, Task(src_lang="de", tgt_lang="en")).begin == (2, 90)
    assert tokenizer.src_lang == "de"
    assert frame(model(forced_bos_token_id=7), tokenizer, Task()).begin == (2, 7)
    assert frame(model(), tokenizer, Task()).begin == (2,)
    with pytest.raises(ValueError, match="does not know the language 'fr'"):
        frame(model(), tokenizer, Task(tgt_lang="fr"))


@pytest.mark.parametrize(
    ("text", "task"),
    [
        ("summarization", Task("summarization")),
        ("eng_Latn>deu_Latn", Task(src_lang="eng_Latn", tgt_lang="deu_Latn")),
        (">de", Task(tgt_lang="de")),
        ("summarize: ", Task(prefix="summarize: ")),
        (None, Task()),
    ],
)
def test_tasks_as_they_are_written(text: str | None, task: Task) -> None:
    assert Task.parse(text) == task


def test_a_name_and_a_prefix_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="has a prefix of its own"):
        frame(model(), None, Task("summarization", "summarize: "))


def test_whisper_features_have_the_size_that_the_model_says() -> None:
    assert slipstream.load(tiny(Family("WhisperConfig", WHISPER, {}))).decoder.target.source_form.features == (8, 40)


# ---- the other commands -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("encoder", [None, "bfloat16"])
def test_the_check_passes_and_its_controls_fail(pair: tuple[str, str], encoder: str | None) -> None:
    engine = slipstream.load(*pair, dtype="float32", encoder_dtype=encoder)
    report = check(engine, SOURCES, max_new_tokens=16, samples=200, ignore_eos=True)
    assert report.verdict == "pass"
    assert report.environment.get("encoder_dtype") == encoder  # the certificate says what the target is


@pytest.mark.slow
def test_the_benchmark_counts_the_same_tokens_for_all_and_a_plan_is_made(pair: tuple[str, str]) -> None:
    settings = replace(QUICK, batches=(1, 2), gammas=(2,), max_new_tokens=8, repetitions=1, temperatures=(0.0,))
    engine = slipstream.load(*pair, dtype="float32")
    report = measure(engine, SOURCES, settings)
    raced = {"slipstream plain", "slipstream speculative", "transformers generate"}
    assert {row.contender for row in report.rows} == raced
    assert all(row.matches_plain == row.matches_transformers == len(SOURCES) for row in report.rows)
    planning = PlanSettings(gammas=(1, 2), batches=(1,), max_new_tokens=8, repetitions=1)
    plan = make(engine, {"small": engine.decoder.drafter}, SOURCES, planning)
    assert plan.gammas.keys() == {1} and plan.texts == "prompts of 2 to 14 tokens + 8 new"
