"""In a crowd speculation loses no more than its share of the time, whatever drafts cost; and every choice is exact."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from slipstream.check.controls import Draw, broken
from slipstream.check.enumeration import CHAINS, TREE, TREES, Pair, Topology, distances, normed
from slipstream.core.draft import Draft, Verdict
from slipstream.core.draws import Rng
from slipstream.core.law import Law
from slipstream.core.protocols import Controller
from slipstream.core.request import Row
from slipstream.core.round import Round
from slipstream.decoding.adaptive import Adaptive
from slipstream.decoding.budget import Guarded
from slipstream.decoding.controllers import Fixed
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.generate import generate
from slipstream.decoding.rules import BLOCK, TOKEN, Rule
from slipstream.drafters.model import ModelDrafter
from slipstream.models.tables import TableScorer
from toys import EXACT, PAIRS, WRONG, Distribution, enumerate_outcomes, plain_law, request, row, scorer, total_variation

STEP = 0.02  # seconds of a plain round


def played(rows: Sequence[Row], gammas: Sequence[int], accepted: int, draft: float, target: float) -> Round:
    """The record of a round in which so many drafted tokens of each row stand."""
    depth = max(gammas)
    tokens = torch.zeros(len(rows), depth, dtype=torch.long)
    stands = tuple(min(accepted, gamma) for gamma in gammas)
    seconds = {"draft": draft, "target": target, "accept": 0.0, "rest": 0.0}
    verdict = Verdict(torch.tensor(stands), Law(tokens=tokens[:, :1]), torch.zeros(len(rows), depth))
    emitted = tuple((0,) * (count + 1) for count in stands)
    made = Draft(tokens, Law(tokens=tokens) if depth else None, tuple(gammas))
    return Round(tuple(rows), made, verdict, emitted, stands, tuple(gammas), seconds)


def speed(controller: Controller, count: int, accepted: int, *, read: float, each: float, rounds: int = 400) -> float:
    """Tokens per second, in those of plain decoding, of rows whose draft takes `read` plain steps to read a text, and
    `each` to draft a token for all; a verified position costs a tenth of a step."""
    rows = [row([0, 1], index=index) for index in range(count)]
    state, unread, spent, made = controller.init(), set(range(count)), 0.0, 0
    for _ in range(rounds):
        gammas = list(controller.gammas(state, rows))
        asked = {place for place, gamma in enumerate(gammas) if gamma}
        draft = STEP * (read * len(asked & unread) + each * max(gammas))
        unread -= asked
        round = played(rows, gammas, accepted, draft, STEP * (1 + 0.1 * max(gammas)))
        state = controller.update(state, round)
        spent, made = spent + sum(round.seconds.values()), made + sum(map(len, round.tokens))
    return made / count * STEP / spent


@pytest.mark.parametrize("inner", [Adaptive(), Fixed(3)], ids=["auto", "fixed"])
@pytest.mark.parametrize("count", [16, 64])
@pytest.mark.parametrize(("read", "each"), [(0.0, 0.5), (0.5, 0.05), (1.0, 0.3)])
@pytest.mark.parametrize("rounds", [50, 100, 400])
def test_drafts_that_never_stand_cost_a_crowd_no_more_than_3_percent(
    inner: Controller, count: int, read: float, each: float, rounds: int
) -> None:
    found = speed(Guarded(inner), count, 0, read=read, each=each, rounds=rounds)
    assert 0.97 <= found <= 1


def test_control_without_the_guard_a_crowd_loses_more() -> None:
    assert speed(Adaptive(), 64, 0, read=0.5, each=0.05, rounds=100) < 0.9
    assert speed(Fixed(3), 64, 0, read=0.0, each=0.5) < 0.5


def test_a_crowd_gains_from_drafts_that_stand() -> None:
    assert speed(Guarded(), 64, 8, read=0.02, each=0.02) > 1.3


def test_a_crowd_asks_the_row_that_is_cheapest_to_ask() -> None:
    """The row with the shortest text, wherever it stands; then twice as many rows in every round that drafts."""
    guard, rows = Guarded(), [row([1] * (200 - 5 * index), index=index) for index in range(32)]
    state, drafting = guard.init(), list[list[int]]()
    for _ in range(400):
        gammas = guard.gammas(state, rows)
        drafting += [[place for place, gamma in enumerate(gammas) if gamma]] if any(gammas) else []
        state = guard.update(state, played(rows, gammas, 8, 0.01 * STEP * max(gammas), STEP * (1 + 0.02 * max(gammas))))
    assert drafting[0] == drafting[1] == [31]
    assert [len(places) for places in drafting[2:7]] == [2, 4, 8, 16, 32]


def test_few_rows_are_left_to_the_controller_inside() -> None:
    rows, inner = [row([0], index=index) for index in range(15)], Fixed(4)
    assert Guarded(inner).gammas(Guarded(inner).init(), rows) == [4] * 15
    assert Guarded(inner).most == 4


@pytest.mark.parametrize("rule", [TOKEN, BLOCK], ids=["token", "block"])
def test_the_law_of_a_guarded_crowd_is_the_target_s(rule: Rule) -> None:
    """By enumeration of a row beside another, with and without drafts in turn."""
    target, small = PAIRS["generic"]
    drafted = set[bool]()

    def run(rng: Rng) -> tuple[int, ...]:
        guard = Guarded(Fixed(1), crowd=2, share=1.0, most_steps=100.0)
        decoder = Decoder(scorer(target), ModelDrafter(scorer(small)), rule.verify, guard, batch_size=2, rng=rng)
        greedy = request([1], 4, key=1, gamma=0, eos=frozenset({0, 1, 2}))
        first, _ = generate(decoder, [request((0, 2), 3, key=2), greedy])
        drafted.add(first.stats.drafted > 0)
        return tuple(first.output)

    assert total_variation(enumerate_outcomes(run), plain_law(target, (0, 2), 3)) < EXACT
    assert True in drafted


@pytest.mark.parametrize("wrong", [{"crowd": 1}, {"share": 1.5}, {"most_steps": -1.0}, {"share": float("nan")}])
def test_impossible_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="is not possible"):
        Guarded(**wrong)  # type: ignore[arg-type]


# ---- the trap ---------------------------------------------------------------------------------------------------


def counterexample(choose: Callable[[int], bool]) -> Distribution:
    """The law of the first token where p = q = (.7, .3) and `choose(drafted)` says whether a draft is verified."""

    def verify(p: Law, draft: Draft, draw: Draw) -> Verdict:
        lengths = tuple(
            length * choose(tokens[0]) if length else 0
            for tokens, length in zip(draft.tokens.tolist(), draft.lengths, strict=True)
        )
        return TOKEN.verify(p, replace(draft, lengths=lengths), draw)

    def run(rng: Rng) -> int:
        pair = [TableScorer(lambda prefix: (0.7, 0.3), 2, name) for name in ("target", "draft")]
        decoder = Decoder(pair[0], ModelDrafter(pair[1]), verify, Fixed(1), rng=rng)
        return generate(decoder, [request([0], 2)])[0].output[0]

    return enumerate_outcomes(run)


def test_control_a_budget_chosen_by_the_drafted_tokens_is_caught() -> None:
    """Token 1 looks less likely to stand, so it is not verified: that gives .91 and .09."""
    law = counterexample(lambda token: token == 0)
    assert total_variation(law, {0: 0.91, 1: 0.09}) < EXACT
    assert total_variation(law, {0: 0.7, 1: 0.3}) > WRONG


@pytest.mark.parametrize("verified", [True, False])
def test_a_budget_that_was_fixed_before_leaves_the_law(verified: bool) -> None:
    assert total_variation(counterexample(lambda token: verified), {0: 0.7, 1: 0.3}) < EXACT


@pytest.mark.parametrize("parents", [None, TREE])
def test_the_certificate_notices_a_budget_chosen_by_the_drafted_tokens(parents: Topology | None) -> None:
    generator = torch.Generator().manual_seed(0)
    laws = [[normed(torch.rand(4, generator=generator)) for _ in range(3)] for _ in range(24)]
    pairs = [Pair(*each) for each in laws]
    controls = {rule.name: rule for rule in broken(TOKEN, greedy=False, sampled=True)}
    wrong = controls["budget by the drafted tokens"]
    assert all(found.joint > WRONG for found in distances(wrong.verify, pairs, CHAINS if parents is None else TREES))
    assert all(found.joint < 1e-6 for found in distances(TOKEN.verify, pairs, CHAINS if parents is None else TREES))
    assert len(broken(TOKEN, greedy=False)) == len(controls) - 1, "a copied draft leaves nothing to choose by"
