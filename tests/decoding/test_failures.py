"""Rows that fail: they end with the reason and what was emitted before, the others never notice."""

import math
import re
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.cache.rows import RowCache
from slipstream.core.draws import Rng, draw
from slipstream.core.protocols import Drafter
from slipstream.core.request import Request, Row
from slipstream.decoding.controllers import Fixed
from slipstream.decoding.decoder import Decoder, NoDraft
from slipstream.decoding.generate import generate, plain, rounds, succeeded
from slipstream.decoding.rules import rule
from slipstream.decoding.sampling import Sampling
from slipstream.drafters.chain import ChainDrafter
from slipstream.drafters.model import ModelDrafter
from slipstream.drafters.tree import TreeDrafter
from slipstream.models.causal import CausalScorer
from toys.enumeration import enumerate_outcomes, total_variation
from toys.families import FAMILIES, tiny
from toys.tables import PAIRS, scorer
from toys.texts import request

BAD: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "nan": (lambda ids, scores: scores * math.nan, "it returns NaN"),
    "forbids": (lambda ids, scores: scores - math.inf, "no token is possible for text 1 after"),
    "shape": (lambda ids, scores: torch.cat([scores, scores], 1), r"it returns scores of shape \(1, 6\), and not"),
    "rows": (lambda ids, scores: torch.cat([scores, scores], 0), r"it returns scores of shape \(2, 3\), and not"),
    "nothing": (lambda ids, scores: None, "it returns no scores but NoneType"),
    "raises": (lambda ids, scores: {}["state 7"], "KeyError: 'state 7'"),
}
LONG = 9


def failing(bad: Callable[[Tensor, Tensor], Any], length: int) -> Callable[[Tensor, Tensor], Any]:
    """A processor that fails for texts of that length that begin with 1 1."""

    def processor(ids: Tensor, scores: Tensor) -> Any:
        fails = ids.shape[1] >= length and ids[0, :2].tolist() == [1, 1]
        return bad(ids, scores) if fails else scores - (ids[:, -1:] == torch.arange(scores.shape[1])).float()

    return processor


def requests(sampler: Sampling) -> list[Request]:
    """Three texts of different lengths, of which the second is to fail, and one that waits for a place."""
    prompts = [[2], [1, 1, 0], [0, 2], [2, 2, 2, 1]]
    return [request(prompt, LONG, sampler, key=key) for key, prompt in enumerate(prompts)]


def model_draft() -> Drafter:
    return ModelDrafter(scorer(PAIRS["generic"][1], "draft"))


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "plain": NoDraft,
    "model": model_draft,
    "tree": lambda: TreeDrafter(scorer(PAIRS["generic"][1], "draft"), (2, 2)),
    "chain": lambda: ChainDrafter(scorer(PAIRS["generic"][1], "draft"), model_draft()),
}


def decoder(drafter: Drafter, gamma: int = 3) -> Decoder:
    return Decoder(scorer(PAIRS["generic"][0], "target"), drafter, controller=Fixed(gamma), batch_size=3)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("draft", DRAFTERS)
@pytest.mark.parametrize("kind", BAD)
def test_a_row_that_fails_says_why_and_the_others_go_on(kind: str, draft: str, temperature: float) -> None:
    bad, says = BAD[kind]
    for length in (3, 6):  # at once, and in the middle of a round
        sampler = Sampling(temperature=temperature, processors=[failing(bad, length)])
        harmless = Sampling(temperature=temperature, processors=[failing(bad, 99)])
        parts = decoder(DRAFTERS[draft]())
        rows = generate(parts, requests(sampler))
        want = generate(decoder(DRAFTERS[draft]()), requests(harmless))
        assert parts.target.lengths == []
        for index in (0, 2, 3):
            assert (rows[index].output, rows[index].error) == (want[index].output, None)
        failed = rows[1]
        assert failed.finish_reason == "error" and len(failed.tokens) == length
        assert failed.tokens == want[1].tokens[:length]  # the same draws, up to there
        assert failed.stats.emitted == len(failed.output)
        assert re.search(rf"text 1 after {length} tokens.*{says}|{says} {length} tokens", failed.error or "")
        with pytest.raises((FloatingPointError, KeyError)) as raised:
            succeeded(rows)
        assert isinstance(raised.value, KeyError) == (kind == "raises")


