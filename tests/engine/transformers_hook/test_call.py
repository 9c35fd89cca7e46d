"""Everything one may pass to `generate`, with the custom_generate hook and without: equal, or refused in a sentence."""

import inspect
import pickle
import random
from collections.abc import Callable
from copy import copy, deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinLengthLogitsProcessor,
    PreTrainedModel,
    StaticCache,
    StoppingCriteriaList,
    TopKLogitsWarper,
    WatermarkingConfig,
)
from transformers.generation import EosTokenCriteria

from slipstream.decoding.rules import BLOCK, COUPLED
from slipstream.engine.transformers_hook.custom_generate import CustomGenerate, custom_generate
from slipstream.execution.names import CACHE, state_in, with_cache
from toys import FAMILIES, HF_VOCAB, rare, tiny
from toys.hooked import BATCH, PAD, padded, pair, tokenizer

SETTINGS: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False}


def hook(family: str = "llama", gamma: int = 4) -> CustomGenerate:
    return custom_generate(pair(family)[1], gamma)


def both(family: str, **kwargs: Any) -> tuple[Any, Any]:
    """What generate returns without and with the hook; what is given as a function is made anew for each."""
    speculate, made = hook(family), []
    for way in ({}, {"custom_generate": speculate}):
        arguments = {name: value() if name in MADE else value for name, value in kwargs.items()}
        made.append(pair(family)[0].generate(**arguments, **way))
    assert speculate.stats.emitted
    return made[0], made[1]


MADE = {CACHE}  # arguments that generate changes


# ---- the tokenizer: stop strings and token healing --------------------------------------------------------------


def prompts(rng: random.Random, rows: int) -> Tensor:
    width = rng.randrange(2, 7)
    pads = [rng.randrange(width) for _ in range(rows)]
    return torch.tensor([[PAD] * pad + [rng.randrange(1, HF_VOCAB) for _ in range(width - pad)] for pad in pads])


@pytest.mark.parametrize("eos", [None, *rare(100)])
def test_stop_strings_with_their_tokenizer(eos: int | None) -> None:
    """Over many prompts; strings begin and end inside tokens, and where a round of a perfect draft is half done."""
    model, rng = pair()[0], random.Random(0)
    noisy, perfect = hook(), custom_generate(model, 6)
    widths = set()
    for trial in range(12):
        batch = padded(prompts(rng, rng.choice([1, 3])))
        plain = model.generate(**batch, **SETTINGS)[:, batch["input_ids"].shape[1] :]
        texts = ["".join(tokenizer().convert_ids_to_tokens(row.tolist())) for row in plain]
        starts = [rng.randrange(2, len(text) - 4) for text in texts]
        stops = [text[start : start + rng.randrange(1, 5)] for text, start in zip(texts, starts, strict=True)]
        asked = {**batch, **SETTINGS, "stop_strings": stops, "tokenizer": tokenizer(), "eos_token_id": eos}
        expected = model.generate(**asked)
        ours = model.generate(**asked, custom_generate=[noisy, perfect][trial % 2])
        assert torch.equal(expected, ours)
        widths.add(ours.shape[1] - batch["input_ids"].shape[1])
    assert len(widths) > 4 and min(widths) < 6  # most ended early


def test_signatures_can_be_asked_for_at_any_time() -> None:
    assert "tokenizer" in inspect.signature(hook()).parameters
    assert list(inspect.signature(CustomGenerate).parameters) == ["draft", "controller", "rule", "seed"]


def test_stop_strings_need_their_tokenizer() -> None:
    with pytest.raises(ValueError, match="tokenizer"):
        pair()[0].generate(**padded(), **SETTINGS, stop_strings=["a"], custom_generate=hook())


@pytest.mark.parametrize("text", ["abcab", "jja", "c"])
def test_token_healing(text: str) -> None:
    """The last token is one letter, which many tokens begin with."""
    ids = torch.tensor([[*tokenizer().convert_tokens_to_ids(list(text))]])
    healed = {"tokenizer": tokenizer(), "token_healing": True, "pad_token_id": PAD}
    expected, ours = both("llama", inputs=ids, **SETTINGS, **healed)
    assert torch.equal(expected, ours)
    expected, ours = both("llama", inputs=ids, **SETTINGS, **healed, return_dict_in_generate=True)
    assert torch.equal(expected.sequences, ours.sequences)


