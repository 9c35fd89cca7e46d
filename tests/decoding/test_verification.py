"""Verification as CUDA graphs, with a recorder that repeats the work: what a GPU decides is what is decided eagerly."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from scripted import repeat
from slipstream.core.draft import Draft
from slipstream.core.draws import Rng, Sealed, draw, draw_coupled, inverse
from slipstream.core.law import Law
from slipstream.core.request import Request, Row
from slipstream.core.round import Context
from slipstream.decoding import verification
from slipstream.decoding.rules import BLOCK, MATCH, TOKEN, Rule, lenient
from slipstream.decoding.sampling import Sampling
from slipstream.decoding.verification import CapturedVerification, Outcome, verify_eagerly
from slipstream.execution import graphs
from slipstream.execution.graphs import GRAPHS

VOCAB, GAMMA = 40, 4
RULES = (TOKEN, BLOCK, MATCH)
SAMPLE = Sampling(temperature=0.7)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "cpu":
        monkeypatch.setattr(graphs, "record", repeat)
    elif not torch.cuda.is_available():
        pytest.skip("no GPU")
    return str(request.param)


def context(*samplers: Sampling, rng: Rng = draw, rules: tuple[Rule | None, ...] = (), start: int = 3) -> Context:
    rows = [
        Row(Request((1,) * (start + place), sampler, 100, seed=7, key=place), place, [1] * (start + place))
        for place, sampler in enumerate(samplers)
    ]
    for row, rule in zip(rows, rules, strict=False):
        row.request = replace(row.request, rule=rule)
    return Context(tuple(rows), rng)


def drafted(seed: int, lengths: tuple[int, ...], kind: str, device: str = "cpu") -> tuple[Tensor, Draft]:
    """Logits of a target, and a draft: dense laws that resemble the target's, copied tokens, or nothing."""
    generator, rows, gamma = torch.Generator().manual_seed(seed), len(lengths), max(lengths)
    logits = 6 * torch.randn(rows, gamma + 1, VOCAB, generator=generator)
    if not gamma:
        return logits.to(device), Draft(torch.empty(rows, 0, dtype=torch.long, device=device), None, lengths)
    if kind == "copied":
        tokens = logits[:, :-1].argmax(-1).to(device)
        return logits.to(device), Draft(tokens, Law(tokens=tokens), lengths)
    q = (logits[:, :-1] + 0.3 * torch.randn(rows, gamma, VOCAB, generator=generator)).softmax(-1).to(device)
    chances = torch.rand(rows, gamma, generator=generator, dtype=torch.float64)
    return logits.to(device), Draft(inverse(q, chances.to(device)), Law(probs=q), lengths)


def same(left: Outcome, right: Outcome) -> None:
    assert left.verdict.accepted.tolist() == right.verdict.accepted.tolist()
    assert left.following.tolist() == right.following.tolist() and left.faults == right.faults
    torch.testing.assert_close(left.verdict.beta.cpu(), right.verdict.beta.cpu().float(), atol=1e-5, rtol=1e-4)
    for one, other in ((left.p, right.p), (left.verdict.law, right.verdict.law)):
        for ours, theirs in ((one.probs, other.probs), (one.tokens, other.tokens)):
            assert (ours is None) == (theirs is None)
            if ours is not None and theirs is not None:
                torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def agree(captured: CapturedVerification, rule: Rule, rows: Context, logits: Tensor, draft: Draft) -> Outcome:
    """The outcome of verification by a graph, which is the same eagerly."""
    found, expected = (each(rule.verify, rows, logits, draft, "toy") for each in (captured, verify_eagerly))
    same(found, expected)
    return found


@pytest.mark.parametrize("kind", ["sampled", "copied"])
@pytest.mark.parametrize("sampler", [Sampling(), SAMPLE, Sampling(temperature=1.0)], ids=["greedy", "0.7", "1"])
@pytest.mark.parametrize("rule", RULES, ids=[rule.name for rule in RULES])
def test_graphs_decide_what_is_decided_eagerly(device: str, rule: Rule, sampler: Sampling, kind: str) -> None:
    """Ragged drafts, empty ones and full acceptance among them, by graphs that serve drafts of other lengths, too."""
    captured, before = CapturedVerification(), GRAPHS.captured
    shapes: tuple[tuple[int, ...], ...] = ((GAMMA,), (1,), (0,), (4, 2, 0, 3), (1, 4, 4, 4), (0, 0), (3, 1))
    counts = set[int]()
    for seed, (start, lengths) in enumerate(product(range(3, 12), shapes)):
        rows = context(*[sampler] * len(lengths), start=start)
        logits, draft = drafted(seed, lengths, kind, device)
        counts |= set(agree(captured, rule, rows, logits, draft).verdict.accepted.tolist())
    assert GRAPHS.captured - before == len({(len(lengths), max(lengths)) for lengths in shapes})
    assert counts == set(range(GAMMA + 1))


