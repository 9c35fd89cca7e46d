"""One contract for every family of Hugging Face models: with ragged rows, wrong drafts and rollbacks, the logits are
those of a fresh forward of each text alone, without cache. Tiny random models, with windows smaller than the texts.
"""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, PreTrainedModel

import slipstream
from reference import TOLERANCE, Reference, contract, drafts_change_nothing, families, rounding, text
from slipstream.cache.rows import RowCache
from slipstream.core.draft import Tree
from slipstream.core.protocols import Shape
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.generate import plain
from slipstream.execution.passes import Mode, Sight
from slipstream.models import causal as models
from slipstream.models import families as facts
from slipstream.models.causal import CausalScorer
from slipstream.models.families import PROVEN, is_proven
from slipstream.models.loading.load import find_tokenizer, load_model, load_scorer, load_tokenizer
from toys import BART, FAMILIES, GPT, GREEDY, HF_VOCAB, LLAMA, PROBED, SEQ2SEQ, WINDOW, Family, rare, request, tiny

EVERY = {**FAMILIES, **PROBED}
SHOWN = ("llama", "mistral", "gemma3", "gpt2", "opt", "falcon_new", "llama4", "gpt_oss")
SOME = [*SHOWN, *rare(*(family for family in EVERY if family not in SHOWN))]
"""Each kind of positions and masks; the others go the same ways."""

pytestmark = pytest.mark.filterwarnings("ignore:.*RoPE.*")


def quiet_generate(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """Greedy decoding by transformers, of one text alone."""
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "max_new_tokens": count, "pad_token_id": 0, "eos_token_id": None}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", EVERY)
def test_logits_are_those_of_a_fresh_forward(family: str) -> None:
    model = tiny(EVERY[family])
    assert is_proven(model) == (family in FAMILIES)
    assert contract(model) < TOLERANCE


def test_the_text_part_of_a_model_with_vision_obeys_the_contract() -> None:
    """What `AutoModelForCausalLM` makes of Gemma 3 from 4B on; its text part has a proven type."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    family = FAMILIES["gemma3"]
    base = {"text_config": {**family.base, **family.changes}, "mm_tokens_per_image": 4}
    model = tiny(Family("Gemma3Config", {**base, "vision_config": {**sizes, "image_size": 28, "patch_size": 14}}, {}))
    assert isinstance(model, transformers.Gemma3ForConditionalGeneration)
    assert contract(model) < TOLERANCE


def test_every_proven_class_is_in_the_contract() -> None:
    classes = {type(tiny(family)).__name__ for family in (*FAMILIES.values(), *SEQ2SEQ.values())}
    assert classes | {"Gemma3ForConditionalGeneration"} == PROVEN  # which has a test of its own


@pytest.mark.parametrize("kind", ["BartForCausalLM", "MBartForCausalLM", "MarianForCausalLM", "PegasusForCausalLM"])
def test_the_decoder_of_a_proven_encoder_decoder_is_tried_by_itself(kind: str) -> None:
    """Another class of the same configuration; these count positions from the longest row."""
    config = getattr(transformers, f"{kind.removesuffix('ForCausalLM')}Config")(**{**BART, "is_encoder_decoder": False})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    assert type(model).__name__ == kind
    assert not is_proven(model)
    with pytest.raises(ValueError, match="other logits"):
        CausalScorer(model, "toy")


def test_a_class_of_others_with_a_proven_name_is_tried() -> None:
    """With its cache in floats: one in 8 bits would give other logits than the model's own."""
    kind = type("LlamaForCausalLM", (transformers.LlamaForCausalLM,), {})
    assert not is_proven(model := kind(transformers.LlamaConfig(**LLAMA)).eval())
    assert load_scorer(model, mode=Mode(packed=True, kv_dtype="int8")).way == "length"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_in_half_precision(dtype: torch.dtype) -> None:
    """Shapes of matrices differ between the two ways, and so does the rounding."""
    model = tiny(FAMILIES["llama"], dtype=dtype)
    assert contract(model) < rounding(model)


@pytest.mark.parametrize("family", ["mistral", "gemma3", "gpt_oss", "llama4"])
def test_control_a_forgotten_window_is_caught(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The texts are long enough for windows and chunks to matter."""
    rules = facts.mask_kinds
    monkeypatch.setattr(facts, "mask_kinds", lambda config: dict.fromkeys(rules(config), Sight()))
    monkeypatch.setattr(models, "probe", lambda scorer, kind: None)
    assert contract(tiny(EVERY[family])) > 100 * TOLERANCE


def test_control_a_rollback_that_does_nothing_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Reference(tiny(FAMILIES["llama"])).add(5, 9)
    monkeypatch.setattr(rows.scorer, "rollback", lambda lengths: None)
    with pytest.raises(AssertionError):
        assert rows.step(2, 2).gap() < TOLERANCE


@pytest.mark.parametrize("family", EVERY)
def test_greedy_text_is_that_of_transformers(family: str) -> None:
    """Three ragged prompts together against each alone. The draft is the target, wrong in every other round."""
    model = tiny(EVERY[family])
    prompts = [text(1, 2 * WINDOW), text(2, 2), text(3, WINDOW)]
    requests = [request(prompt, 8, GREEDY) for prompt in prompts]
    want = [quiet_generate(model, prompt, 8) for prompt in prompts]
    drafts_change_nothing(CausalScorer(model), CausalScorer(model), requests, want)


@pytest.mark.parametrize("family", SOME)
def test_rows_may_be_padded_beyond_the_context(family: str) -> None:
    """A text at the end of the context beside one that is still drafted: padding has no position of its own."""
    model = tiny(EVERY[family], **{"n_positions" if EVERY[family].base is GPT else "max_position_embeddings": 40})
    rows = Reference(model).add(36, 3)
    assert rows.scorer.context == 40
    assert rows.step(3, 4).step(1, 3).gap() < TOLERANCE


@pytest.mark.parametrize("family", SOME)
def test_long_prompts_are_prefilled_in_parts(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "PREFILL_TOKENS", 5)
    assert Reference(tiny(EVERY[family])).add(17, 4, 10, 1).step(2, 3, 1, 2).gap() < TOLERANCE


def test_recorded_states_are_those_of_whole_passes() -> None:
    """A prefill computes the last layer whole where its hidden states are recorded."""
    model = tiny(FAMILIES["llama"])
    scorer = CausalScorer(model)
    last = len(model.model.layers)
    states = scorer.record([last])
    scorer.add(1)
    scorer.prefill([text(1, 4)])
    scorer.prefill([text(2, 3)])
    found = states.of(torch.arange(7)[None])
    with torch.inference_mode():
        seen: list[torch.Tensor] = []
        hook = model.model.layers[-1].register_forward_hook(lambda _, args, out: seen.append(out))
        model(torch.tensor([[*text(1, 4), *text(2, 3)]]))
        hook.remove()
    torch.testing.assert_close(found, seen[0], rtol=0, atol=TOLERANCE)


def test_rows_without_text_take_no_part_in_a_prefill() -> None:
    model = tiny(FAMILIES["llama"])
    rows = Reference(model).add(9, 4, 6, 3, 5)
    passes: list[tuple[int, ...]] = []
    hook = model.register_forward_pre_hook(
        lambda _, args, named: passes.append(tuple(named["input_ids"].shape)), with_kwargs=True
    )
    more: list[list[int]] = [[], text(7, 3), text(8, 2), [], text(9, 1)]
    rows.scorer.prefill(more)
    hook.remove()
    assert passes == [(2, 3), (1, 1)]
    rows.texts = [[*old, *new] for old, new in zip(rows.texts, more, strict=True)]
    assert rows.scorer.lengths == [len(each) for each in rows.texts]
    assert rows.step(2, 3, 1, 2, 1).gap() < TOLERANCE


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "llama4"])
def test_forked_rows_go_on_by_themselves(family: str) -> None:
    assert families(tiny(EVERY[family])) < TOLERANCE


def test_control_forks_that_share_their_storage_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RowCache, "fork", lambda cache, rows: cache.add(len(rows)))
    with pytest.raises((AssertionError, RuntimeError)):
        assert families(tiny(FAMILIES["llama"])) < TOLERANCE


def test_a_tree_behind_a_fork() -> None:
    """Both rows score the same tree; each keeps a path of its own."""
    rows, tree = Reference(tiny(FAMILIES["llama"])).add(9).fork(0), Tree.of((-1, -1, 0, 1), 4)
    nodes = text(77, 4)
    logits = rows.scorer.extend(torch.tensor([nodes, nodes]), [4, 4], tree=tree)
    assert torch.equal(logits[0], logits[1])
    paths = [[0, 2], [1, 3]]
    rows.scorer.keep([9, 9], paths)
    rows.scorer.rollback([11, 11])
    rows.texts = [[*old, *(nodes[node] for node in path)] for old, path in zip(rows.texts, paths, strict=True)]
    assert rows.step(2, 1).gap() < TOLERANCE


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("shape", [None, Shape(3, 4, 128)], ids=["any shape", "one shape"])
def test_prompts_are_read_behind_rows_that_run(family: str, shape: Shape | None) -> None:
    """Rows behind the running ones take no part in their passes, also while they are read piece by piece."""
    rows = Reference(tiny(EVERY[family]))
    rows.scorer.fix_shape(shape)
    rows.add(2 * WINDOW + 3, 3, 1).step(1, 3)
    waiting = rows.scorer.lengths[2]
    rows.read(WINDOW, first=2).step(4, 2)
    assert rows.scorer.lengths[2] == waiting + WINDOW
    rows.read(2, first=2).step(2).step(3, 1, 2)  # one row alone, then all
    assert rows.free(0).step(2).gap() < TOLERANCE


def test_rows_in_the_middle_are_served_alone() -> None:
    rows = Reference(tiny(FAMILIES["llama"])).add(8, 3, 5)
    tokens = text(5, 2)
    logits = rows.scorer.extend(torch.tensor([tokens]), [2], first=1)
    want = rows.scorer.alone([*rows.texts[1], *tokens])[0, -2:]
    torch.testing.assert_close(logits[0], want, atol=1e-4, rtol=1e-3)
    assert rows.scorer.lengths == [8, 5, 5]
    rows.scorer.rollback([8, 3])
    assert rows.step(1, 2, 3).gap() < TOLERANCE


ROPE = {"rope_theta": 10000.0, "original_max_position_embeddings": 24}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, **ROPE},
        {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ROPE},
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_scaled_positions(rope: dict[str, Any]) -> None:
    assert contract(tiny(FAMILIES["llama"], rope_parameters=rope)) < TOLERANCE


def test_longrope_ends_where_it_would_turn_the_cached_keys() -> None:
    """Phi-3's long variants use other frequencies for all tokens of a longer text, and for its neighbours."""
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "factor": 5.0, **ROPE}
    model = tiny(FAMILIES["phi3"], original_max_position_embeddings=24, rope_parameters=rope)
    rows = Reference(model).add(20, 3)
    assert rows.scorer.context == 24
    assert rows.step(3, 4).step(1, 3).gap() < TOLERANCE  # padding does not switch it either
    with pytest.raises(ValueError, match="holds 24; shorten it to at most 23"):
        plain(Decoder(CausalScorer(model, "phi")), [request(text(1, 24), 5, GREEDY)])


BLOOM = {"vocab_size": HF_VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4}
SMALL = {"vocab_size": HF_VOCAB, "hidden_size": 32, "num_hidden_layers": 2}
QWEN3_NEXT = {key: value for key, value in LLAMA.items() if key != "initializer_range"}
QWEN3_NEXT |= {"layer_types": ["linear_attention", "full_attention"], "head_dim": 8, "num_experts": 2}
QWEN3_NEXT |= {f"linear_{which}_head_dim": 8 for which in ("key", "value")}
QWEN3_NEXT |= {f"linear_num_{which}_heads": 2 for which in ("key", "value")}
QWEN3_NEXT |= {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
NEO = {**SMALL, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 64, "window_size": 32}
NEO = {**NEO, "bos_token_id": None, "eos_token_id": None}
del NEO["num_hidden_layers"]
REFUSED: dict[str, tuple[Family, str]] = {
    "mamba": (Family("MambaConfig", {**SMALL, "state_size": 4}, {}), "linear_attention, which keeps a state"),
    "rwkv": (Family("RwkvConfig", {**SMALL, "attention_hidden_size": 32}, {}), r"\(rwkv\) keeps a state"),
    "qwen3_next": (Family("Qwen3NextConfig", QWEN3_NEXT, {}), "linear_attention, which keeps a state"),
    "bloom": (Family("BloomConfig", BLOOM, {}), "ALiBi"),
    "falcon_alibi": (Family("FalconConfig", LLAMA, {"alibi": True}), "ALiBi"),
    "gpt_neo": (Family("GPTNeoConfig", NEO, {"attention_types": [[["global", "local"], 1]]}), "local attention"),
    "bert": (Family("BertConfig", LLAMA, {"pad_token_id": 0}), "other logits"),
}


@pytest.mark.parametrize("family", REFUSED)
def test_what_cannot_be_rolled_back_is_refused(family: str) -> None:
    config, reason = REFUSED[family]
    model = tiny(config)
    with pytest.raises(ValueError, match=rf"^toy .*{reason}.*\.$") as error:
        CausalScorer(model, "toy")
    assert "\n" not in str(error.value)


def test_a_kernel_without_masks_is_refused() -> None:
    model = tiny(FAMILIES["llama"])
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="attn_implementation='flash_attention_2', which takes no mask"):
        CausalScorer(model, "toy")


def test_a_model_that_ignores_the_cache_is_caught_by_the_probe() -> None:
    model = tiny(PROBED["olmo2"])
    forward = model.forward
    model.forward = lambda *args, position_ids=None, **kwargs: forward(*args, **kwargs)
    with pytest.raises(ValueError, match="gives other logits with a rolled-back cache"):
        CausalScorer(model, "toy")


def test_a_model_that_fails_in_the_probe_is_refused_in_one_sentence() -> None:
    model = tiny(PROBED["olmo2"])

    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("first line\nsecond line")

    model.forward = broken
    with pytest.raises(ValueError, match=r"\(olmo2\) does not run with our cache: RuntimeError: first line$"):
        CausalScorer(model, "toy")


@pytest.mark.parametrize("load", [load_model, load_tokenizer])
@pytest.mark.parametrize("source", ["missing", "empty"])
def test_a_folder_without_a_model_is_an_error_in_one_sentence(load: Any, source: str, tmp_path: Path) -> None:
    folder = tmp_path / source
    if source == "empty":
        folder.mkdir()
    with pytest.raises(ValueError, match=r"^cannot load the \w+ (of )?'.*': .") as error:
        load(folder)
    assert str(folder) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("damage", ["model.safetensors", "config.json"])
def test_a_damaged_model_is_an_error_in_one_sentence(damage: str, tmp_path: Path) -> None:
    tiny(FAMILIES["llama"]).save_pretrained(tmp_path)
    (tmp_path / damage).write_bytes(b"this is not what it should be")
    with pytest.raises(ValueError, match=r"^cannot load the model '") as error:
        load_model(tmp_path)
    assert "\n" not in str(error.value)


def test_a_damaged_tokenizer_is_an_error_in_one_sentence(tmp_path: Path) -> None:
    tiny(FAMILIES["llama"]).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(b"this is not what it should be")
    with pytest.raises(ValueError, match=r"^cannot load the tokenizer of '") as error:
        load_tokenizer(tmp_path)
    assert "\n" not in str(error.value)


def broken(folder: Path, name: str, content: str | bytes) -> Path:
    """A tiny model with one file that is something else."""
    tiny(FAMILIES["llama"]).save_pretrained(folder)
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("config.json", "[]", r"its config\.json is damaged \(it holds no JSON object\)"),
        ("config.json", "null", r"its config\.json is damaged \(it holds no JSON object\)"),
        ("config.json", '{"model_type"', r"its config\.json is damaged \(Expecting ':' delimiter, line 1 column 14\)"),
        ("config.json", '{"model_type": "llama", "hidden_size": "x"}', r"hidden_size.* expected int, got str"),
        ("config.json", b"\xff\x00\xff", r"its config\.json is damaged \(it is no text\)"),
        ("generation_config.json", "{", r"its generation_config\.json is damaged"),
        ("generation_config.json", "[]", r"its generation_config\.json is damaged"),
        ("model.safetensors", b"", r"its weights are damaged \(.*header too small\)"),
    ],
)
def test_damaged_files_of_a_model_are_named(name: str, content: str | bytes, fault: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=fault) as error:
        load_model(broken(tmp_path, name, content))
    assert "\n" not in str(error.value) and str(error.value).endswith(".")


@pytest.mark.parametrize("content", [b"", b"this is no pickle", pickle.dumps(print)])
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")  # torch's, on the way to its refusal
def test_pickles_are_not_opened(content: bytes, tmp_path: Path) -> None:
    broken(tmp_path, "pytorch_model.bin", content)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(
        ValueError, match=r"its weights are pickles .* take a copy of the model in safetensors"
    ) as error:
        load_model(tmp_path)
    assert "weights_only" not in str(error.value)


