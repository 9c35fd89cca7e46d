"""Packed weights and passes compiled for CPUs: the same logits, the user's model untouched, eager where need be."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from scripted import drive, grow_and_branch, run_before_others
from slipstream import load
from slipstream.execution.inductor import Compiled
from slipstream.execution.passes import Mode, compare
from slipstream.kernels.packing import PackedLinear, can_pack, packed
from slipstream.models.causal import CausalScorer
from slipstream.models.loading.load import load_scorer
from toys import FAMILIES, tiny

packs = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="oneDNN is not part of this torch")
NAMES = [name for name in FAMILIES if name != "gpt_neox_alibi"]


@packs
@pytest.mark.parametrize("name", NAMES)
def test_a_packed_twin_gives_the_same_logits_and_leaves_the_model_alone(name: str) -> None:
    model = tiny(FAMILIES[name])
    before, modules = copy.deepcopy(model.state_dict()), {path: type(part) for path, part in model.named_modules()}
    twin = packed(model)
    assert any(isinstance(part, PackedLinear) for part in twin.modules())
    tokens = torch.arange(12).view(2, 6)
    with torch.inference_mode():
        torch.testing.assert_close(twin(tokens).logits, model(tokens).logits, atol=1e-5, rtol=1e-4)
    assert {path: type(part) for path, part in model.named_modules()} == modules
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    shared = {parameter.data_ptr() for parameter in model.parameters()}
    assert {parameter.data_ptr() for parameter in twin.parameters()} <= shared


@packs
def test_models_loaded_by_name_are_packed_and_loaded_models_are_not(tmp_path: Any) -> None:
    model = tiny(FAMILIES["llama"])
    model.save_pretrained(tmp_path)

    def has_packed(scorer: CausalScorer) -> bool:
        return any(isinstance(part, PackedLinear) for part in scorer.model.modules())

    assert has_packed(load_scorer(tmp_path, device="cpu"))
    assert not has_packed(load_scorer(tmp_path, device="cpu", mode=Mode(packed=False)))
    assert not has_packed(load_scorer(model))
    assert has_packed(load_scorer(model, mode=Mode(packed=True)))
    assert has_packed(load_scorer(tmp_path, device="cpu", mode=Mode(compiled=True)))


def test_what_cannot_be_packed_is_refused_in_a_sentence() -> None:
    model = tiny(FAMILIES["llama"]).double()
    assert not can_pack(model)
    with pytest.raises(ValueError, match=r"cannot be packed on cpu in torch\.float64"):
        packed(model)


@packs
def test_a_compiled_scorer_gives_the_eager_logits_of_one_text() -> None:
    model = packed(tiny(FAMILIES["llama"], num_hidden_layers=1))
    eager, fast = CausalScorer(model), CausalScorer(model, execution=Compiled(model, "toy"))
    for left, right in zip(drive(eager, 1), drive(fast, 1), strict=True):
        torch.testing.assert_close(left, right, atol=1e-4, rtol=1e-3)


@packs
@pytest.mark.slow
def test_a_compiled_scorer_gives_the_eager_logits() -> None:
    """Three graphs (single rows, batches, batches of one new token each) serve every shape that decoding meets."""
    said, before = list[str](), counters["stats"]["unique_graphs"]
    model = packed(tiny(FAMILIES["llama"], num_hidden_layers=1))
    compiled = Compiled(model, "toy", said.append)
    eager, fast = CausalScorer(model), CausalScorer(model, execution=compiled)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rows in (1, 3, 2, 1):
            for left, right in zip(drive(eager, rows), drive(fast, rows), strict=True):
                torch.testing.assert_close(left, right, atol=1e-4, rtol=1e-3)
    assert said == [f"compiling toy for {served}" for served in ("one text", "batches", "batches, a token each")]
    grow_and_branch(eager, fast)
    _draft_by_columns(eager, fast)
    run_before_others(eager, fast)
    assert counters["stats"]["unique_graphs"] == before + 3  # torch made none anew behind our back


def _draft_by_columns(*scorers: CausalScorer) -> None:
    """Tokens that are columns of a tensor that gets wider, as those of chains that are drafted token by token."""
    found = list[list[Tensor]]()
    for scorer in scorers:
        scorer.add(2)
        scorer.prefill([[1, 2, 3], [4, 5]])
        with torch.inference_mode():  # as a drafter makes them
            tokens = torch.arange(12).view(2, 6).clone()
        found.append([scorer.extend(tokens[:, :1], [1, 1])])
        with torch.inference_mode():
            found[-1] += [scorer.extend(tokens[:, :width].clone()[:, -1:], [1, 1]) for width in range(1, 4)]
        scorer.free([0, 1])
    for left, right in zip(*found, strict=True):
        torch.testing.assert_close(left, right, atol=1e-4, rtol=1e-3)


def test_the_first_rows_run_by_graphs_while_others_lie_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[int] = []

    def compile(traced: Any, **_: Any) -> Any:
        return lambda *inputs: served.append(len(inputs[0])) or traced(*inputs)

    monkeypatch.setattr(torch, "compile", compile)
    model = tiny(FAMILIES["gemma3"])
    run_before_others(CausalScorer(model), CausalScorer(model, execution=Compiled(model, "toy")))
    assert served == [1, 2, 1, 3, 2, 3, 5]


def _broken(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("no compiler here\nand a long story")


def test_a_model_that_cannot_be_compiled_runs_eagerly_after_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda *_, **__: _broken)
    model = tiny(FAMILIES["llama"])
    fast = CausalScorer(model, execution=Compiled(model, "toy"))
    with pytest.warns(RuntimeWarning, match="toy runs eagerly, it cannot be compiled: .*no compiler here$") as caught:
        found = drive(fast, 2)
    assert len(caught) == 1
    for left, right in zip(drive(CausalScorer(model), 2), found, strict=True):
        torch.testing.assert_close(left, right)


def test_a_graph_that_fails_later_gives_way_to_eager_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def graph(*args: Any) -> Tensor:
        calls.append(args)
        return function(*args) if len(calls) < 3 else _broken()

    def compile(traced: Any, **_: Any) -> Any:
        nonlocal function
        function = traced
        return graph

    function: Any = None
    monkeypatch.setattr(torch, "compile", compile)
    model = tiny(FAMILIES["llama"])
    fast = CausalScorer(model, execution=Compiled(model, "toy"))
    with pytest.warns(RuntimeWarning, match="no compiler here"):
        found = drive(fast, 2)
    assert len(calls) == 3
    for left, right in zip(drive(CausalScorer(model), 2), found, strict=True):
        torch.testing.assert_close(left, right)


def test_a_graph_with_other_logits_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda traced, **_: lambda *args: [1.5 * part for part in traced(*args)])
    model = tiny(FAMILIES["llama"])
    fast = CausalScorer(model, execution=Compiled(model, "toy"))
    with pytest.warns(RuntimeWarning, match="gives other logits"):
        found = drive(fast, 1)
    for left, right in zip(drive(CausalScorer(model), 1), found, strict=True):
        torch.testing.assert_close(left, right)


def test_inputs_of_8_bits_explain_twice_what_their_rounding_moves() -> None:
    """And no more, nor what is beyond half precision."""
    eager = torch.randn(1, 3, 50, generator=torch.Generator().manual_seed(0))
    compare(eager, eager + 0.05, unrounded=eager - 0.03)
    for moved, unrounded in ((0.05, None), (0.05, eager - 0.02), (4.0, eager - 3.0)):
        with pytest.raises(ValueError, match="gives other logits"):
            compare(eager, eager + moved, unrounded=unrounded)


def test_load_refuses_to_compile_a_fixed_shape_and_warms_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="without compile=True"):
        load(exact_shape=True, compile=True)
    monkeypatch.setattr(torch, "compile", lambda traced, **_: traced)
    said: list[str] = []
    engine = load(tiny(FAMILIES["llama"]), tiny(FAMILIES["llama"], seed=1), compile=True, progress=said.append)
    assert [line.split(" for ")[1] for line in said[:2]] == ["greedy chains of 5 tokens", "one text"]
    prompts = [[1, 2, 3], [4, 5, 6, 7]]
    fast = engine.generate(prompts, max_new_tokens=8)
    slow = load(tiny(FAMILIES["llama"]), tiny(FAMILIES["llama"], seed=1)).generate(prompts, max_new_tokens=8)
    assert [each.tokens for each in fast] == [each.tokens for each in slow]