def stuck(ids: Tensor, scores: Tensor) -> Tensor:
    """Fails behind some texts, which a draft reaches more often than the target does."""
    if ids[0, -1] == 2 and ids.shape[1] > 1:
        raise ValueError("stuck")
    return scores


@pytest.mark.parametrize(
    ("name", "draft"),
    [
        ("token", "model"),
        ("block", "chain"),
        *(pytest.param("token", draft, marks=pytest.mark.slow) for draft in ("tree", "chain")),
        pytest.param("block", "model", marks=pytest.mark.slow),
        pytest.param("block", "tree", marks=pytest.mark.slow),
        *(pytest.param("match", draft, marks=pytest.mark.slow) for draft in ("model", "chain")),
    ],
)
def test_speculation_fails_with_the_chance_of_plain_decoding(name: str, draft: str) -> None:
    """The joint law of the output and of its end, by enumeration of all draws."""

    def outcome(drafter: Callable[[], Drafter], gamma: int) -> Callable[[Rng], Any]:
        def run(rng: Rng) -> Any:
            parts = replace(decoder(drafter(), gamma), rng=rng, verifier=rule(name).verify)
            (row,) = generate(parts, [request([1], 3, Sampling(temperature=1.0, processors=[stuck]))])
            return tuple(row.output), row.finish_reason

        return run

    make = {**DRAFTERS, "tree": lambda: TreeDrafter(scorer(PAIRS["generic"][1], "draft"), (2, 1))}[draft]
    want = enumerate_outcomes(outcome(NoDraft, 0))
    assert any(reason == "error" for _, reason in want) and any(reason == "length" for _, reason in want)
    assert total_variation(enumerate_outcomes(outcome(make, 2), 300_000), want) < 1e-6


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("draft", ["model", "tree", "chain"])
def test_a_draft_without_a_law_costs_nothing_but_speed(draft: str, temperature: float) -> None:
    table = PAIRS["generic"][1]

    def damaged(prefix: tuple[int, ...]) -> Sequence[float]:
        return (math.nan,) * 3 if prefix[:2] == (1, 1) and len(prefix) > 4 else table(prefix)

    def drafters(step: Any) -> Drafter:
        broken = scorer(step, "draft")
        if draft == "tree":
            return TreeDrafter(broken, (2, 2))
        return ModelDrafter(broken) if draft == "model" else ChainDrafter(broken, model_draft())

    asked = requests(Sampling(temperature=temperature))
    says = pytest.warns(RuntimeWarning, match="draft gives non-finite logits, so that hardly any draft stands")
    with nullcontext() if draft == "chain" else says:
        rows = generate(decoder(drafters(damaged)), asked)
    want = generate(decoder(drafters(table)), asked)
    assert [row.finish_reason for row in rows] == ["length"] * 4
    for index in (0, 2, 3) if temperature else range(4):
        assert rows[index].output == want[index].output


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_processor_that_fails_on_drafts_alone_fails_no_text(temperature: float) -> None:
    """What the target never says is never asked for in plain decoding."""
    target = scorer(lambda prefix: (0.5, 0.5, 0.0), "target")
    draft = scorer(lambda prefix: (0.2, 0.0, 0.8), "draft")
    parts = Decoder(target, ModelDrafter(draft), controller=Fixed(3))
    rows = generate(parts, [request([1], 40, Sampling(temperature=temperature, processors=[stuck]))] * 2)
    assert [(row.finish_reason, row.error, len(row.output)) for row in rows] == [("length", None, 40)] * 2


def test_a_text_that_ends_before_the_place_of_failure_ends_well() -> None:
    sampler = Sampling(processors=[failing(BAD["nan"][0], 5)])
    (row,) = generate(decoder(model_draft()), [request([1, 1, 0], 2, sampler)])
    assert (row.finish_reason, row.error, len(row.output)) == ("length", None, 2)


