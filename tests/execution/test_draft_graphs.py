"""Chains drafted by graphs: the same tokens and laws as token by token, for one text and for batches."""

from itertools import product
from typing import Any

import pytest
import torch

import slipstream
from scripted import LATE, ONE, THREE, Gammas, agree, drafts
from slipstream.decoding.sampling import Sampling
from slipstream.execution import draft_graphs
from slipstream.models.causal import CausalScorer
from toys import FAMILIES, HF_VOCAB, tiny


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "gemma2", "opt"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("rounds", [ONE, THREE, LATE])
def test_a_chain_is_what_token_by_token_would_have_been(name: str, temperature: float, rounds: Gammas) -> None:
    model, samplers = tiny(FAMILIES[name]), [Sampling(temperature=temperature)] * len(rounds[0])
    one, other = CausalScorer(model), CausalScorer(model)
    one.make_draft_graphs([4])
    asked: list[Any] = []
    chain = one.chain
    one.chain = lambda wish: asked.append(chain(wish)) or asked[-1]  # type: ignore[method-assign]
    for left, right in zip(drafts(one, samplers, rounds), drafts(other, samplers, rounds), strict=True):
        agree(left, right)
    assert one.lengths == other.lengths
    assert len(asked) == 3 and None not in asked


def test_chains_of_unknown_length_are_made_of_steps() -> None:
    model, samplers = tiny(FAMILIES["llama"]), [Sampling(temperature=0.7)]
    one, other = CausalScorer(model), CausalScorer(model)
    one.make_draft_graphs([])
    for left, right in zip(drafts(one, samplers, ONE), drafts(other, samplers, ONE), strict=True):
        agree(left, right)
    assert one.draft_graphs is not None and {kind.size for kind in one.draft_graphs.made} == {1}


@pytest.mark.parametrize("heats", [(0.3, 1.0, 2.0), (0.0, 1.0, 0.7), (2.0, 0.0, 0.0)])
def test_texts_of_a_batch_have_each_its_temperature(heats: tuple[float, ...]) -> None:
    model, samplers = tiny(FAMILIES["llama"]), [Sampling(temperature=heat) for heat in heats]
    one, other = CausalScorer(model), CausalScorer(model)
    one.make_draft_graphs([4])
    for left, right in zip(drafts(one, samplers, THREE), drafts(other, samplers, THREE), strict=True):
        agree(left, right)


@pytest.mark.parametrize(
    "samplers",
    [
        [Sampling(temperature=1, top_k=5)],
        [Sampling(logit_bias={3: 2.0})],
        [Sampling(temperature=1), Sampling(temperature=1, top_k=5), Sampling(temperature=1)],
    ],
)
def test_what_temperatures_alone_do_not_make_is_drafted_token_by_token(samplers: list[Sampling]) -> None:
    scorer = CausalScorer(tiny(FAMILIES["llama"]))
    scorer.make_draft_graphs([4])
    scorer.chain = lambda wish: pytest.fail("asked for a chain")  # type: ignore[method-assign]
    drafts(scorer, samplers, THREE if len(samplers) > 1 else ONE)


def test_processors_of_a_user_are_asked_token_by_token() -> None:
    scorer = CausalScorer(tiny(FAMILIES["llama"]))
    scorer.make_draft_graphs([4])
    scorer.chain = lambda wish: pytest.fail("asked for a chain")  # type: ignore[method-assign]
    drafts(scorer, [Sampling(processors=[_same])], ONE)


def test_what_no_chain_serves_is_made_of_steps() -> None:
    scorer = CausalScorer(tiny(FAMILIES["llama"]))

    def wish(gamma: int, texts: int = 1) -> draft_graphs.Wish:
        return draft_graphs.Wish([(1, 2)] * texts, [gamma] * texts, [0.0] * texts, HF_VOCAB)

    scorer.add(1)
    assert scorer.chain(wish(3)) is None  # nobody asked for chains
    scorer.make_draft_graphs([3])
    assert scorer.chain(wish(3)) is not None and scorer.lengths == [2 + 3 - 1]  # nothing was in the cache
    scorer.rollback([0])
    scorer.prefill([[1, 2, 3]])
    assert scorer.chain(wish(3)) is not None and scorer.lengths == [3 + 2 + 3 - 1]
    assert scorer.draft_graphs is not None and {kind.size for kind in scorer.draft_graphs.made} == {1}
    assert scorer.chain(wish(4)) is not None and scorer.lengths == [7 + 2 + 4 - 1]
    scorer.add(1)
    assert scorer.chain(wish(3, texts=2)) is not None
    assert scorer.lengths == [12 + 2 + 3 - 1, 2 + 3 - 1]


