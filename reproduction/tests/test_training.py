"""Stand-ins for the paper's models: corpora, growth, training that can be interrupted, and families in folders."""

import copy
import gzip
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, T5ForConditionalGeneration

from reproduction.standins import build as families
from reproduction.standins import corpora
from reproduction.standins import models as standins
from reproduction.standins.build import Recipe
from reproduction.standins.corpora import Pairs
from reproduction.standins.models import EOS, PAD, SPECIAL, Size
from reproduction.standins.training import Example, Exercise, Plan, train, with_laws
from slipstream.execution.names import CACHE

SMALL = Size(16, 2, 8, 24, 1, 2)  # a decoder deeper than its encoder, as the stand-ins are
WORDS = ["a", "man", "and", "a", "dog", "run", "in", "the", "park", "while", "it", "rains", "on", "them"]


def sentences(count: int) -> list[tuple[str, str]]:
    """Sources and what they become."""
    texts = [" ".join(WORDS[start % 5 : start % 5 + 3 + start % 6]) for start in range(count)]
    return [(text, text.upper()) for text in texts]


PAIRS = Pairs("translation", tuple(sentences(24)), tuple(sentences(4)))
EXAMPLES = [Example(tuple(range(2, 6 + n % 3)), (*range(3, 5 + n % 4), 1)) for n in range(12)]
PLAN = Plan(4.0, batch=4, warm=2, seed=3)


def aligned(folder: Path, pairs: Pairs = PAIRS, zipped: bool = False) -> Path:
    """Files as Multi30k's."""
    folder.mkdir(exist_ok=True)
    for part, lines in (("train", pairs.train), ("test", pairs.held_out)):
        for place, language in enumerate(("en", "de")):
            text = "".join(f"{pair[place]}\n" for pair in lines).encode()
            name = folder / f"x.{part}.{language}"
            name.with_name(name.name + ".gz" * zipped).write_bytes(gzip.compress(text) if zipped else text)
    return folder


# ---- corpora ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zipped", [False, True])
def test_aligned_files(tmp_path: Path, zipped: bool) -> None:
    assert corpora.translation(str(aligned(tmp_path / "pairs", zipped=zipped))) == PAIRS


def test_files_that_are_not_aligned(tmp_path: Path) -> None:
    folder = aligned(tmp_path / "pairs")
    (folder / "x.train.de").write_text("one line\n")
    with pytest.raises(ValueError, match=r"24 lines in 'en' and 1 in 'de'"):
        corpora.translation(str(folder))
    with pytest.raises(ValueError, match="there is no file"):
        corpora.translation(str(tmp_path))


def test_documents_are_joined_sentences_of_both_sides() -> None:
    numbered = Pairs("translation", tuple((f"s{n}", f"t{n}") for n in range(20)), tuple(sentences(6)))
    made = corpora.documents(numbered, shuffles=2)
    lengths = [len(source.split()) for source, _ in made.train]
    assert lengths == [1, 2, 3, 4, 1, 2, 3, 4] * 2
    for start in (0, 8):  # every sentence once in each order
        words = [word for source, _ in made.train[start : start + 8] for word in source.split()]
        assert sorted(words) == sorted(source for source, _ in numbered.train)
    assert all(target == source.replace("s", "t") for source, target in made.train)
    assert made.held_out[0] == tuple(" ".join(side) for side in zip(*sentences(4), strict=True))
    assert len(made.held_out) == 2 and made.held_out[1][0] == " ".join(source for source, _ in sentences(6)[4:])
    assert made == corpora.documents(numbered, shuffles=2)


def article(number: int) -> str:
    return " ".join(f"Sentence {number} of part {part} says a little more than that." for part in range(30))


def test_leads_are_first_sentences(tmp_path: Path) -> None:
    file = tmp_path / "news.json"
    file.write_text(json.dumps([{"article": article(number)} for number in range(6)]))
    pairs = corpora.leads(str(file), [], held_out=2)
    assert pairs.train and all(source.startswith(lead) for source, lead in (*pairs.train, *pairs.held_out))
    assert {source.split()[1] for source, _ in pairs.train} == {"0", "1", "2", "3"}
    assert {source.split()[1] for source, _ in pairs.held_out} == {"4", "5"}
    assert [source.split()[4] for source, _ in pairs.held_out[:2]] == ["0", "0"]  # beginnings of articles first
    assert pairs == corpora.leads(str(file), [], held_out=2)
    with pytest.raises(ValueError, match="give more"):
        corpora.leads(str(file), [], held_out=6)
    file.write_text("[1]")
    with pytest.raises(ValueError, match="no JSON list"):
        corpora.leads(str(file), [])