def test_a_round_shows_the_row_that_failed() -> None:
    sampler = Sampling(processors=[failing(BAD["raises"][0], 3)])
    last = list(rounds(decoder(model_draft()), [request([1, 1, 0], 4, sampler)]))[-1]
    assert last.tokens == ((),) and last.accepted == (0,) and last.rows[0].finish_reason == "error"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("draft", [False, True])
def test_a_damaged_token_takes_no_other_text_with_it(temperature: float, draft: bool) -> None:
    """NaN in the embedding of one token goes to keys and values, behind which masks alone do not help."""
    model, other = tiny(FAMILIES["llama"]), tiny(FAMILIES["llama"], seed=1)
    sampler, prompts = Sampling(temperature=temperature), [[5, 6, 7], [8, 9], [10], [11, 12, 13, 14], [15]]
    asked = [request(prompt, 14, sampler, key=key) for key, prompt in enumerate(prompts)]

    def run(bad: int | None, batch: int) -> list[Row]:
        with torch.no_grad():
            model.get_input_embeddings().weight.copy_(saved)
            if bad is not None:
                model.get_input_embeddings().weight[bad] = math.nan
        drafter = ModelDrafter(CausalScorer(other)) if draft else NoDraft()
        return generate(Decoder(CausalScorer(model), drafter, controller=Fixed(3), batch_size=batch), asked)

    saved = model.get_input_embeddings().weight.clone()
    whole = run(None, 3)
    bad = whole[1].output[4]
    rows = run(bad, 3)
    for row, want in zip(rows, whole, strict=True):
        reached = min([*want.output, bad].index(bad) + 1, len(want.output))
        failed = row.finish_reason == "error"
        assert failed == (bad in want.output[:-1]) and row.output == want.output[: len(row.output)]
        # A rejected draft may damage the pass that it takes part in, but only its own text.
        assert len(row.output) == reached or (failed and draft and len(row.output) < reached)
    assert {row.finish_reason for row in rows} == {"error", "length"}
    assert rows[1].error is not None and "gives non-finite logits for position" in rows[1].error


def test_rows_that_move_up_leave_nothing_of_a_damaged_row_behind_them() -> None:
    cache = RowCache()
    cache.add(3)
    for layer in range(2):
        cache.place(6)
        keys = torch.ones(3, 1, 6, 4)
        keys[0] = math.nan
        cache.update(layer, keys, keys)
    cache.advance([6, 2, 3])
    cache.free([0])
    assert cache.lengths == [2, 3]
    assert not any(store.isnan().any() for stores in cache.stores for store in stores)
    cache.scrub()
    assert [int(stores[0][0].sum()) for stores in cache.stores] == [8, 8]


def test_a_processor_may_mend_what_the_model_gives_as_in_transformers() -> None:
    from transformers import InfNanRemoveLogitsProcessor

    target = scorer(lambda prefix: (0.4, math.nan, 0.6), "target")
    sampler = Sampling(processors=[InfNanRemoveLogitsProcessor()])
    (row,) = generate(Decoder(target), [request([1], 3, sampler)])
    assert row.error is None and len(row.output) == 3


def test_one_infinite_score_is_a_choice_when_decoding_greedily() -> None:
    """As torch.argmax takes it; a softmax cannot."""
    forced = torch.tensor([[0.0, math.inf, 0.0]])
    for temperature, reason in ((0.0, "length"), (1.0, "error")):
        sampler = Sampling(temperature=temperature, processors=[lambda ids, scores: scores + forced])
        (row,) = plain(decoder(model_draft()), [request([1], 3, sampler)])
        assert row.finish_reason == reason
        assert row.output == ([1, 1, 1] if temperature == 0 else [])


def test_sound_rows_give_no_warning_and_no_detour() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert succeeded(generate(decoder(model_draft()), requests(Sampling(temperature=1.0))))
    assert draw is decoder(NoDraft()).rng