def test_weights_of_other_shapes_and_missing_ones_are_refused(tmp_path: Path) -> None:
    model = tiny(FAMILIES["llama"])
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    head = weights.pop("lm_head.weight")
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"lack 1 of its weights \(lm_head\.weight\)"):
        load_model(tmp_path)
    save_file({**weights, "lm_head.weight": head[:, :-1].clone()}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"weights have other shapes than its configuration says"):
        load_model(tmp_path)


@pytest.mark.parametrize("kind", ["vit", "clip", "bert"])
def test_what_does_not_continue_texts_is_one_sentence(kind: str, tmp_path: Path) -> None:
    about = AutoConfig.for_model(kind)
    about.architectures = ["BertForMaskedLM"] if kind == "bert" else None
    about.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"of the kind .*, which does not continue texts; take a causal") as error:
        load_model(tmp_path)
    assert len(str(error.value)) < 300 and error.value.__cause__ is None  # a cause would list hundreds of classes


def test_what_may_not_be_read_is_said_to_be_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken(tmp_path, "model.safetensors", b"")
    may = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: may(path, mode) and Path(path).suffix != ".safetensors")
    with pytest.raises(ValueError, match=r"its model\.safetensors may not be read: change its permissions"):
        load_model(tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ValueError, match="the folder may not be read: change its permissions"):
        load_model(tmp_path)


def test_files_and_no_name_are_no_models(tmp_path: Path) -> None:
    (tmp_path / "config.txt").write_text("{}")
    for source, fault in ((tmp_path, "no config.json"), (tmp_path / "config.txt", "is a file"), ("", "is empty")):
        with pytest.raises(ValueError, match=fault):
            load_model(source)


@pytest.mark.parametrize("source", [5, [], b"name", torch.nn.Linear(2, 2)])
def test_other_things_are_no_models(source: Any) -> None:
    for load in (load_model, *[find_tokenizer] * bool(source)):
        with pytest.raises(ValueError, match=f"not of type {type(source).__name__}"):
            load(source)


def test_loaded_models_that_cannot_run_as_they_are_say_what_to_load() -> None:
    inside, forward, whole, empty = (tiny(FAMILIES["llama"]) for _ in range(4))
    inside.compile(backend="eager")
    forward.forward = torch.compile(forward.forward, backend="eager")
    compiled = [(each, "compiled by torch.compile") for each in (inside, forward, torch.compile(whole))]
    for model, fault in (*compiled, (whole.model, "with its head"), (empty.to("meta"), "on the device meta")):
        with pytest.raises(ValueError, match=fault):
            slipstream.load(model)


def test_devices_on_which_nothing_is_computed_are_refused() -> None:
    model = tiny(FAMILIES["llama"])
    for device, fault in (("meta", "shapes without numbers"), ("tpu", "write cpu"), ("vulkan", "built without it")):
        with pytest.raises(ValueError, match=fault) as error:
            load_model(model, device=device)
        assert len(str(error.value)) < 120


def test_a_damaged_tokenizer_is_not_taken_for_none(tmp_path: Path) -> None:
    tiny(FAMILIES["llama"]).save_pretrained(tmp_path)
    assert find_tokenizer(tmp_path) is None
    for content, fault in (('{"a": ', "line 1 column 7"), ("[]", "no JSON object"), ("{}", "cannot load")):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(ValueError, match=rf"{fault}.*, or pass tokenizer="):
            find_tokenizer(tmp_path)


def test_a_saved_model_is_loaded_in_the_wanted_dtype(tmp_path: Path) -> None:
    model = tiny(FAMILIES["llama"])
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path, device="cpu")
    assert loaded.dtype == torch.float32
    torch.testing.assert_close(loaded.lm_head.weight, model.lm_head.weight)
    assert load_model(str(tmp_path), "bfloat16", device="cpu").dtype == torch.bfloat16
    assert load_model(model) is model
    with pytest.raises(ValueError, match="dtype='float8' is not known: use float32, bfloat16, float16, or"):
        load_model(tmp_path, "float8")
    with pytest.raises(ValueError, match=r"the loaded model does not know its name; pass tokenizer="):
        load_tokenizer(model)
