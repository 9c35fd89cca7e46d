"""Targets whose layers `device_map` spreads: the same texts, and a sentence for what steps back."""

import json
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import slipstream
from slipstream.cache.rows import RowCache
from slipstream.kernels.cpu import kernel_missing
from slipstream.kernels.placement import input_device, why_in_parts
from slipstream.models.loading.load import load_scorer
from terminal import run
from toys import FAMILIES, RAGGED, SEQ2SEQ, rare, tiny

SPREAD = {"model": "disk", "lm_head": "cpu"}
OLDER = find_spec("accelerate") and tuple(map(int, metadata.version("accelerate").split(".")[:2])) < (1, 15)
DISK_ALONE = pytest.mark.skipif(bool(OLDER), reason="accelerate puts no whole model on the disk before 1.15")


def placed(model: Any) -> Any:
    """A model that says what one says whose layers were spread, which it was not."""
    model.hf_device_map = SPREAD
    return model


def test_what_is_made_for_one_piece_steps_back_in_a_sentence() -> None:
    model = placed(tiny(FAMILIES["llama"]))
    assert why_in_parts(model) == "its layers are spread over cpu, disk"
    with pytest.warns(RuntimeWarning, match=r"^tiny runs eagerly: its layers are spread over cpu, disk\.$"):
        engine = slipstream.load(named(model), compile=True)
    if not kernel_missing():
        assert engine.notes == (
            "tiny runs with its weights as they are, not packed for this processor: its layers are spread over cpu, "
            "disk.",
        )
    for options in ({"quantize": "int8"}, {"draft": "int4"}):
        with pytest.raises(ValueError, match="that is for models in one piece, and its layers are spread over cpu, d"):
            slipstream.load(model, **options)


def named(model: Any) -> Any:
    model.config.name_or_path = "tiny"
    return model


def test_a_model_in_one_piece_says_nothing() -> None:
    """The control."""
    model = tiny(FAMILIES["llama"])
    assert why_in_parts(model) is None and slipstream.load(model).notes == ()


def test_tokens_go_where_the_embeddings_run_and_not_where_they_wait() -> None:
    model = placed(tiny(FAMILIES["llama"]).to("meta"))
    assert input_device(model).type == "meta"
    vars(model.get_input_embeddings()).update(_hf_hook=SimpleNamespace(execution_device="cpu"))
    assert input_device(model) == torch.device("cpu")


def test_slots_lie_on_the_device_of_their_layer() -> None:
    cache, places = RowCache(), ("cpu", "meta")

    def feed(count: int) -> None:
        cache.place(count)
        for layer, device in enumerate(places):
            new = torch.ones(len(cache.lengths), 2, count, 4, device=device)
            keys, _ = cache.update(layer, new, new)
            assert keys.device.type == device and keys.shape[2] == cache.end
        cache.advance([count] * len(cache.lengths))

    cache.add(2)
    feed(3)
    cache.rollback([3, 1])
    feed(150)  # more than fit: the slots move to larger ones
    cache.fork([1])
    cache.keep([0], [[0, 2]])
    cache.free([0])
    cache.scrub()
    assert [keys.device.type for keys, _ in cache.stores] == list(places) and cache.lengths == [151, 151]


@pytest.mark.parametrize(("text", "problem"), [("{", "is no JSON object"), ('{"": 1.5}', "a device is a number, or a")])
def test_a_map_of_devices_that_is_none_is_refused(text: str, problem: str) -> None:
    result = run("generate", "x", "--device-map", text)
    assert result.exit_code == 2 and problem in " ".join(result.stderr.split())


def test_without_accelerate_it_is_named(tmp_path: Path) -> None:
    if find_spec("accelerate"):
        pytest.skip("accelerate is installed")
    tiny(FAMILIES["llama"]).save_pretrained(tmp_path)
    result = run("generate", "x", "--target", str(tmp_path), "--device-map", json.dumps(SPREAD))
    assert result.exit_code == 2 and "pip install accelerate" in result.stderr


@pytest.mark.skipif(not find_spec("accelerate"), reason="accelerate is not installed")
@pytest.mark.parametrize("family", ["llama", "gpt2", "t5", *rare("qwen3", "bart")])
@pytest.mark.parametrize("places", [pytest.param({"": "disk"}, marks=DISK_ALONE), "auto", SPREAD])
def test_texts_of_a_spread_model_are_those_of_one_piece(family: str, places: Any, tmp_path: Path) -> None:
    if places == SPREAD and family not in {"llama", "qwen3"}:
        pytest.skip("its parts have other names")
    kind = FAMILIES.get(family) or SEQ2SEQ[family]
    for seed, name in enumerate(("target", "draft")):
        tiny(kind, seed=seed).save_pretrained(tmp_path / name)
    prompts = [[token + 2 for token in prompt] for prompt in RAGGED]
    how = {"dtype": "float32", "batch_size": 2}
    one = slipstream.load(tmp_path / "target", str(tmp_path / "draft"), **how)
    offload = {} if places == "auto" else {"offload_folder": str(tmp_path / "off")}
    spread = slipstream.load(tmp_path / "target", str(tmp_path / "draft"), device_map=places, **offload, **how)
    assert spread.decoder.target.device.type == "cpu"
    for options in ({}, {"temperature": 1.0, "verify": "coupled"}):
        texts = [
            [done.tokens for done in engine.generate(prompts, max_new_tokens=6, **options)] for engine in (one, spread)
        ]
        assert texts[0] == texts[1]


def test_a_table_of_positions_that_is_not_there_is_told() -> None:
    model = tiny(SEQ2SEQ["bart"])
    model.get_decoder().embed_positions.to("meta")
    with pytest.raises(ValueError, match="does not run"):
        load_scorer(placed(model))
