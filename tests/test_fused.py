"""Chains drafted by one graph: the same tokens and laws as token by token, one text, nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slipstream import fused, tracing
from slipstream.drafters.model import ModelDrafter
from slipstream.models import CausalScorer
from slipstream.packing import can_pack, packed
from slipstream.records import Context, Draft, Request, Row
from slipstream.sampling import Sampling, draw
from toys import FAMILIES, HF_VOCAB, tiny


def drafts(scorer: CausalScorer, sampler: Sampling, gammas: tuple[int, ...] = (4, 2, 4)) -> list[Draft]:
    """What a drafter proposes in some rounds, of which the first is refused in its middle and the second stands."""
    drafter = ModelDrafter(scorer, HF_VOCAB)
    row = Row(Request(tuple(range(1, 9)), sampler, 100, seed=7), 0, list(range(1, 9)))
    found = []
    for gamma, kept in zip(gammas, (1, 1, 0), strict=True):
        draft = drafter.propose(Context((row,), draw), [gamma])
        row.tokens += [*draft.tokens[0, :kept].tolist(), 3]
        scorer.rollback([min(scorer.lengths[0], len(row.tokens) - 1)])
        found.append(draft)
    return found


@pytest.fixture
def untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions that would become graphs, as they are."""
    monkeypatch.setattr(tracing.torch, "compile", lambda function, **_: function)


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "gemma2", "opt"])
@pytest.mark.parametrize("sampler", [Sampling(), Sampling(temperature=0.7)])
def test_a_chain_is_what_token_by_token_would_have_been(untraced: None, name: str, sampler: Sampling) -> None:
    model = tiny(FAMILIES[name])
    one, other = CausalScorer(model), CausalScorer(model)
    one.fuse([4])
    asked: list[Any] = []
    chain = one.chain
    one.chain = lambda wish: asked.append(chain(wish)) or asked[-1]  # type: ignore[method-assign]
    for left, right in zip(drafts(one, sampler), drafts(other, sampler), strict=True):
        assert left.tokens.tolist() == right.tokens.tolist() and left.lengths == right.lengths
        assert left.law is not None and right.law is not None and left.law.point == right.law.point
        if not left.law.point:
            torch.testing.assert_close(left.law.dense, right.law.dense, atol=1e-6, rtol=1e-4)
    assert one.lengths == other.lengths
    assert len(asked) == 3 and None not in asked


def test_what_a_temperature_alone_does_not_make_is_drafted_token_by_token(untraced: None) -> None:
    scorer = CausalScorer(tiny(FAMILIES["llama"]))
    scorer.fuse([4])
    scorer.chain = lambda wish: pytest.fail("asked for a chain")  # type: ignore[method-assign]
    for sampler in (Sampling(temperature=1, top_k=5), Sampling(logit_bias={3: 2.0}), Sampling(processors=[_same])):
        drafts(scorer, sampler)


def test_wishes_that_no_graph_serves_are_declined(untraced: None) -> None:
    scorer = CausalScorer(tiny(FAMILIES["llama"]))
    wish = fused.Wish((1, 2), 3, 0.0, HF_VOCAB)
    assert scorer.chain(wish) is None  # nobody asked for chains
    scorer.fuse([3])
    scorer.add(1)
    assert scorer.chain(wish) is not None and scorer.lengths == [2 + 3 - 1]  # nothing was in the cache
    scorer.rollback([0])
    scorer.prefill([[1, 2, 3]])
    assert scorer.chain(fused.Wish((1, 2), 4, 0.0, HF_VOCAB)) is None  # longer than the graph
    assert scorer.chain(wish) is not None and scorer.lengths == [3 + 2 + 3 - 1]
    scorer.add(1)
    assert scorer.chain(wish) is None  # two texts


def test_damaged_weights_are_told_as_ever(untraced: None) -> None:
    model = tiny(FAMILIES["llama"])
    scorer = CausalScorer(model)
    scorer.fuse([4])
    with torch.no_grad():
        model.get_output_embeddings().weight[5] = float("nan")
    with pytest.raises(FloatingPointError, match="non-finite"):
        drafts(scorer, Sampling())


def test_a_graph_that_cannot_be_made_gives_way_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(tracing.torch, "compile", lambda function, **_: broken)
    model = tiny(FAMILIES["llama"])
    one, other = CausalScorer(model), CausalScorer(model)
    one.fuse([4])
    with pytest.warns(RuntimeWarning, match="drafts token by token.*no compiler here") as caught:
        found = drafts(one, Sampling())
    assert len(caught) == 1
    assert [draft.tokens.tolist() for draft in found] == [draft.tokens.tolist() for draft in drafts(other, Sampling())]


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 1.0])
def test_a_real_graph_drafts_the_same(temperature: float) -> None:
    model, said = tiny(FAMILIES["llama"], num_hidden_layers=1), list[str]()
    one, other, sampler = CausalScorer(model), CausalScorer(model), Sampling(temperature=temperature)
    one.fuse([2], said.append)
    for left, right in zip(drafts(one, sampler, (2, 1, 2)), drafts(other, sampler, (2, 1, 2)), strict=True):
        assert left.tokens.tolist() == right.tokens.tolist()
    assert said == [f"compiling {one.name} for {'sampled' if temperature else 'greedy'} chains of 2 tokens"]


@pytest.mark.skipif(not can_pack(tiny(FAMILIES["llama"])), reason="nothing can be packed here")
def test_another_model_of_the_same_shape_has_its_own_weights_in_its_graph() -> None:
    """Torch keeps graphs by their shapes: one from its cache must read the weights of the model at hand."""
    for seed in (0, 1):
        model, sampler = packed(tiny(FAMILIES["llama"], seed, num_hidden_layers=1)), Sampling(temperature=1.0)
        one, other = CausalScorer(model), CausalScorer(model)
        one.fuse([2])
        for left, right in zip(drafts(one, sampler, (2, 1, 2)), drafts(other, sampler, (2, 1, 2)), strict=True):
            assert left.law is not None and right.law is not None
            torch.testing.assert_close(left.law.dense, right.law.dense, atol=1e-6, rtol=1e-4)


def _same(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores
