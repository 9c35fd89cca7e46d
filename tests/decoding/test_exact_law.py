"""The claim of the paper, exactly: the joint law of the first tokens is the target's own (A.1 of arXiv 2211.17192).

Every outcome of every draw is enumerated, so nothing here is random and no test can fail by chance. The negative
controls are plausible mistakes; each must be caught by the same comparison.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from slipstream.core.draft import Draft, Verdict, Verifier
from slipstream.core.draws import Rng
from slipstream.core.law import Law
from slipstream.core.protocols import Drafter
from slipstream.core.request import Prefixes, Row, Sampler
from slipstream.decoding.acceptance import token
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.generate import generate, plain
from slipstream.decoding.sampling import Sampling
from slipstream.drafters.model import ModelDrafter
from toys.drafts import Altered, drop_what_looks_bad, first_tokens, flat, likely, text_law
from toys.enumeration import EXACT, WRONG, Distribution, enumerate_outcomes, total_variation
from toys.tables import PAIRS, VOCAB, Step, Table, plain_law, scorer
from toys.texts import SAMPLE, Cycle, rare, request

PROMPT = (0, 2)
COUNT = 3

Wrap = Callable[[Drafter], Drafter]


@dataclass(frozen=True)
class Case:
    """What is enumerated: a pair of tables, a sequence of gammas, and the parts under test."""

    tables: tuple[Table, Table]
    gammas: tuple[int, ...]
    sampler: Sampler = SAMPLE
    verifier: Verifier = token
    wrap: Wrap = lambda drafter: drafter

    def decoder(self, rng: Rng) -> Decoder:
        target, draft = scorer(self.tables[0], "target"), scorer(self.tables[1], "draft")
        return Decoder(target, self.wrap(ModelDrafter(draft)), self.verifier, Cycle(self.gammas), rng=rng)

    def law(self, limit: int = COUNT) -> Distribution:
        """The joint law of the first COUNT tokens, with room for `limit`."""
        return first_tokens(self.decoder, PROMPT, COUNT, limit, self.sampler)


@pytest.mark.parametrize("gammas", [(0,), (1,), (2,), (2, 0, 1)], ids=str)
@pytest.mark.parametrize("pair", PAIRS)
def test_the_output_law_is_the_targets(pair: str, gammas: tuple[int, ...]) -> None:
    want = plain_law(PAIRS[pair][0], PROMPT, COUNT)
    assert total_variation(Case(PAIRS[pair], gammas).law(), want) < EXACT


@pytest.mark.parametrize("pair", ["zeros", "disjoint"])
def test_the_law_does_not_depend_on_the_room_that_is_left(pair: str) -> None:
    """Without the limit close by, rounds are not shortened and run past the tokens that are compared."""
    law = Case(PAIRS[pair], (2, 1)).law(limit=7)
    assert total_variation(law, plain_law(PAIRS[pair][0], PROMPT, COUNT)) < EXACT


def test_the_pairs_are_what_their_names_say() -> None:
    prefixes = [PROMPT, (*PROMPT, 1), (*PROMPT, 2, 2), (*PROMPT, 0, 1)]
    laws = {name: [(p(x), q(x)) for x in prefixes] for name, (p, q) in PAIRS.items()}
    overlap = {
        name: [sum(map(min, p, q)) for p, q in rows]  # type: ignore[arg-type]
        for name, rows in laws.items()
    }
    assert all(0 < x < 1 for x in overlap["generic"])
    assert overlap["same"] == pytest.approx([1] * 4)
    assert overlap["disjoint"] == [0] * 4
    assert any(0 in p for p, _ in laws["zeros"]) and any(0 in q for _, q in laws["zeros"])
    assert any(max(p) == 1 for p, _ in laws["points"]) and any(max(q) == 1 for _, q in laws["points"])


# ---- processors -------------------------------------------------------------------------------------------------


def processed(table: Table, *processors: Any) -> Step:
    """Plain decoding with transformers' own processors, one position at a time."""
    chain = LogitsProcessorList(processors)

    @cache
    def step(prefix: tuple[int, ...]) -> tuple[float, ...]:
        scores = torch.tensor([table(prefix)], dtype=torch.float64).log()
        return tuple(chain(torch.tensor([prefix]), scores).softmax(-1)[0].tolist())

    return step


