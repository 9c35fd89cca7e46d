"""LoRA adapters, saved by peft, are merged into weights as peft merges them; what cannot be merged is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import slipstream
from slipstream.models.loading.adapters import merged
from slipstream.models.loading.load import load_model
from toys import FAMILIES, SEQ2SEQ, tiny

peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # peft asks for it
    pytest.mark.filterwarnings("ignore:Model (has|with) `tie_word", "ignore:Input and output embedd", "ignore:Setting"),
]

ATTENTION = {"target_modules": ["q_proj", "v_proj"], "r": 4}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "usual": ("llama", ATTENTION),
    "patterns": ("llama", {**ATTENTION, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 32}}),
    "rslora": ("llama", {**ATTENTION, "use_rslora": True, "bias": "all"}),
    "dora": ("llama", {**ATTENTION, "use_dora": True}),
    "fan_in_fan_out": ("gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True}),
    "modules_to_save": ("llama", {**ATTENTION, "modules_to_save": ["embed_tokens", "lm_head"]}),
    "all linear layers": ("qwen3", {"target_modules": "all-linear"}),
    "experts": ("mixtral", {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj"]}),
    "tied embeddings": ("qwen3", {"target_modules": ["embed_tokens", "q_proj"]}),
    "untied by the adapter": ("qwen3", {**ATTENTION, "modules_to_save": ["embed_tokens"]}),
    "encoder-decoder": ("t5", {"target_modules": ["q", "v"]}),
}
TIED = {kind: {"tie_word_embeddings": True} for kind in ("tied embeddings", "untied by the adapter")}


def adapted(base: PreTrainedModel, folder: Path, **settings: Any) -> Any:
    """A model of peft with an adapter of random weights, saved in a folder with its base in the folder `base`."""
    torch.manual_seed(1)
    base.save_pretrained(folder / "base")
    base.config.name_or_path = base.name_or_path = str(folder / "base")
    model = peft.get_peft_model(base, peft.LoraConfig(**settings)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora" in name or "modules_to_save" in name:
                weight.add_(torch.randn_like(weight), alpha=0.1)
    model.save_pretrained(folder / "adapter")
    return model


def equal(one: Any, other: Any) -> bool:
    """Whether two models have the same weights, bit for bit."""
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_beside_or_in_place_of_its_base_and_a_model_of_peft_are_merged_alike(
    kind: str, tmp_path: Path
) -> None:
    family, settings = KINDS[kind]
    model = adapted(tiny((FAMILIES | SEQ2SEQ)[family], **TIED.get(kind, {})), tmp_path, **settings)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    passed, base = merged(model), load_model(tmp_path / "base")
    found = [passed, load_model(tmp_path / "adapter"), load_model(tmp_path / "base", adapter=tmp_path / "adapter")]
    found.append(load_model(base, adapter=tmp_path / "adapter"))
    unchanged = model.state_dict()
    assert all(torch.equal(weight, unchanged[name]) for name, weight in before.items())
    reference = peft.PeftModel.from_pretrained(load_model(tmp_path / "base"), tmp_path / "adapter").merge_and_unload()
    assert [equal(each, reference) for each in found] == [True] * 4
    assert not equal(base, reference) and equal(base, load_model(tmp_path / "base"))


def test_texts_of_target_and_draft_are_those_of_the_merged_model(tmp_path: Path) -> None:
    model = adapted(tiny(FAMILIES["llama"]), tmp_path, **ATTENTION)
    base, adapter = tmp_path / "base", tmp_path / "adapter"

    def text(target: Any, draft: Any = None, **options: Any) -> list[int]:
        engine = slipstream.load(target, draft, **options)
        return list(engine.generate([[5, 17, 42]], max_new_tokens=12, temperature=0)[0].tokens)

    wanted = merged(model).generate(torch.tensor([[5, 17, 42]]), max_new_tokens=12, do_sample=False)[0, 3:].tolist()
    assert text(adapter) == text(base, model, adapter=adapter) == text(model, f"{base}?adapter={adapter}") == wanted
    assert text(base) != wanted


def changed(folder: Path, **entries: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


@pytest.mark.parametrize(
    ("entries", "fault"),
    [
        ({"peft_type": "IA3"}, "of the kind IA3, and only LORA"),
        ({"peft_type": "PROMPT_TUNING"}, "of the kind PROMPT_TUNING, and only LORA"),
        ({"peft_type": "NEWER"}, "NEWER"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"target_modules": ["other"]}, "other"),
        ({"target_modules": ["q_proj"]}, "for another model"),
        ({"target_modules": ["q_proj", "k_proj", "v_proj"]}, "for another model"),
        ({"base_model_name_or_path": None}, "names none"),
        ({"base_model_name_or_path": "./gone"}, "no such folder"),
    ],
)
def test_what_cannot_be_merged_is_refused_in_a_sentence(entries: dict[str, Any], fault: str, tmp_path: Path) -> None:
    adapted(tiny(FAMILIES["llama"]), tmp_path, **ATTENTION)
    load_model(tmp_path / "adapter")
    changed(tmp_path / "adapter", **entries)
    with pytest.raises(ValueError, match=fault) as error:
        load_model(tmp_path / "adapter")
    assert len(str(error.value).splitlines()) == 1 and len(str(error.value)) < 400


def test_several_adapters_are_refused_or_one_is_named(tmp_path: Path) -> None:
    model = adapted(tiny(FAMILIES["llama"]), tmp_path, **ATTENTION)
    model.save_pretrained(tmp_path / "two")
    model.add_adapter("other", model.peft_config["default"])
    model.save_pretrained(tmp_path / "two", selected_adapters=["other"])
    (tmp_path / "two" / "adapter_config.json").unlink()
    for source, options, fault in (
        (tmp_path / "two", {}, r"adapters in folders of their own \(other\): name one"),
        (tmp_path / "adapter", {"adapter": tmp_path / "two" / "other"}, "is an adapter itself"),
        (tmp_path / "base", {"adapter": [tmp_path / "adapter"]}, "the folder or hub name of one"),
        (tmp_path / "base", {"adapter": tmp_path / "gone"}, "gone"),
    ):
        with pytest.raises(ValueError, match=fault):
            load_model(source, **options)
        assert equal(load_model(tmp_path / "two" / "other"), load_model(tmp_path / "base"))  # it is new


@pytest.mark.parametrize("how", [{"modules_to_save": ["embed_tokens", "lm_head"]}, {"trainable_token_indices": [9]}])
def test_tokens_that_were_added_for_an_adapter_come_with_it(how: dict[str, Any], tmp_path: Path) -> None:
    base = tiny(FAMILIES["llama"])
    base.resize_token_embeddings(base.config.vocab_size + 3, mean_resizing=False)
    model = adapted(base, tmp_path, **ATTENTION, **how)
    tiny(FAMILIES["llama"]).save_pretrained(tmp_path / "base")
    model.save_pretrained(tmp_path / "adapter")  # peft sees now which tokens are new
    assert equal(load_model(tmp_path / "adapter"), merged(model))
    tiny(FAMILIES["llama"], hidden_size=64).save_pretrained(tmp_path / "base")
    with pytest.raises(ValueError, match="other shapes than its base"):
        load_model(tmp_path / "adapter")
