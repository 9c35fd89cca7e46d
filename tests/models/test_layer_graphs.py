"""Layers of models with states as graphs: one for each kind, the same logits and states, and eager where that fails."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from reference import Reference, contract, text
from slipstream.decoding.controllers import Fixed
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.generate import generate, plain
from slipstream.drafters.model import ModelDrafter
from slipstream.execution import kept_graphs
from slipstream.execution.graphs import GRAPHS
from slipstream.execution.passes import Mode
from slipstream.kernels.cpu import kernel_missing
from slipstream.models import layer_graphs
from slipstream.models.layer_graphs import LayerGraphs
from slipstream.models.loading import load_scorer
from slipstream.models.recurrent import StateScorer
from slipstream.models.tiny import tiny_config, tiny_model
from toys import GREEDY, request

pytestmark = pytest.mark.skipif(kernel_missing() is not None, reason=f"no kernel here: {kernel_missing()}")
FAMILIES = {
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM"),
    "lfm2": ("Lfm2Config", "Lfm2ForCausalLM"),
    "mamba2": ("Mamba2Config", "Mamba2ForCausalLM"),
    "falcon_h1": ("FalconH1Config", "FalconH1ForCausalLM"),
    "nemotron_h": ("NemotronHConfig", "NemotronHForCausalLM"),
}
LOOSE = 3e-3
"""Standard deviations of the logits, as for the same models run eagerly."""


@cache
def model(family: str) -> PreTrainedModel:
    config, kind = (getattr(transformers, name) for name in FAMILIES[family])
    return tiny_model(kind, tiny_config(config))


@cache
def eager(family: str) -> StateScorer:
    return StateScorer(model(family), family)


def scorer(family: str) -> StateScorer:
    """One whose layers run by graphs, without rows."""
    found = eager(family)
    found.clear()
    found.layer_graphs = LayerGraphs(found.model, family)
    return found


class Traced:
    """The function that a graph would be made of, in its place: graphs take long to make."""

    made = 0

    def __init__(self, function: Callable[..., Any], inputs: Any, on_graph: Any) -> None:
        self._function = function
        Traced.made += 1

    def __call__(self, *inputs: Any) -> Any:
        return self._function(*inputs)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kept_graphs.PLACE, str(tmp_path))


@pytest.mark.parametrize(("family", "kinds"), [("qwen3_5", 2), ("lfm2", 2), ("mamba2", 1), ("falcon_h1", 1)])
def test_layers_of_a_kind_share_a_function_of_weights_and_states(
    family: str, kinds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_graphs, "Frozen", Traced)
    monkeypatch.setattr(Traced, "made", 0)
    target = scorer(family)
    assert contract(target) < LOOSE
    assert Traced.made in {3 * kinds, 4 * kinds}  # single texts and batches, a token each and several
    assert not any("forward" in vars(part) for part in target.model.modules())


@pytest.mark.parametrize("place", [0, 3])
def test_control_layers_that_hand_out_something_else_are_caught(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other hidden states are seen before a graph is used; states that are wrong after a rollback, in the contract."""

    class Wrong(Traced):
        def __call__(self, *inputs: Any) -> Any:
            found = list(super().__call__(*inputs))
            if place == 0:
                found[0] = found[0] + 1
            else:
                found[3] = [[[torch.zeros_like(read) for read in one] for one in some] for some in found[3]]
            return tuple(found)

    monkeypatch.setattr(layer_graphs, "Frozen", Wrong)
    target = scorer("qwen3_5")
    if place:
        assert contract(target) > 30 * LOOSE
        return
    with pytest.warns(RuntimeWarning, match=r"^qwen3_5 runs eagerly, it cannot be compiled: .*other logits") as caught:
        assert contract(target) < LOOSE
    assert len(caught) == 1


def test_layers_that_all_differ_run_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_graphs, "MOST_KINDS", 1)
    with pytest.warns(RuntimeWarning, match=r"its \d+ layers are of 2 kinds"):
        assert contract(scorer("qwen3_5")) < LOOSE


def test_compiling_what_one_cannot_go_back_within_is_declined_in_a_sentence() -> None:
    tiny = tiny_model(transformers.MambaForCausalLM, tiny_config(transformers.MambaConfig))
    with pytest.warns(RuntimeWarning, match="runs eagerly: it keeps a state that one cannot go back within"):
        assert load_scorer(tiny, mode=Mode(compiled=True)).layer_graphs is None


def one_text(target: StateScorer) -> float:
    """The worst gap of a text that loses drafts and goes on, to fresh forwards."""
    rows = Reference(target)
    rows.add(11)
    return max(max(rows.verify(kept), rows.step(2), rows.step(1)) for kept in range(1, 4))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", ["qwen3_5", "lfm2", "nemotron_h"])
def test_graphs_give_the_logits_of_fresh_forwards_and_are_kept(family: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for made in (True, False):
            before, said = (GRAPHS.compiled, GRAPHS.loaded), list[str]()
            target = load_scorer(model(family), mode=Mode(compiled=True, progress=said.append))
            assert isinstance(target, StateScorer) and one_text(target) < LOOSE
            compiled, loaded = GRAPHS.compiled - before[0], GRAPHS.loaded - before[1]
            assert (compiled > 0, loaded > 0) == (made, not made) and len(said) == compiled + loaded


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", ["qwen3_5", "lfm2"])
def test_greedy_texts_by_graphs_are_those_of_transformers(family: str) -> None:
    ours, prompt = model(family), text(1, 14)
    ours.generation_config.eos_token_id = None
    options = {"do_sample": False, "max_new_tokens": 16, "pad_token_id": 0}
    want = ours.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()
    drafter = ModelDrafter(StateScorer(model("lfm2" if family == "qwen3_5" else "qwen3_5")))
    decoder = Decoder(scorer(family), drafter, controller=Fixed(3))
    for decode in (plain, generate):
        assert [row.output for row in decode(decoder, [request(prompt, 16, GREEDY)])] == [want]