def test_datasets_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None]] = []

    def read(sources: list[str], field: str | None) -> Iterator[tuple[str, str]]:
        asked.append((sources[0], field))
        part = PAIRS.train if sources[0].endswith(":train") else PAIRS.held_out
        texts = [article(number) for number in range(60)] if field == "article" else [p[field == "de"] for p in part]
        yield from (("row", text) for text in texts)

    monkeypatch.setattr(corpora, "read", read)
    assert corpora.translation("dataset:some/pairs") == PAIRS
    assert asked[:2] == [("dataset:some/pairs:train", "en"), ("dataset:some/pairs:train", "de")]
    news = corpora.leads("dataset:some/news:3.0.0:test", [])
    assert asked[-1] == ("dataset:some/news:3.0.0:test", "article") and news.train and news.held_out


def test_pairs_can_be_cut() -> None:
    assert len(PAIRS.first(3).train) == 3 and PAIRS.first(None) == PAIRS


# ---- models -----------------------------------------------------------------------------------------------------


def logits(model: T5ForConditionalGeneration) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.tensor([[3, 4, 1]]), decoder_input_ids=torch.tensor([[0, 5, 6]])).logits


def test_growth_keeps_the_function_and_lets_everything_learn() -> None:
    model = standins.new_model(SMALL, 20)
    wide = standins.grown(model, 64)
    assert torch.allclose(logits(model), logits(wide), atol=1e-5)
    assert standins.parameters(wide) > standins.parameters(model)
    wide(input_ids=torch.tensor([[3, 4, 1]]), labels=torch.tensor([[5, 6, 1]])).loss.backward()
    gate = next(weight for name, weight in wide.named_parameters() if name.endswith("wo.weight"))
    assert gate.grad is not None and gate.grad[:, SMALL.inner :].abs().sum() > 0
    with torch.no_grad():
        gate[:, SMALL.inner :] += 1.0  # the control: new units with an output change the function
    assert not torch.allclose(logits(model), logits(wide), atol=1e-5)


def weights(model: T5ForConditionalGeneration) -> dict[str, torch.Tensor]:
    return model.state_dict()


def learned(file: Path, plan: Plan = PLAN, stop: int | None = None) -> T5ForConditionalGeneration:
    """A model after its training, or after an interruption."""

    def watch(step: int, steps: int, loss: float) -> None:
        if step == stop:
            raise KeyboardInterrupt

    model = standins.new_model(SMALL, 20)
    train(model, EXAMPLES, plan, file, watch)
    return model


def test_an_interrupted_training_ends_with_the_same_weights(tmp_path: Path) -> None:
    whole = learned(tmp_path / "whole.safetensors")
    with pytest.raises(KeyboardInterrupt):
        learned(tmp_path / "cut.safetensors", stop=5)
    again = learned(tmp_path / "cut.safetensors")
    assert all(torch.equal(weights(whole)[name], weights(again)[name]) for name in weights(whole))
    other = learned(tmp_path / "other.safetensors", replace(PLAN, seed=4))
    assert any(not torch.equal(weights(whole)[name], weights(other)[name]) for name in weights(whole))
    with pytest.raises(ValueError, match="another rate"):
        learned(tmp_path / "cut.safetensors", replace(PLAN, rate=0.5))


def test_an_exercise_copies_all_of_a_source_or_a_part_of_it() -> None:
    whole = Exercise("copying", 50, 8, PLAN)
    examples = whole.examples(20)
    assert all(example.source == example.target and example.source[-1] == EOS for example in examples)
    assert {len(example.source) for example in examples} == {5, 6, 7, 8, 9}
    assert {token for example in examples for token in example.source[:-1]} == set(range(SPECIAL, 20))
    assert examples == whole.examples(20) != whole.examples(20, seed=1)
    starts = set[int]()
    for example in Exercise("finding", 50, 30, PLAN, part=10).examples(10_000):
        source, part = example.source, example.target
        assert 6 <= len(part) <= 10
        starts.add(next(start for start in range(len(source)) if source[start : start + len(part)] == part))
    assert len(starts) > 5, "parts begin anywhere"