def test_token_healing_that_shortens_what_has_learned_positions() -> None:
    ids = torch.tensor([tokenizer().convert_tokens_to_ids(list("abcab"))])
    healed = {"tokenizer": tokenizer(), "token_healing": True, "pad_token_id": PAD}
    with pytest.raises(ValueError, match=r"it made 3 tokens of 5, .* so heal before"):
        pair("gpt2")[0].generate(ids, **SETTINGS, **healed, custom_generate=hook("gpt2"))
    expected, ours = both("gpt2", inputs=pair("gpt2")[0].heal_tokens(ids, tokenizer()), **SETTINGS)
    assert torch.equal(expected, ours)


def test_token_healing_of_a_batch() -> None:
    batch = tokenizer()(["abcdefg", "ghiabcj"], return_tensors="pt")
    healed = {"tokenizer": tokenizer(), "token_healing": True, "pad_token_id": PAD}
    expected, ours = both("llama", input_ids=batch.input_ids, **SETTINGS, **healed)
    assert torch.equal(expected, ours)


# ---- embeddings -------------------------------------------------------------------------------------------------


def embedded(family: str, ids: Tensor = BATCH) -> dict[str, Any]:
    table = pair(family)[0].get_input_embeddings()
    return {"inputs_embeds": table(ids).detach(), "attention_mask": (ids != PAD).long(), "pad_token_id": PAD}


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "gemma3"])
def test_embeddings(family: str) -> None:
    expected, ours = both(family, **embedded(family), **SETTINGS)
    assert torch.equal(expected, ours) and ours.shape == (4, 10)
    assert torch.equal(ours, pair(family)[0].generate(**padded(), **SETTINGS)[:, 5:])


def test_embeddings_that_are_no_tokens() -> None:
    """And the draft reads the nearest ones."""
    prompt = embedded("llama")
    prompt["inputs_embeds"] = prompt["inputs_embeds"] + 0.3 * torch.randn(prompt["inputs_embeds"].shape)
    expected, ours = both("llama", **prompt, **SETTINGS)
    assert torch.equal(expected, ours)
    exact = custom_generate(pair()[0], 4)
    pair()[0].generate(**embedded("llama"), **SETTINGS, custom_generate=exact)
    assert exact.stats.accepted == exact.stats.drafted  # a perfect draft reads what the target does


@pytest.mark.parametrize("count", [1, 3, 5])
def test_embeddings_with_the_ids_to_return(count: int) -> None:
    shown = {"input_ids": BATCH[:, :count] + 1, "no_repeat_ngram_size": 2, "repetition_penalty": 1.5}
    expected, ours = both("llama", **embedded("llama"), **shown, **SETTINGS)
    assert torch.equal(expected, ours) and torch.equal(ours[:, :count], shown["input_ids"])


@pytest.mark.filterwarnings("ignore:Passing `repetition_penalty`")
@pytest.mark.parametrize("setting", [{"repetition_penalty": 1.7}, {"min_new_tokens": 6, "eos_token_id": [5, 9, 77]}])
def test_processors_see_what_was_emitted_after_embeddings(setting: dict[str, Any]) -> None:
    expected, ours = both("llama", **embedded("llama"), **SETTINGS, **setting)
    assert torch.equal(expected, ours)


# ---- caches -----------------------------------------------------------------------------------------------------


def filled(family: str, ids: Tensor, kind: Callable[[PreTrainedModel], Any]) -> Any:
    """A cache that holds a left-padded batch."""
    model, cache, mask = pair(family)[0], kind(pair(family)[0]), (ids != PAD).long()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        with_cache(model)(cache, input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True)
    return cache


CACHES: dict[str, Callable[[PreTrainedModel], Any]] = {
    "dynamic": lambda _: DynamicCache(),
    "dynamic with windows": lambda model: DynamicCache(config=model.config),
    "static": lambda model: StaticCache(model.config, max_cache_len=64),
}


def same_states(one: Any, other: Any, last: int) -> None:
    length = int(one.get_seq_length())
    assert int(other.get_seq_length()) == length
    for left, right in zip(one.layers, other.layers, strict=True):
        for expected, ours in ((left.keys, right.keys), (left.values, right.values)):
            assert expected.shape == ours.shape
            expected, ours = (states[:, :, :length][:, :, -last:] for states in (expected, ours))
            torch.testing.assert_close(expected, ours, atol=2e-5, rtol=1e-3)


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "gemma3"])
@pytest.mark.parametrize("whole", [True, False])
def test_a_filled_cache_goes_on(family: str, kind: str, whole: bool) -> None:
    """Whether the prompt repeats what the cache holds, or only the mask counts it; and it grows as generate's does."""
    text = torch.cat([BATCH, torch.randint(1, HF_VOCAB, (4, 7))], 1)
    caches = [filled(family, text[:, :8], CACHES[kind]) for _ in range(2)]
    order = iter(caches)
    asked = {**padded(text), "input_ids": text if whole else text[:, 8:], CACHE: lambda: next(order)}
    expected, ours = both(family, **asked, **SETTINGS)
    assert torch.equal(expected, ours)
    same_states(*caches, last=1 if "static" in kind else 64)
    fresh = pair(family)[0].generate(**padded(text), **SETTINGS)
    assert torch.equal(fresh[:, 12:], ours[:, -10:])


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("eos", [None, 100])
def test_chats_of_three_turns(kind: str, eos: int | None) -> None:
    """One cache all along: each turn adds the answer and new words, and rows may end early."""
    model, speculate = pair()[0], hook()
    ends = {"eos_token_id": eos} if eos is None else {"eos_token_id": list(range(40, 60))}
    turns: list[list[list[int]]] = []
    for way in ({}, {"custom_generate": speculate}):
        ids, held = BATCH[2:3], CACHES[kind](model)
        turns.append([])
        for turn in range(3):
            ids = model.generate(ids, **{CACHE: held}, max_new_tokens=9, pad_token_id=PAD, **ends, **way)
            turns[-1].append(ids[0].tolist())
            ids = torch.cat([ids, torch.tensor([[11 + turn, 7]])], 1)
    assert turns[0] == turns[1]


@pytest.mark.parametrize("settings", [{}, {"cache_implementation": "static"}, {"prefill_chunk_size": 2}])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_cache_that_is_returned(family: str, settings: dict[str, Any]) -> None:
    expected, ours = both(family, **padded(), **SETTINGS, **settings, return_dict_in_generate=True)
    assert torch.equal(expected.sequences, ours.sequences)
    same_states(state_in(expected), state_in(ours), last=64)
    without = pair(family)[0].generate(
        **padded(), **SETTINGS, return_dict_in_generate=True, use_cache=False, custom_generate=hook(family)
    )
    assert state_in(without) is None and torch.equal(without.sequences, ours.sequences)


def test_rows_that_have_ended_are_padded_in_the_cache() -> None:
    """And rows without an EOS token run on together, from the cache."""
    ends = [int(pair()[0].generate(**padded(), **SETTINGS)[row, 7 + row]) for row in range(3)]
    for ending in ({"eos_token_id": ends}, {"stop_strings": ["ab", "c", "gh"], "tokenizer": tokenizer()}):
        wanted = {"return_dict_in_generate": True, "output_scores": True}
        expected, ours = both("llama", **padded(), **SETTINGS, **ending, **wanted)
        assert torch.equal(expected.sequences, ours.sequences)
        same_states(state_in(expected), state_in(ours), last=64)
        expected, ours = both("llama", **embedded("llama"), **SETTINGS, **ending)
        assert torch.equal(expected, ours)


def test_a_sampled_continuation_does_not_depend_on_the_cache() -> None:
    """The same seed gives the same text from a cache as from the tokens."""
    sampled = {**padded(), "do_sample": True, "top_k": 8, "max_new_tokens": 8}
    speculate = custom_generate(pair()[1], 4, seed=5)
    fresh = pair()[0].generate(**sampled, custom_generate=speculate)
    held = filled("llama", BATCH[:, :3], CACHES["dynamic"])
    assert torch.equal(fresh, pair()[0].generate(**sampled, **{CACHE: held}, custom_generate=speculate))


