"""Passes and drafts as CUDA graphs: on a GPU, and on a CPU with a recorder that repeats the work."""

import warnings
from typing import Any

import pytest
import torch

from scripted import LATE, ONE, THREE, Gammas, Unfused, agree, drafts, drive, grow_and_branch, repeat, run_before_others
from slipstream import load
from slipstream.decoding.sampling import Sampling
from slipstream.execution import backends, cuda_graphs, graphs
from slipstream.execution.cuda_graphs import Captured, bucket
from slipstream.execution.graphs import GRAPHS
from slipstream.models.causal import CausalScorer
from toys import FAMILIES, SEQ2SEQ, tiny


def _broken(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("no graphs here\nand a long story")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(cuda_graphs, "Fused", Unfused)  # test_fused.py has those
    if request.param == "cpu":
        monkeypatch.setattr(graphs, "record", repeat)
        monkeypatch.setattr(backends, "CAPTURED", {"cpu"})
    elif not torch.cuda.is_available():
        pytest.skip("no GPU")
    return str(request.param)


def test_buckets_are_quarters_of_powers_of_two() -> None:
    buckets = {0: 0, 1: 256, 256: 256, 257: 512, 1024: 1024, 1025: 1280, 2048: 2048, 2049: 2560, 2561: 3072}
    assert {slots: bucket(slots) for slots in buckets} == buckets
    for slots in range(1, 20_000, 7):
        assert slots <= bucket(slots) <= max(256, 1.25 * slots + 256)


# ---- passes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "opt"])  # gemma3: two kinds of masks
def test_captured_passes_give_the_eager_logits(device: str, name: str) -> None:
    """Graphs read their own tensors, whatever was in them before, and are made anew when the stores have moved."""
    model, said = tiny(FAMILIES[name]).to(device), list[str]()
    eager, fast = CausalScorer(model), CausalScorer(model, execution=Captured(model, "toy", said.append))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed, rows in enumerate((1, 3, 2, 1, 1)):
            for left, right in zip(drive(eager, rows, seed), drive(fast, rows, seed), strict=True):
                torch.testing.assert_close(left, right, atol=1e-4, rtol=1e-3)
    assert said[0] == "capturing toy for 1 x 4 tokens and 256 slots"
    captured = [what for what in said if what.startswith("capturing")]
    assert len(captured) == 20  # five for each number of rows; the last drive made none
    grow_and_branch(eager, fast)


def test_the_first_rows_run_by_captured_passes_while_others_lie_behind(device: str) -> None:
    model, said = tiny(FAMILIES["llama"]).to(device), list[str]()
    run_before_others(CausalScorer(model), CausalScorer(model, execution=Captured(model, "toy", said.append)))
    captured = [what for what in said if what.startswith("capturing")]
    assert len(captured) == 7 and "1 x 3 tokens" in captured[0] and "5 x 2 tokens" in captured[-1]


def test_a_graph_that_does_not_read_its_inputs_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the work had been captured with the tensors of another pass."""
    model = tiny(FAMILIES["llama"])
    fast = CausalScorer(model, execution=Captured(model, "toy"))
    monkeypatch.setattr(cuda_graphs, "Fused", Unfused)
    monkeypatch.setattr(graphs, "record", lambda function, pool: ([each + 1 for each in function()], lambda: None))
    with pytest.warns(RuntimeWarning, match="gives other logits") as caught:
        found = drive(fast, 2)
    assert len(caught) == 1
    for left, right in zip(drive(CausalScorer(model), 2), found, strict=True):
        torch.testing.assert_close(left, right)


def test_control_a_graph_that_is_not_replayed_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "Fused", Unfused)
    monkeypatch.setattr(graphs, "record", lambda function, pool: (function(), lambda: None))
    model = tiny(FAMILIES["llama"])
    eager, fast = CausalScorer(model), CausalScorer(model, execution=Captured(model, "toy"))
    drive(fast, 1)
    pairs = zip(drive(eager, 1, seed=5), drive(fast, 1, seed=5), strict=True)
    assert any(not torch.allclose(left, right, atol=1e-4) for left, right in pairs)


def test_a_model_that_cannot_be_captured_runs_eagerly_after_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "Fused", Unfused)
    monkeypatch.setattr(graphs, "record", _broken)
    model = tiny(FAMILIES["llama"])
    fast = CausalScorer(model, execution=Captured(model, "toy"))
    with pytest.warns(RuntimeWarning, match="no graphs here") as caught:
        found = drive(fast, 2)
    assert len(caught) == 1
    for left, right in zip(drive(CausalScorer(model), 2), found, strict=True):
        torch.testing.assert_close(left, right)


# ---- drafts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "gemma2", "opt"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("rounds", [ONE, THREE, LATE])
def test_a_captured_chain_is_what_token_by_token_would_have_been(
    device: str, name: str, temperature: float, rounds: Gammas
) -> None:
    model, samplers = tiny(FAMILIES[name]).to(device), [Sampling(temperature=temperature)] * len(rounds[0])
    one, other = CausalScorer(model), CausalScorer(model)
    one.make_draft_graphs([4])
    before = GRAPHS.captured
    for left, right in zip(drafts(one, samplers, rounds), drafts(other, samplers, rounds), strict=True):
        agree(left, right)
    assert one.lengths == other.lengths
    assert one.draft_graphs is not None and {kind.size for kind in one.draft_graphs.made} == {4}
    assert GRAPHS.captured > before


def test_chains_longer_than_any_size_have_graphs_of_their_own(device: str) -> None:
    model, samplers = tiny(FAMILIES["llama"]).to(device), [Sampling(temperature=0.7)]
    one, other = CausalScorer(model), CausalScorer(model)
    one.make_draft_graphs([2])
    for left, right in zip(drafts(one, samplers, ONE), drafts(other, samplers, ONE), strict=True):
        agree(left, right)
    assert one.draft_graphs is not None and {kind.size for kind in one.draft_graphs.made} == {2, 4}


def test_logits_that_are_not_finite_are_noticed_a_round_later_and_harm_no_law(device: str) -> None:
    """No round waits for the draft's logits, so that the law of such a draft has to be one."""
    model = tiny(FAMILIES["llama"]).to(device)
    scorer = CausalScorer(model)
    scorer.make_draft_graphs([4])
    with torch.no_grad():
        model.get_output_embeddings().weight[5] = float("nan")
    with pytest.warns(RuntimeWarning, match="non-finite"):
        found = drafts(scorer, [Sampling(temperature=0.7)], ONE)
    for draft in found:
        assert draft.law is not None
        torch.testing.assert_close(draft.law.dense.sum(-1), torch.ones(draft.tokens.shape, device=device))
    assert found[0].law is not None and float(found[0].law.dense.std()) == 0


def test_drafts_that_cannot_be_captured_go_token_by_token_after_one_warning(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "record", _broken)
    model = tiny(FAMILIES["llama"]).to(device)
    one, other = CausalScorer(model), CausalScorer(model)
    one.make_draft_graphs([4])
    with pytest.warns(RuntimeWarning, match="drafts token by token.*no graphs here") as caught:
        found = drafts(one, [Sampling()], ONE)
    assert len(caught) == 1
    for left, right in zip(found, drafts(other, [Sampling()], ONE), strict=True):
        agree(left, right)


# ---- engines ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {}),
        ("llama", {"draft": "window:8"}),
        ("llama", {"tree": (2, 2)}),
        ("t5", {}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("gemma3", {}),
                ("llama", {"draft": "lookup"}),
                ("llama", {"gamma": "auto"}),
                ("t5_gated", {"tree": (2, 1)}),
                ("bart", {}),
            )
        ),
    ],
)
def test_captured_engines_say_what_eager_ones_say(
    device: str, name: str, options: dict[str, Any], temperature: float
) -> None:
    family = SEQ2SEQ.get(name) or FAMILIES[name]
    target, draft = (tiny(family, seed).to(device) for seed in (0, 1))
    settings = {"target": target, "draft": draft, **options}
    prompts = [[1, 2, 3, 1, 2], [4, 5, 6, 7, 4, 5, 6, 7, 8], [9], [3, 3, 3, 1, 2]]
    call = {"max_new_tokens": 8, "temperature": temperature, "seed": 3}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = load(**settings, compile=True)
        before = GRAPHS.captured
        found = [[row.tokens for row in engine.generate(prompts[:some], **call)] for some in (1, 4, 1)]
    assert GRAPHS.captured > before
    if options.get("gamma") == "auto" and temperature:
        return  # what is drafted depends on the clock, and so do sampled texts
    slow = load(**settings)
    assert found == [[row.tokens for row in slow.generate(prompts[:some], **call)] for some in (1, 4, 1)]