def test_answers_are_what_the_model_says(tmp_path: Path) -> None:
    """As transformers says it greedily, and not always the same if it is sampled."""
    torch.manual_seed(0)
    model = standins.new_model(SMALL, 50)
    tokenizer = standins.new_tokenizer(WORDS, 300)
    standins.save(model, tokenizer, tmp_path / "target")
    sources, said = [(3, 4, 1), (5, 1), (6, 7, 8, 1)], list[str]()
    found = families.answers(tmp_path / "target", sources, 0.0, 6, said.append)
    assert said[-1] == "answers at temperature 0: 3 of 3"
    loaded = T5ForConditionalGeneration.from_pretrained(tmp_path / "target", dtype=torch.bfloat16)
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())  # `generate` would make one as deep as the encoder
    for source, tokens in zip(sources, found, strict=True):
        expected = loaded.generate(torch.tensor([source]), **{CACHE: copy.deepcopy(cache)}, max_new_tokens=6)
        assert list(tokens) == expected[0, 1:].tolist()
    drawn = families.answers(tmp_path / "target", [sources[0]] * 20, 1.0, 6)
    assert len(set(drawn)) > 10


def test_answers_have_the_laws_by_which_they_are_said() -> None:
    model = standins.new_model(SMALL, 50)
    sources, texts = [(3, 4, 1), (5, 1), (6, 7, 8, 1)], [(9, 8, 7, 1), (1,), (4, 4)]
    found = with_laws(model, sources, texts, batch=2)
    assert [(example.source, example.target) for example in found] == list(zip(sources, texts, strict=True))
    for example in found:
        assert example.laws is not None
        tokens, shares = example.laws
        begun = torch.tensor([[0, *example.target[:-1]]])
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=torch.tensor([example.source]), decoder_input_ids=begun).logits[0].float()
        for place, law in enumerate(logits.softmax(-1)):
            torch.testing.assert_close(law[tokens[place].long()], shares[place].float(), rtol=0.02, atol=0.005)
        assert tokens.shape == shares.shape == (len(example.target), 32)


def test_crossed_texts_go_on_as_another_from_a_word_of_both() -> None:
    texts = ["a man in a red hat", "two dogs run in the wet grass", "too short a text"]
    found = corpora.crossed(texts, 50)
    assert len(found) == 50 and set(found) == {
        *("a man in a red hat", "two dogs run in the wet grass"),
        *("a man in the wet grass", "two dogs run in a red hat"),
    }
    assert found == corpora.crossed(texts, 50) != corpora.crossed(texts, 50, seed=1)
    assert corpora.crossed(["too short"], 3) == []


RECIPE = Recipe(
    *(300, Plan(1.0, batch=8, warm=2), Plan(0.5, batch=8, warm=2, seed=1), 40, SMALL),
    {"small": (Size(8, 1, 8, 8, 1, 1), Plan(1.0, batch=8, warm=2))},
    8,
    crossed=10,
    answered={0.0: slice(5, 20), 1.0: slice(20, 34)},
)


@pytest.mark.slow
def test_models_of_a_task_that_repeats_its_source_copy_first(tmp_path: Path) -> None:
    """Target and drafts; and what was learned is not learned again."""
    plan, said = Plan(0.1, batch=8, warm=2), list[str]()
    exercises = Exercise("copying", 40, 8, plan), Exercise("finding far", 40, 20, plan, part=8)
    recipe = replace(RECIPE, exercises=exercises, dropout=0.0)
    families.make(PAIRS, tmp_path / "family", recipe, said.append)
    begun = [text.partition(":")[0] for text in said]
    assert list(dict.fromkeys(begun)) == [
        *("target, copying", "target, finding far", "target", "grown target", "small, copying", "small, finding far"),
        *("answers at temperature 0", "answers at temperature 1", "laws of answers", "small"),
    ]
    said.clear()
    shutil.rmtree(tmp_path / "family" / "small")
    families.make(PAIRS, tmp_path / "family", recipe, said.append)
    assert said == []


def test_a_family_is_made_once_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    said: list[str] = []

    def stop(text: str) -> None:
        said.append(text)
        if text.startswith("answers"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        families.make(PAIRS, tmp_path / "family", RECIPE, stop)
    assert not families.complete(tmp_path / "family", RECIPE)
    said.clear()
    families.make(PAIRS, tmp_path / "family", RECIPE, said.append)
    assert families.complete(tmp_path / "family", RECIPE)
    assert not any(text.startswith(("target", "grown")) for text in said)  # these were done
    said.clear()
    families.make(PAIRS, tmp_path / "family", RECIPE, said.append)
    assert said == []
    with pytest.raises(ValueError, match="learned from other pairs"):
        families.make(replace(PAIRS, train=PAIRS.train[1:]), tmp_path / "family", RECIPE, said.append)
    model = T5ForConditionalGeneration.from_pretrained(tmp_path / "family" / "target")
    assert model.config.d_ff == 40 and model.config.decoder_start_token_id == PAD