SETTINGS: dict[str, tuple[Sampling, Sequence[Any]]] = {
    "top_k": (Sampling(temperature=1.0, top_k=2), [TopKLogitsWarper(2)]),
    "repetition": (
        Sampling(temperature=1.5, repetition_penalty=2.5),
        [RepetitionPenaltyLogitsProcessor(2.5), TemperatureLogitsWarper(1.5)],
    ),
}


@pytest.mark.parametrize("gammas", [(1,), (2,), (2, 0, 1)], ids=str)
@pytest.mark.parametrize("pair", ["generic", "zeros"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_law_after_processors_is_that_of_plain_decoding(setting: str, pair: str, gammas: tuple[int, ...]) -> None:
    sampler, processors = SETTINGS[setting]
    want = plain_law(processed(PAIRS[pair][0], *processors), PROMPT, COUNT)
    assert total_variation(want, plain_law(PAIRS[pair][0], PROMPT, COUNT)) > WRONG, "the setting has no effect"
    assert total_variation(Case(PAIRS[pair], gammas, sampler).law(), want) < EXACT


# ---- several rows -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", ["zeros", "points"])
def test_two_rows_are_independent(pair: str) -> None:
    """The joint law of two texts of different length and limit is the product of each alone."""
    prompts, limits = [(1,), (0, 2, 1)], [1, 2]

    def run(rng: Rng) -> tuple[tuple[int, ...], ...]:
        requests = [request(*x, key=key) for key, x in enumerate(zip(prompts, limits, strict=True))]
        return tuple(tuple(row.output) for row in generate(Case(PAIRS[pair], (2,)).decoder(rng), requests))

    laws = [plain_law(PAIRS[pair][0], prompt, limit) for prompt, limit in zip(prompts, limits, strict=True)]
    want = {(x, y): p * q for x, p in laws[0].items() for y, q in laws[1].items()}
    assert len(want) > 3
    assert total_variation(enumerate_outcomes(run), want) < EXACT


@pytest.mark.parametrize("batch_size", [1, 2])
def test_rows_that_join_late_keep_their_law(batch_size: int) -> None:
    """Three requests for fewer places, with an end of text in the middle of a round."""
    prompts, limits, eos = [(1,), (2,), (0, 2)], [1, 2, 1], frozenset({1})
    target = PAIRS["zeros"][0]

    def run(rng: Rng) -> tuple[tuple[int, ...], ...]:
        decoder = replace(Case(PAIRS["zeros"], (1,)).decoder(rng), batch_size=batch_size)
        places = enumerate(zip(prompts, limits, strict=True))
        requests = [request(prompt, limit, eos=eos, key=key) for key, (prompt, limit) in places]
        return tuple(tuple(row.output) for row in generate(decoder, requests))

    laws = [plain_law(target, prompt, limit, ends=(1,)) for prompt, limit in zip(prompts, limits, strict=True)]
    want = {texts: math.prod(map(dict.__getitem__, laws, texts)) for texts in product(*laws)}
    assert {len(text) for text in laws[1]} == {1, 2}
    assert total_variation(enumerate_outcomes(run), want) < EXACT


@pytest.mark.parametrize("draft_vocab", [2, 4])
def test_the_law_is_exact_when_the_vocabularies_differ(draft_vocab: int) -> None:
    """A draft that lacks a token of the target, and one that has padding beyond it."""
    target = PAIRS["generic"][0]

    def draft(prefix: tuple[int, ...]) -> tuple[float, ...]:
        assert max(prefix) < draft_vocab, "it is fed what it does not know"
        return (0.5, 0.5) if draft_vocab == 2 else (0.1, 0.2, 0.3, 0.4)

    drafter = ModelDrafter(scorer(draft, "draft", vocab=draft_vocab), vocab=VOCAB)
    decoder = Decoder(scorer(target, "target"), drafter, controller=Cycle((2,)))
    assert total_variation(text_law(decoder, COUNT, PROMPT), plain_law(target, PROMPT, COUNT)) < EXACT


@pytest.mark.parametrize("context", [3, 4])
def test_the_law_is_exact_when_the_draft_sees_a_window_only(context: int) -> None:
    target, draft = PAIRS["generic"]

    def seeing(prefix: tuple[int, ...]) -> Sequence[float]:
        assert len(prefix) <= context
        return draft(prefix)

    def run(rng: Rng) -> tuple[int, ...]:
        drafter = ModelDrafter(scorer(seeing, "draft", context=context))
        decoder = Decoder(scorer(target, "target"), drafter, controller=Cycle((2, 1)), rng=rng)
        (row,) = generate(decoder, [request((0, 2, 1, 1), COUNT)])
        assert row.stats.drafted > 0
        return tuple(row.output)

    assert total_variation(enumerate_outcomes(run), plain_law(target, (0, 2, 1, 1), COUNT)) < EXACT


def test_plain_decoding_has_the_same_law() -> None:
    def run(rng: Rng) -> tuple[int, ...]:
        (row,) = plain(Case(PAIRS["zeros"], (2,)).decoder(rng), [request(PROMPT, COUNT)])
        assert row.stats.drafted == 0
        return tuple(row.output)

    assert total_variation(enumerate_outcomes(run), plain_law(PAIRS["zeros"][0], PROMPT, COUNT)) < EXACT


# ---- negative controls ------------------------------------------------------------------------------------------


def dense(law: Law) -> Tensor:
    assert law.probs is not None
    return law.probs


def always_accept(p: Law, draft: Draft, draw: Callable[..., Tensor]) -> Verdict:
    verdict = token(p, draft, draw)
    return Verdict(torch.tensor(draft.lengths), p.at(torch.tensor(draft.lengths)), verdict.beta)


def never_accept_and_correct(p: Law, draft: Draft, draw: Callable[..., Tensor]) -> Verdict:
    """Draws from the residual although nothing was tested."""
    verdict = token(p, draft, draw)
    if draft.law is None:
        return verdict
    rest = (dense(p)[:, :1] - dense(draft.law)[:, :1]).clamp(min=0) + 1e-300
    return Verdict(torch.zeros_like(verdict.accepted), Law(probs=rest / rest.sum(-1, keepdim=True)), verdict.beta)


def resample_from_p(p: Law, draft: Draft, draw: Callable[..., Tensor]) -> Verdict:
    """After a rejection draws from p instead of the residual."""
    verdict = token(p, draft, draw)
    return Verdict(verdict.accepted, p.at(verdict.accepted), verdict.beta)


def residual_without_clamp(p: Law, draft: Draft, draw: Callable[..., Tensor]) -> Verdict:
    """Renormalizes |p - q| instead of max(0, p - q)."""
    verdict = token(p, draft, draw)
    if draft.law is None or int(verdict.accepted) == draft.lengths[0]:
        return verdict
    rest = (dense(p.at(verdict.accepted)) - dense(draft.law.at(verdict.accepted))).abs()
    return Verdict(verdict.accepted, Law(probs=rest), verdict.beta)


def residual_one_too_early(p: Law, draft: Draft, draw: Callable[..., Tensor]) -> Verdict:
    """Corrects with the laws of the position before."""
    verdict = token(p, draft, draw)
    if draft.law is None or not 0 < int(verdict.accepted) < draft.lengths[0]:
        return verdict
    before = verdict.accepted - 1
    rest = (dense(p.at(before)) - dense(draft.law.at(before))).clamp(min=0) + 1e-300
    return Verdict(verdict.accepted, Law(probs=rest), verdict.beta)


def bonus_one_too_early(p: Law, draft: Draft, draw: Callable[..., Tensor]) -> Verdict:
    """After a full acceptance draws from the law of the last drafted position."""
    verdict = token(p, draft, draw)
    if draft.law is None or int(verdict.accepted) < draft.lengths[0]:
        return verdict
    return Verdict(verdict.accepted, p.at(verdict.accepted - 1), verdict.beta)


def one_coin_for_all(p: Law, draft: Draft, draw: Callable[..., Tensor]) -> Verdict:
    """Keeps the whole draft or nothing by the first test."""
    verdict = token(p, draft, draw)
    if draft.law is None or int(verdict.accepted) == 0:
        return verdict
    return Verdict(torch.tensor(draft.lengths), p.at(torch.tensor(draft.lengths)), verdict.beta)


VERIFIERS: list[Verifier] = [
    always_accept,
    never_accept_and_correct,
    resample_from_p,
    residual_without_clamp,
    residual_one_too_early,
    bonus_one_too_early,
    one_coin_for_all,
]


@pytest.mark.parametrize("verifier", [VERIFIERS[0], *rare(*VERIFIERS[1:])], ids=lambda verifier: verifier.__name__)
def test_control_a_wrong_verifier_is_caught(verifier: Verifier) -> None:
    make = Case(PAIRS["generic"], (2,), verifier=verifier).decoder
    law = enumerate_outcomes(lambda rng: tuple(generate(make(rng), [request(PROMPT, COUNT)])[0].output))
    assert total_variation(law, plain_law(PAIRS["generic"][0], PROMPT, COUNT)) > WRONG


@pytest.mark.parametrize("change", [flat, *rare(drop_what_looks_bad)], ids=lambda change: change.__name__)
def test_control_a_dishonest_drafter_is_caught(change: Callable[[Draft], Draft]) -> None:
    case = Case(PAIRS["generic"], (2,), wrap=lambda drafter: Altered(drafter, change))
    assert total_variation(case.law(), plain_law(PAIRS["generic"][0], PROMPT, COUNT)) > WRONG


def test_a_draft_may_stop_after_a_token_that_is_submitted() -> None:
    """The exact counterpart of the control above: the unexpected token itself is still tested."""

    def stop_after(draft: Draft) -> Draft:
        return draft if draft.law is None else replace(draft, lengths=likely(draft, 1))

    case = Case(PAIRS["generic"], (2,), wrap=lambda drafter: Altered(drafter, stop_after))
    assert total_variation(case.law(), plain_law(PAIRS["generic"][0], PROMPT, COUNT)) < EXACT


@dataclass(frozen=True)
class FrozenPenalties:
    """Applies the processors of a round's start to all of its positions."""

    inner: Sampling
    greedy: bool = False

    def law(self, logits: Tensor, rows: Sequence[Row], texts: Prefixes, model: str) -> Law:
        none = Prefixes(texts.drafted, [()])
        laws = [self.inner.law(logits[:, j : j + 1], rows, none, model) for j in range(logits.shape[1])]
        return Law.join(laws, 1)


def test_control_penalties_frozen_at_the_start_of_the_round_are_caught() -> None:
    sampler, processors = SETTINGS["repetition"]
    assert isinstance(sampler, Sampling)
    want = plain_law(processed(PAIRS["generic"][0], *processors), PROMPT, COUNT)
    assert total_variation(Case(PAIRS["generic"], (2,), FrozenPenalties(sampler)).law(), want) > WRONG


def test_control_a_cache_that_is_not_rolled_back_is_caught() -> None:
    """The target keeps rejected tokens; the loop must notice or the law must differ."""

    def decoder(rng: Rng) -> Decoder:
        made = Case(PAIRS["generic"], (2,)).decoder(rng)
        made.target.rollback = lambda lengths: None  # type: ignore[method-assign]
        return made

    law = first_tokens(decoder, PROMPT, COUNT, COUNT)
    assert total_variation(law, plain_law(PAIRS["generic"][0], PROMPT, COUNT)) > WRONG