# ---- everything else --------------------------------------------------------------------------------------------


def allowed(row: int, text: Tensor) -> list[int]:
    return [1 + (int(text[-1]) * 7 + 10 * row + i) % (HF_VOCAB - 1) for i in range(6)]


class Words(LogitsProcessor):
    """Forbids the last token's neighbours, in place."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        rows = torch.arange(len(input_ids))
        for step in range(4):
            scores[rows, (input_ids[:, -1] + step) % HF_VOCAB] = -float("inf")
        return scores


ENDS = list(range(30, 50))
ALL = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
COMBINATIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "numbers": {"max_new_tokens": 1},
    "max_length": {"max_new_tokens": None, "max_length": 12},
    "min_length": {"min_length": 10, "eos_token_id": ENDS},
    "min_new_tokens": {"min_new_tokens": 9, "eos_token_id": ENDS},
    "one end": {"eos_token_id": 77},
    "ends": {"eos_token_id": ENDS},
    "ends as a tensor": {"eos_token_id": torch.tensor(ENDS)},
    "pad is an end": {"eos_token_id": ENDS, "pad_token_id": ENDS[0]},
    "no cache": {"use_cache": False},
    "static": {"cache_implementation": "static"},
    "dynamic": {"cache_implementation": "dynamic"},
    "an empty cache": {CACHE: lambda: DynamicCache()},
    "chunks": {"prefill_chunk_size": 2},
    "suppressed": {"suppress_tokens": list(range(0, 90, 2))},
    "suppressed first": {"begin_suppress_tokens": list(range(0, 90, 2))},
    "forced first": {"forced_bos_token_id": 7},
    "forced last": {"forced_eos_token_id": 77},
    "forced last of many": {"forced_eos_token_id": [77, 78], "eos_token_id": ENDS},
    "pairs": {"no_repeat_ngram_size": 2},
    "prompt n-grams": {"encoder_no_repeat_ngram_size": 1},
    "repetition": {"repetition_penalty": 1.8},
    "prompt repetition": {"encoder_repetition_penalty": 1.8},
    "bias": {"sequence_bias": [[[5], 4.0], [[9, 17], 30.0]]},
    "bad words": {"bad_words_ids": [[token] for token in range(0, 80, 3)]},
    "long bad words": {"bad_words_ids": [[token, other] for token in range(40) for other in range(0, 100, 2)]},
    "decay": {"exponential_decay_length_penalty": (3, 1.4), "eos_token_id": 77},
    "renormalized": {"renormalize_logits": True, **ALL},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=3.0, seeding_scheme="selfhash")},
    "watermark by the left": {"watermarking_config": WatermarkingConfig(greenlist_ratio=0.4)},
    "constraints": {"prefix_allowed_tokens_fn": allowed},
    "scores": {"return_dict_in_generate": True, "output_scores": True},
    "all records": {**ALL, "repetition_penalty": 1.4},
    "records of ended rows": {**ALL, "eos_token_id": 77},
    "scores without a record": {"output_scores": True},
    "record": {"return_dict_in_generate": True},
    "config": {"generation_config": GenerationConfig(max_new_tokens=7, repetition_penalty=1.3, pad_token_id=PAD)},
    "config and more": {"generation_config": GenerationConfig(max_length=30), "no_repeat_ngram_size": 2},
    "processor": {"logits_processor": LogitsProcessorList([Words()])},
    "processor list": {"logits_processor": [Words(), MinLengthLogitsProcessor(12, [5, 77])]},
    "warper": {"logits_processor": [TopKLogitsWarper(3)], **ALL},
    "criterion": {"stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(11)])},
    "criterion list": {"stopping_criteria": [EosTokenCriteria(ENDS)]},
    "no time": {"max_time": 1e-9},
    "strings": {"stop_strings": ["ab", "cd", "e"], "tokenizer": tokenizer()},
    "a string": {"stop_strings": "f", "tokenizer": tokenizer(), "eos_token_id": ENDS},
    "seed of none": {"num_beams": 1, "temperature": 1.0, "top_p": 1.0, "top_k": 50},
    "what changes nothing": {
        "logits_to_keep": 1,
        "synced_gpus": False,
        "disable_compile": True,
        "guidance_scale": 1.0,
        "trust_remote_code": False,
        "remove_invalid_values": True,
        "max_time": 1000.0,
        "num_return_sequences": 1,
        "tokenizer": tokenizer(),
    },
    "positions": {"position_ids": ((BATCH != PAD).cumsum(1) - 1).clamp(min=0)},
    "a mask of booleans": {"attention_mask": BATCH != PAD},
    "a mask of numbers": {"attention_mask": (BATCH != PAD).float()},
    "greedy by k": {"do_sample": True, "top_k": 1},
    "greedy by p": {"do_sample": True, "top_p": 1e-6, **ALL},
    "greedy by min_p": {"do_sample": True, "min_p": 1.0},
    "greedy by typical": {"do_sample": True, "typical_p": 1e-6, "top_k": 1},
    "greedy by epsilon": {"do_sample": True, "epsilon_cutoff": 0.9},
    "greedy by eta": {"do_sample": True, "eta_cutoff": 0.9, "top_k": 1},
    "greedy by h": {"do_sample": True, "top_h": 1e-6, "top_k": 1},
    "sequences of a sample": {"do_sample": True, "top_k": 1, "num_return_sequences": 3, **ALL},
    "a cache of a sample": {"do_sample": True, "top_k": 1, "num_return_sequences": 2, "cache_implementation": "static"},
}


@pytest.mark.parametrize("name", COMBINATIONS)
@pytest.mark.parametrize("rows", [slice(0, 4), pytest.param(slice(2, 3), marks=pytest.mark.slow)], ids=["batch", "row"])
def test_arguments(name: str, rows: slice) -> None:
    """Equal token by token; what is recorded is as close as one pass over several tokens is to several passes."""
    arguments = {**padded(), **SETTINGS, **COMBINATIONS[name]}
    arguments = {each: value[rows] if each in ROWWISE else value for each, value in arguments.items()}
    if "config" in name:
        arguments.pop("max_new_tokens")
    expected, ours = both("llama", **arguments)
    assert type(expected) is type(ours)
    if isinstance(expected, Tensor):
        assert torch.equal(expected, ours)
        return
    assert torch.equal(expected.sequences, ours.sequences)
    assert set(expected) == set(ours)
    for record in ("scores", "logits"):
        assert (expected.get(record) is None) == (ours.get(record) is None)
        for step, (one, other) in enumerate(zip(expected.get(record) or [], ours.get(record) or [], strict=True)):
            runs = [PAD not in row[:step].tolist() for row in expected.sequences[:, BATCH.shape[1] :]]
            torch.testing.assert_close(one[runs], other[runs], atol=2e-5, rtol=1e-3)


ROWWISE = {"input_ids", "attention_mask", "position_ids"}


# ---- copies -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("remake", [copy, deepcopy, lambda made: pickle.loads(pickle.dumps(made))])
def test_callables_can_be_copied(remake: Callable[[Any], Any], tmp_path: Path) -> None:
    model, draft = pair()
    draft.save_pretrained(tmp_path)
    sampled = {**padded(), "do_sample": True, "max_new_tokens": 8}
    for source in (draft, tmp_path):
        for verifier in (BLOCK, COUPLED):
            made = custom_generate(source, 3, verifier=verifier, seed=3)
            expected = model.generate(**sampled, custom_generate=made)
            again = remake(made)
            assert again is not made and again.stats == made.stats
            assert torch.equal(model.generate(**sampled, custom_generate=again), expected)
            assert len(pickle.dumps(custom_generate(tmp_path))) < 2000  # no weights


def test_two_models_in_turn_and_one_that_changes() -> None:
    speculate, models = hook(), [pair()[0], tiny(FAMILIES["llama"], seed=5)]
    for model in (*models, *models):
        assert torch.equal(
            model.generate(**padded(), **SETTINGS), model.generate(**padded(), **SETTINGS, custom_generate=speculate)
        )
    model = deepcopy(models[1])
    model.generate(**padded(), **SETTINGS, custom_generate=speculate)
    model.to(torch.float64)
    expected = model.generate(**padded(), **SETTINGS)
    assert torch.equal(expected, model.generate(**padded(), **SETTINGS, custom_generate=speculate))
