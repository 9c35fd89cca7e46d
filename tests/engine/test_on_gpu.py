"""The embedded pair on a GPU: the same texts as on a CPU, with every kind of draft, eager and by CUDA graphs."""

import warnings
from typing import Any

import pytest
import torch

import slipstream
from scripted import Unfused
from slipstream.check import check
from slipstream.execution import cuda_graphs
from slipstream.execution.graphs import GRAPHS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
PROMPTS = ["def fibonacci(n):\n", "import os\n\n\ndef walk(folder):", "class Stack:\n    def", "for i in range(3):\n"]
DRAFTS: dict[str, dict[str, Any]] = {
    "model": {},
    "auto": {"gamma": "auto"},
    "tree": {"tree": (3, 2, 1)},
    "paths": {"verify": "gbv:3"},
    "lookup": {"draft": "lookup"},
    "chain": {"draft": "lookup>embedded"},
    "choice": {"draft": "lookup|embedded"},
    "window": {"draft": "window:24"},
    "exit": {"draft": "exit:6"},
    "coupled": {"verify": "coupled"},
}
NEW = 48


def texts(engine: slipstream.Engine, **options: Any) -> list[tuple[int, ...]]:
    """Complete the prompts as one ragged batch, and the first of them alone."""
    batch = engine.generate(PROMPTS, max_new_tokens=NEW, **options)
    return [each.tokens for each in (*batch, *engine.generate(PROMPTS[:1], max_new_tokens=NEW, **options))]


@pytest.fixture
def unfused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capture kernels as they are: fusing those of an engine takes a minute."""
    monkeypatch.setattr(cuda_graphs, "Fused", Unfused)


@pytest.fixture(scope="module")
def greedy() -> list[tuple[int, ...]]:
    return texts(slipstream.load(dtype="float32", device="cpu"), plain=True)


@pytest.mark.usefixtures("unfused")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", DRAFTS)
def test_greedy_texts_are_those_of_the_cpu(kind: str, compiled: bool, greedy: list[tuple[int, ...]]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = slipstream.load(dtype="float32", device="cuda", compile=compiled, **DRAFTS[kind])
        captured = GRAPHS.captured
        assert texts(engine, plain=True) == greedy
        assert texts(engine) == greedy
        assert texts(engine) == greedy  # by the graphs of before
    assert compiled == (GRAPHS.captured > captured)


def test_greedy_texts_by_fused_kernels_are_those_of_the_cpu(greedy: list[tuple[int, ...]]) -> None:
    assert texts(slipstream.load(dtype="float32", device="cuda", compile=True)) == greedy


@pytest.mark.parametrize("compiled", [False, True])
def test_a_cache_in_8_bits_gives_the_texts_of_the_cpu(compiled: bool) -> None:
    """Captured passes write codes and scales, and read them."""
    plain = texts(slipstream.load(dtype="float32", device="cpu", kv_dtype="int8"), plain=True)
    engine = slipstream.load(dtype="float32", device="cuda", compile=compiled, kv_dtype="int8")
    assert texts(engine, plain=True) == plain == texts(engine)


@pytest.mark.parametrize(("kind", "compiled"), [("model", True), ("tree", False)])
def test_sampled_texts_follow_the_targets_law(kind: str, compiled: bool) -> None:
    """So few samples would not notice every broken rule; this is about draws and laws on a GPU."""
    engine = slipstream.load(dtype="float32", device="cuda", batch_size=64, compile=compiled, **DRAFTS[kind])
    report = check(engine, PROMPTS[:1], temperature=1.0, samples=200, max_new_tokens=16)
    assert report.sampling is not None and all(answer.passed for answer in report.sampling.tests), str(report)


@pytest.mark.usefixtures("unfused")
def test_seeds_repeat_texts_on_a_gpu() -> None:
    engine = slipstream.load(dtype="float32", device="cuda", compile=True)
    assert texts(engine, temperature=0.8, seed=5) == texts(engine, temperature=0.8, seed=5)
    assert texts(engine, temperature=0.8, seed=5) != texts(engine, temperature=0.8, seed=6)


@pytest.mark.usefixtures("unfused")
@pytest.mark.parametrize("compiled", [False, True])
def test_beams_are_those_of_the_cpu(compiled: bool) -> None:
    found = []
    for device in ("cpu", "cuda"):
        engine = slipstream.load(dtype="float32", device=device, compile=compiled and device == "cuda")
        beams = engine.generate(PROMPTS, max_new_tokens=24, num_beams=4, num_return_sequences=4)
        found.append([beam.tokens for beam in beams])
    assert found[0] == found[1]


def test_what_runs_on_cpus_only_is_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match="CPU"):
        slipstream.load(device="cuda", quantize="int8")
    with pytest.raises(ValueError, match="CPU"):
        slipstream.load(draft="int4", device="cuda")


@pytest.mark.usefixtures("unfused")
def test_a_warmed_engine_captures_nothing_more_for_texts_of_a_fixed_gamma() -> None:
    engine = slipstream.load(dtype="bfloat16", device="cuda", compile=True, gamma=4)
    engine.generate(PROMPTS[:1], max_new_tokens=NEW)
    captured = GRAPHS.captured
    engine.generate(PROMPTS[:1], max_new_tokens=NEW)
    assert GRAPHS.captured == captured
