"""The methods that the paper is compared with: the laws they say they have, their prices, and the plane they make."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from reproduction import plane
from reproduction.baselines.drafting import ScoredDrafter, probabilities
from reproduction.baselines.rules import cascade, committee, typical
from reproduction.lab import Inputs, Lab
from reproduction.pages.sheet import sheet
from reproduction.runs.methods import BASELINES, EXACT
from slipstream.core.draft import Verifier
from slipstream.core.draws import Rng
from slipstream.core.law import Law, total_variation
from slipstream.decoding import acceptance, rules
from slipstream.decoding.controllers import Fixed
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.generate import generate
from slipstream.drafters.following import Follower
from slipstream.drafters.model import ModelDrafter
from toys import EXACT as NOTHING
from toys import GREEDY, PAIRS, SAMPLE, VOCAB, WRONG, first_tokens, plain_law, request, scorer
from toys import total_variation as tv

PROMPT = (0, 2)


def decoder(pair: str, verify: Verifier, rng: Rng, gamma: int = 1, sure: float = 0.0) -> Decoder:
    target, draft = (scorer(table, name) for table, name in zip(PAIRS[pair], ("target", "draft"), strict=True))
    return Decoder(target, ScoredDrafter(Follower(draft), VOCAB, sure), verify, Fixed(gamma), rng=rng)


def laws(pair: str) -> tuple[Tensor, Tensor]:
    p, q = (torch.tensor(table(PROMPT), dtype=torch.float64) for table in PAIRS[pair])
    return p, q


def typical_law(p: Tensor, q: Tensor, epsilon: float) -> Tensor:
    """By hand: what passes keeps its chance under q, the rest goes to p."""
    entropy = -sum(float(x) * float(x.log()) for x in p if x > 0)
    bar = min(epsilon, epsilon**0.5 * 2.718281828459045 ** (-entropy))
    kept = torch.tensor([float(b) if a > bar else 0.0 for a, b in zip(p, q, strict=True)], dtype=torch.float64)
    return kept + (1 - kept.sum()) * p


def cascade_law(p: Tensor, q: Tensor, alpha: float) -> Tensor:
    return q if q.max() >= p.max() - alpha * total_variation(p, q) else p


@pytest.mark.parametrize("value", [0.01, 0.3, 1.0])
@pytest.mark.parametrize("pair", PAIRS)
def test_a_method_has_the_law_and_the_price_that_it_says(pair: str, value: float) -> None:
    """The first token, every draw enumerated; the price is the distance that the verdict reports."""
    p, q = laws(pair)
    for verify, said in ((typical(value), typical_law(p, q, value)), (cascade(value), cascade_law(p, q, value))):
        got = first_tokens(lambda rng, verify=verify: decoder(pair, verify, rng), PROMPT, 1, 2)
        assert tv(got, {(token,): float(x) for token, x in enumerate(said)}) < NOTHING
        row = generate(decoder(pair, verify, rules.TOKEN.rng), [request(PROMPT, 2, SAMPLE)])[0]
        assert row.stats.distance == pytest.approx(float(total_variation(said, p)), abs=1e-6)


def test_the_methods_are_lossy() -> None:
    """A control: on laws that differ, each of them has another law than the target at some setting."""
    for verify in (typical(0.01), cascade(1.0), committee):
        got = first_tokens(lambda rng, verify=verify: decoder("generic", verify, rng), PROMPT, 1, 2)
        assert tv(got, plain_law(PAIRS["generic"][0], PROMPT, 1)) > WRONG


@pytest.mark.parametrize("pair", PAIRS)
def test_a_committee_takes_the_draft_where_it_is_sure(pair: str) -> None:
    _, q = laws(pair)
    for sure in (0.0, float(q.max()) - 0.01, float(q.max()) + 0.01):
        got = first_tokens(lambda rng, sure=sure: decoder(pair, committee, rng, sure=sure), PROMPT, 1, 2)
        trusted = float(q.max()) >= sure
        want = PAIRS[pair][1 if trusted else 0]
        assert tv(got, plain_law(want, PROMPT, 1)) < NOTHING


@pytest.mark.parametrize("pair", ["zeros", "disjoint", "same"])
def test_the_scored_drafter_drafts_as_the_model_does(pair: str) -> None:
    """Exact under an exact rule, also where it stops early; greedily the same text as `ModelDrafter`."""
    for sure in (0.0, 0.5):
        got = first_tokens(lambda rng, sure=sure: decoder(pair, acceptance.token, rng, 2, sure), PROMPT, 2, 3)
        assert tv(got, plain_law(PAIRS[pair][0], PROMPT, 2)) < NOTHING
    requests = [request((0, place), 6, GREEDY, key=place) for place in range(VOCAB)]
    made = decoder(pair, acceptance.token, rules.TOKEN.rng, 3)
    other = Decoder(made.target, ModelDrafter(scorer(PAIRS[pair][1], "draft")), acceptance.token, Fixed(3))
    ours, expected = ([row.output for row in generate(each, requests)] for each in (made, other))
    assert ours == expected


def test_greedy_prices_count_the_tokens_that_the_target_would_not_choose() -> None:
    p, q = [0.5, 0.3, 0.2], [0.1, 0.8, 0.1]
    for verify, price in ((cascade(0.0), 1.0), (committee, 1.0), (typical(0.01), 0.0)):
        target, draft = (scorer(lambda prefix, x=x: x, "toy") for x in (p, q))
        made = Decoder(target, ScoredDrafter(Follower(draft), VOCAB), verify, Fixed(1))
        row = generate(made, [request(PROMPT, 8, GREEDY)])[0]
        assert row.stats.distance / max(1, row.stats.accepted) == pytest.approx(price)
        assert (row.stats.accepted > 0) == bool(price)


def test_no_rule_of_the_engine_is_lossy_unasked() -> None:
    for name in ("typical", "cascade", "committee", "typical:0.3"):
        with pytest.raises(ValueError, match="is not known"):
            rules.rule(name)


class Bench(Lab):
    """A lab whose figures are given."""

    def baselines(self, task: str, temperature: int) -> dict[str, Any]:
        rows = [
            row("plain", 1.0, 0.0),
            *(row(each.method, 1.5, 0.0 if each.method == EXACT else 0.1) for each in BASELINES),
        ]
        return {
            "subject": task,
            "temperature": temperature,
            "gamma": 5,
            "texts": 3,
            "repetitions": 1,
            "rows": rows,
            "environment": {},
            "parameters": {},
            "dtypes": {},
        }


def row(method: str, speed: float, distance: float) -> dict[str, Any]:
    return {
        "method": method,
        "setting": "x",
        "over_plain": {"median": speed},
        "tokens_per_call": 2.0,
        "distance": distance,
        "same": 3,
        "of": 3,
    }


def test_the_plane_puts_exact_methods_on_its_line() -> None:
    made = plane.baselines(Bench(Inputs()))
    assert sheet(made.as_dict()) == made
    exact: Sequence[Any] = [curve for curve in made.curves if curve.label == EXACT]
    assert exact and all(set(curve.x) == {0.0} for curve in exact)
    assert {row[2] for row in made.rows} >= {each.method for each in BASELINES} | set(plane.METHODS_TRAINED)
    assert all(len(row) == len(made.columns) for row in made.rows)


def test_point_masses_need_their_scores() -> None:
    draft = Law(tokens=torch.zeros(1, 1, dtype=torch.long))
    with pytest.raises(AssertionError, match="scores"):
        probabilities(draft)