def test_rows_of_different_temperatures_share_a_graph(device: str) -> None:
    captured, before = CapturedVerification(), GRAPHS.captured
    for seed, temperatures in enumerate([(0.5, 1.0, 2.0), (1.5, 0.3, 0.9)] * 4):
        rows = context(*(Sampling(temperature=each) for each in temperatures))
        logits, draft = drafted(seed, (3, 3, 1), "sampled", device)
        work = (BLOCK.verify, rows, logits, draft, "toy")
        same(captured(*work), verify_eagerly(*work))
    assert GRAPHS.captured - before == 1


def test_of_many_graphs_those_that_ran_last_are_kept(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "MOST_GRAPHS", 2)
    captured, before = CapturedVerification(), GRAPHS.captured
    for lengths, made in (((1,), 1), ((2,), 2), ((1,), 2), ((3,), 3), ((1,), 3), ((2,), 4)):
        logits, draft = drafted(6, lengths, "sampled", device)
        agree(captured, BLOCK, context(SAMPLE), logits, draft)
        assert GRAPHS.captured - before == made


def test_draws_with_a_secret_are_made_by_graphs(device: str) -> None:
    captured, before = CapturedVerification(), GRAPHS.captured
    logits, draft = drafted(1, (4, 4), "sampled", device)
    for secret in range(5):
        rows = context(SAMPLE, SAMPLE, rng=Sealed(draw, secret))
        work = (TOKEN.verify, rows, logits, draft, "toy")
        same(captured(*work), verify_eagerly(*work))
    assert GRAPHS.captured - before == 1


EAGER: dict[str, dict[str, Any]] = {
    "greedy and sampled rows": {"samplers": (Sampling(), SAMPLE)},
    "top-k": {"samplers": (Sampling(temperature=1.0, top_k=5),) * 2},
    "coupled draws": {"samplers": (SAMPLE, SAMPLE), "rng": draw_coupled},
    "two rules": {"samplers": (SAMPLE, SAMPLE), "rules": (TOKEN, None)},
    "a lossy rule": {"samplers": (SAMPLE, SAMPLE), "rules": (lenient(0.5), lenient(0.5))},
}


@pytest.mark.parametrize("what", EAGER)
def test_what_graphs_do_not_serve_is_verified_eagerly(device: str, what: str) -> None:
    settings = dict(EAGER[what])
    rows, before = context(*settings.pop("samplers"), **settings), GRAPHS.captured
    logits, draft = drafted(2, (4, 3), "sampled", device)
    agree(CapturedVerification(), BLOCK, rows, logits, draft)
    assert GRAPHS.captured == before


@pytest.mark.parametrize("sampler", [Sampling(), SAMPLE], ids=["greedy", "sampled"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_reported_at_their_position(device: str, bad: float, sampler: Sampling) -> None:
    captured, rows = CapturedVerification(), context(sampler, sampler)
    logits, draft = drafted(3, (4, 4), "sampled", device)
    assert not captured(BLOCK.verify, rows, logits, draft, "toy").faults
    logits[1, 2, 5] = bad
    assert set(agree(captured, BLOCK, rows, logits, draft).faults) == {(1, 2)}


def test_verification_that_cannot_be_captured_stays_eager_after_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no graphs here")

    monkeypatch.setattr(graphs, "record", broken)
    captured, rows = CapturedVerification(), context(SAMPLE)
    logits, draft = drafted(4, (4,), "sampled")
    with pytest.warns(RuntimeWarning, match=r"toy verifies eagerly.*no graphs here") as caught:
        for _ in range(2):
            agree(captured, BLOCK, rows, logits, draft)
    assert len(caught) == 1


def test_control_a_graph_with_other_laws_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the work had been captured with the logits of another pass."""
    monkeypatch.setattr(graphs, "record", lambda function, pool: ([each.flip(-1) for each in function()], lambda: None))
    rows, (logits, draft) = context(SAMPLE), drafted(5, (4,), "sampled")
    with pytest.warns(RuntimeWarning, match="makes other distributions"):
        agree(CapturedVerification(), BLOCK, rows, logits, draft)


def test_control_a_graph_that_is_not_replayed_decides_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "record", lambda function, pool: (function(), lambda: None))
    captured, rows = CapturedVerification(), context(SAMPLE)
    for seed in range(4):
        logits, draft = drafted(seed, (4,), "sampled")
        found, expected = (each(BLOCK.verify, rows, logits, draft, "toy") for each in (captured, verify_eagerly))
    assert not torch.allclose(found.p.dense, expected.p.dense)
