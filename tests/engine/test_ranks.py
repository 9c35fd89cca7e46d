"""A target divided among two processes: texts and laws are those of one process, whatever comes and goes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Lfm2Config, Lfm2ForCausalLM, PreTrainedModel, T5GemmaConfig, T5GemmaForConditionalGeneration

import rank_work
from ranks import forked
from slipstream.models.tiny import tiny_config, tiny_model
from toys import FAMILIES, PROBED, plain_law, tiny, total_variation
from visions import save_llava


def saved(model: PreTrainedModel, folder: Path) -> str:
    model.save_pretrained(folder)
    return str(folder)


def pair(family: str, folder: Path, **changes: Any) -> dict[str, str]:
    kind = FAMILIES.get(family) or PROBED[family]
    names = enumerate(("target", "draft"))
    return {name: saved(tiny(kind, seed=seed, **changes), folder / name) for seed, name in names}


def on_two(work: str, settings: dict[str, Any]) -> dict[str, Any]:
    """What a piece of work gives on two ranks; the second says nothing at all."""
    leader, follower = forked(rank_work.main, work, json.dumps(settings))
    assert leader[0] == 0, leader[2]
    assert follower == (0, "", ""), follower
    found: dict[str, Any] = json.loads(leader[1])
    return found


def on_one(settings: dict[str, Any]) -> Any:
    return rank_work.loaded(settings)


def same_texts(settings: dict[str, Any], work: str = "texts") -> dict[str, Any]:
    """Compare the texts of calls on one and on two ranks -> what two give. At a difference of 1e-6 between their
    logits, a draw of these few hundred falls between the two with a chance below 1e-3, and seeds are fixed."""
    found = on_two(work, settings)
    want = rank_work.WORK[work](on_one(settings))
    for name, texts in want.items():
        assert found[name] == [list(text) for text in texts], name
    return found


def test_texts_on_two_ranks_are_those_of_one(tmp_path: Path) -> None:
    settings = pair("llama", tmp_path, vocab_size=102)  # transformers 5.20 divides even numbers only
    found = same_texts(settings, "few")
    assert found["greedy"] != found["coupled"]
    assert found["bytes_per_token"] == 128, "each rank keeps one of the two heads of keys and values of both layers"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("gemma3", {}),
        ("mixtral", {}),
        ("qwen3_moe", {}),
        ("phi3", {}),
    ],
)
def test_families_on_two_ranks(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    same_texts(pair(family, tmp_path, **changes))


@pytest.mark.slow
def test_failures_aborts_and_closed_streams_reach_all_ranks(tmp_path: Path) -> None:
    settings = pair("llama", tmp_path)
    found = on_two("disturbed", settings)
    want = rank_work.disturbed(on_one(settings))
    assert found["why"] == want["why"] == ["error", "abort"]
    assert found["beside"] == found["after"] == want["beside"] == want["after"]


SMALL = {"vocab_size": 3, "initializer_range": 0.5}


@pytest.mark.slow
def test_the_law_on_two_ranks_is_the_targets(tmp_path: Path) -> None:
    """Enumerated through all of the real code; one process and two differ by rounding, about 1e-6."""
    settings = pair("llama", tmp_path, **SMALL)
    target, draft = (tiny(FAMILIES["llama"], seed=seed, **SMALL) for seed in (0, 1))

    @torch.inference_mode()
    def step(model: Any, text: tuple[int, ...]) -> list[float]:
        chances: list[float] = model(torch.tensor([text])).logits[0, -1].double().softmax(-1).tolist()
        return chances

    found = {tuple(text): chance for text, chance in on_two("law", settings)["law"]}
    want = plain_law(lambda text: step(target, text), (0, 2), rank_work.LAW_TOKENS)
    assert total_variation(found, want) < 1e-5
    drafted = plain_law(lambda text: step(draft, text), (0, 2), rank_work.LAW_TOKENS)
    assert total_variation(found, drafted) > 0.05, "control: the draft's own law is another"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "sentence"),
    [
        ("gpt2", "has no plan for tensor parallelism in transformers"),
        ("lfm2", "(Lfm2ForCausalLM) gives other logits when its weights are divided by transformers' plan"),
        ("three heads", "has 3 heads of keys and values, which 2 ranks cannot divide: start 3 processes."),
    ],
)
def test_what_cannot_be_divided_is_refused_on_all_ranks(family: str, sentence: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 3}
    makers = {
        "gpt2": lambda: tiny(FAMILIES["gpt2"]),
        "lfm2": lambda: tiny_model(Lfm2ForCausalLM, tiny_config(Lfm2Config)),
        "three heads": lambda: tiny(FAMILIES["llama"], **sizes),
    }
    settings = {"target": saved(makers[family](), tmp_path / "target")}
    leader, follower = forked(rank_work.main, "nothing", json.dumps(settings))
    assert leader[0] == 1 and sentence in leader[2], leader
    assert follower == (0, "", ""), "rank 0 has said it"


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["exit:1", "int4", "window:8", "mtp", "eagle3:DIR"])
def test_drafts_of_the_targets_own_parts_are_refused(draft: str, tmp_path: Path) -> None:
    settings = {"target": saved(tiny(FAMILIES["llama"]), tmp_path / "target"), "draft": draft}
    leader, follower = forked(rank_work.main, "nothing", json.dumps(settings))
    assert leader[0] == 1 and "lies on 2 ranks, and drafts run on one of them" in leader[2], leader
    assert follower == (0, "", "")


@pytest.mark.slow
def test_trees_on_two_ranks_grow_as_on_one(tmp_path: Path) -> None:
    settings = {**pair("llama", tmp_path), "tree": [2, 1]}
    assert on_two("grown", settings)["grown"] == rank_work.grown(on_one(settings))["grown"]


@pytest.mark.slow
def test_images_on_two_ranks_are_read_as_on_one(tmp_path: Path) -> None:
    settings = {"target": str(save_llava(tmp_path / "llava")), "draft": "lookup"}
    found = on_two("seen", settings)["seen"]
    assert found == rank_work.seen(on_one(settings))["seen"] and found[0] != found[2]


@pytest.mark.slow
def test_an_encoder_decoder_with_a_plan_runs_on_two_ranks(tmp_path: Path) -> None:
    settings = {
        name: saved(tiny_model(T5GemmaForConditionalGeneration, tiny_config(T5GemmaConfig), seed), tmp_path / name)
        for seed, name in enumerate(("target", "draft"))
    }
    found = on_two("read", settings)
    assert found["read"] == rank_work.read(on_one(settings))["read"]