@pytest.mark.parametrize("texts", [1, 2])
def test_chains_are_drafted_for_the_first_rows_alone(texts: int) -> None:
    """What lies behind them, as long as it may be, takes no part and stays."""
    model = tiny(FAMILIES["llama"], max_position_embeddings=64)
    found = []
    for behind in ([], [list(range(1, 62))]):
        scorer = CausalScorer(model)
        scorer.make_draft_graphs([3])
        prompts = [[1, 2, 3], [4, 5]][:texts]
        scorer.add(len(prompts) + len(behind))
        scorer.prefill([*prompts, *behind])
        found.append(scorer.chain(draft_graphs.Wish([(7, 8)] * texts, [3] * texts, [0.0] * texts, HF_VOCAB)))
        assert scorer.lengths == [*(len(text) + 4 for text in prompts), *map(len, behind)]
    (left, _), (right, _) = (each for each in found if each is not None)
    assert left.tolist() == right.tolist()


@pytest.mark.parametrize("fed", [[(7, 8), (9,), (6, 5)], [(7,), (9, 4), ()], [(7,), (9,), (6,)]])
def test_texts_that_are_fed_more_or_fewer_tokens_draft_as_alone(fed: list[tuple[int, ...]]) -> None:
    model, prompts = tiny(FAMILIES["llama"]), [[1, 2, 3], [4, 5, 6, 7, 8], [9, 1]]
    together = CausalScorer(model)
    together.make_draft_graphs([])
    together.add(3)
    together.prefill(prompts)
    heads: list[tuple[int, ...]] = []
    hook = model.lm_head.register_forward_hook(lambda _, args, out: heads.append(tuple(out.shape[:2])))
    drafted = together.chain(draft_graphs.Wish(fed, [3 * bool(new) for new in fed], [0.0] * 3, HF_VOCAB))
    hook.remove()
    assert heads and {columns for _, columns in heads} == {1}, "the head is computed for the last column alone"
    assert drafted is not None
    for row, (prompt, new) in enumerate(zip(prompts, fed, strict=True)):
        alone = CausalScorer(model)
        alone.make_draft_graphs([])
        alone.add(1)
        alone.prefill([prompt])
        if new:
            other = alone.chain(draft_graphs.Wish([new], [3], [0.0], HF_VOCAB))
            assert other is not None and other[0].tolist() == drafted[0][row : row + 1].tolist()
            assert alone.lengths == [together.lengths[row]]
        else:
            assert together.lengths[row] == len(prompt)


def test_damaged_weights_are_told_as_ever() -> None:
    model = tiny(FAMILIES["llama"])
    scorer = CausalScorer(model)
    scorer.make_draft_graphs([4])
    with torch.no_grad():
        model.get_output_embeddings().weight[5] = float("nan")
    with pytest.warns(RuntimeWarning, match="non-finite"):
        drafts(scorer, [Sampling()], ONE)


def test_a_draft_that_cannot_be_recorded_gives_way_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no program here")

    monkeypatch.setattr(draft_graphs, "recorded", broken)
    model = tiny(FAMILIES["llama"])
    one, other = CausalScorer(model), CausalScorer(model)
    one.make_draft_graphs([4])
    with pytest.warns(RuntimeWarning, match="drafts token by token.*no program here") as caught:
        found = drafts(one, [Sampling()], ONE)
    assert len(caught) == 1
    want = drafts(other, [Sampling()], ONE)
    assert [draft.tokens.tolist() for draft in found] == [draft.tokens.tolist() for draft in want]


@pytest.mark.parametrize("gamma", [pytest.param("auto", marks=pytest.mark.slow), 3])
def test_warming_up_makes_every_graph_that_texts_need(gamma: str | int) -> None:
    """Whatever stands and whatever a controller chooses: alone and in a batch, greedy and sampled, one or two fed."""
    engine = slipstream.load(gamma=gamma)
    small: Any = engine.decoder.scorers[1]
    small.make_draft_graphs([] if gamma == "auto" else [3])
    engine.warm_up((1, 2), (Sampling(), Sampling(temperature=1.0)))
    made = small.draft_graphs.made
    assert {(kind.width, kind.sampled) for kind in made} == set(product((1, 2), (False, True)))
    texts = [f"def part_{number}(x):\n    return" for number in range(5)]
    for count, temperature in product((1, 2, 5), (0.0, 1.0)):
        for seed in range(2 if temperature else 1):
            engine.generate(texts[:count], max_new_tokens=16, temperature=temperature, seed=seed)
    assert small.draft_graphs.made == made


def _same(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores
