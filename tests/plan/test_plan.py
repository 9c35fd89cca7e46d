"""The planner: exact predictions where acceptance and costs are known, and a choice that can be trusted."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import typer
from torch import Tensor
from typer.testing import Result

from slipstream import Engine, load
from slipstream.cli import app as cli
from slipstream.core import round as core_round
from slipstream.core.draft import Tree
from slipstream.core.model_options import ModelOptions
from slipstream.core.options import SHAPES
from slipstream.core.protocols import Drafter
from slipstream.decoding.controllers import Fixed, Planned
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.generate import rounds
from slipstream.decoding.rules import TOKEN
from slipstream.decoding.sampling import Sampling
from slipstream.drafters import specification as drafting
from slipstream.drafters.build_context import BuildContext
from slipstream.drafters.lookup import Lookup
from slipstream.drafters.model import ModelDrafter
from slipstream.engine import load as engine_room
from slipstream.engine.plan_file import Plan
from slipstream.measure import timing
from slipstream.measure.replay import request_for
from slipstream.measure.timing import Beat
from slipstream.models.causal import CausalScorer
from slipstream.plan import measure, predict
from slipstream.plan import planner as run
from slipstream.plan.from_figures import as_curve, promise
from slipstream.plan.measure import PlanTask, Sweep, sweep
from slipstream.plan.planner import PlanSettings, make
from slipstream.plan.predict import AcceptanceCounts, PlanCosts, Survival, emitting, states, survival
from slipstream.theory import walltime_factor
from terminal import run as terminal_run
from toys import FAMILIES, HF_VOCAB, Clock, rare, tiny
from toys.tables import TableScorer

# ---- processes with a clock -------------------------------------------------------------------------------------


class Timed(TableScorer):
    """A constant law whose passes take a known time."""

    def __init__(self, law: Sequence[float], clock: Clock, cost: Callable[[int], float], prefill: float = 0.0) -> None:
        super().__init__(lambda prefix: law, len(law), "timed")
        self.clock, self.cost, self.reading = clock, cost, prefill

    def extend(self, tokens: Tensor, counts: Sequence[int], first: int = 0, tree: Tree | None = None) -> Tensor:
        self.clock.now += self.cost(tokens.shape[1])
        return super().extend(tokens, counts, first, tree)

    def prefill(self, texts: Sequence[Sequence[int]], first: int = 0) -> None:
        self.clock.now += self.reading * len(texts)
        super().prefill(texts, first)


C, SLOPE, READING = 0.2, 0.05, 0.6


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """One clock for the loop and the planner."""
    clock = Clock()
    for module in (core_round, timing):
        monkeypatch.setattr(module, "perf_counter", clock)
    monkeypatch.setattr(measure.gc, "collect", lambda: None)
    return clock


def pair(clock: Clock, p: Sequence[float], q: Sequence[float], reading: float = READING) -> tuple[Engine, Drafter]:
    """A target with T(n) = 1 + SLOPE (n - 1), and a draft whose step takes C and whose prefill takes `reading`."""
    target = Timed(p, clock, lambda width: 1 + SLOPE * (width - 1), prefill=3.0)
    drafter = ModelDrafter(Timed(q, clock, lambda width: C, prefill=reading))
    return Engine(Decoder(target, drafter), rule=TOKEN), drafter


TEXTS = [[0, 1, 0, 1, i % 2] + [0] * i for i in range(12)]
QUICK = PlanSettings(most=4, max_new_tokens=30, repetitions=1)


def test_a_perfect_draft_is_predicted_to_the_last_digit(clock: Clock) -> None:
    engine, drafter = pair(clock, (0.7, 0.3), (0.7, 0.3))
    report = make(engine, {"copy": drafter}, TEXTS, QUICK)
    outlook = report.outlooks[1]["copy"]
    assert outlook.alpha == 1 and outlook.survival == (1, 1, 1, 1)
    assert outlook.costs.startup == pytest.approx(READING)
    for each in outlook.predictions:
        gamma = each.gamma
        assert each.tokens == each.iid == gamma + 1
        assert each.curve == pytest.approx(1 + SLOPE * gamma)
        assert each.c == pytest.approx(C)
        assert each.long == pytest.approx(walltime_factor(1, gamma, C, lambda rows: 1 + SLOPE * (rows - 1)))
        whole, rest = divmod(30, gamma + 1)
        seconds = READING + whole * (1 + (SLOPE + C) * gamma) + (rest > 0) * (1 + (SLOPE + C) * (rest - 1))
        assert each.factor == pytest.approx(30 / seconds)
        assert each.low == pytest.approx(each.factor) == pytest.approx(each.high)
    (checked,) = report.verifications
    assert checked.gamma == 4 and not checked.off
    assert checked.factor == pytest.approx(outlook.best.factor)
    assert report.gammas == {1: 4} and report.draft == "copy"


@pytest.mark.parametrize("alpha", [0.5, *rare(0.9)])
def test_known_alpha_is_found_and_the_prediction_holds(clock: Clock, alpha: float) -> None:
    """The draft always proposes token 0, which is kept with chance alpha. 12 texts x 30 tokens: 2 to 3 standard errors
    of about 0.04; the seed is fixed, so nothing here can fail by chance."""
    engine, drafter = pair(clock, (alpha, 1 - alpha), (1, 0), reading=0.0)
    settings = replace(QUICK, sampling=Sampling(temperature=1.0), repetitions=3)
    report = make(engine, {"zero": drafter}, TEXTS, settings)
    outlook = report.outlooks[1]["zero"]
    assert outlook.alpha == pytest.approx(alpha, abs=1e-6)  # beta is known exactly, whatever was drawn
    for i, chance in enumerate(outlook.survival, 1):
        assert chance == pytest.approx(alpha**i, abs=0.1)
    for each in outlook.predictions:
        expected = walltime_factor(alpha, each.gamma, C, lambda rows: 1 + SLOPE * (rows - 1))
        assert each.long == pytest.approx(expected, rel=0.15)
        assert each.low <= each.long * 1.02 and each.low < each.factor < each.high
    (checked,) = report.verifications
    assert abs(checked.difference) < 0.1
    assert checked.round == pytest.approx(outlook.best.round, rel=0.05)


def test_what_was_drafted_beyond_an_end_is_not_tested(clock: Clock) -> None:
    engine, drafter = pair(clock, (0.7, 0.3), (0.7, 0.3))
    outlook = make(engine, {"copy": drafter}, TEXTS, QUICK, temperature=1.0, stop_token_ids=[1]).outlooks[1]["copy"]
    assert outlook.survival == (1, 1, 1, 1) and outlook.best.tokens_per_call < 5  # the texts have 3.3 tokens


def test_sources_take_as_long_with_a_draft() -> None:
    """Amdahl's law: 5 s of reading and 10 steps of 1 s, or 5 rounds of 1 s that write 2 tokens."""
    costs = PlanCosts(1, (replace(beat(1, new=1), sources=5.0), beat(1)), (beat(2), beat(2)), (1,))
    found = predict.predict([AcceptanceCounts((9,), (9,), 9.0, 9)] * 2, costs, (1,), 10, replicates=9).best
    assert found.long == 2 and found.low == found.factor == found.high == pytest.approx(15 / 10)


def test_a_useless_draft_is_not_planned(clock: Clock) -> None:
    engine, drafter = pair(clock, (1, 0), (0, 1))
    report = make(engine, {"wrong": drafter}, TEXTS, QUICK)
    outlook = report.outlooks[1]["wrong"]
    assert outlook.alpha == 0 and outlook.survival == (0, 0, 0, 0)
    assert not outlook.worth and outlook.best.factor < 1
    assert report.gammas == {1: 0}
    assert report.plan(ModelOptions("t"), 2).models.draft is None
    (checked,) = report.verifications  # the refusal is checked, too
    assert checked.gamma == 1 and checked.factor == pytest.approx(outlook.best.factor)


def test_the_better_of_two_drafts_is_chosen(clock: Clock) -> None:
    engine, poor = pair(clock, (0.9, 0.1), (0, 1))
    _, good = pair(clock, (0.9, 0.1), (1, 0))
    report = make(engine, {"poor": poor, "good": good}, TEXTS, QUICK)
    assert list(report.outlooks[1]) == ["poor", "good"]
    assert report.draft == "good" and report.gammas[1] > 0
    assert report.plan(ModelOptions("t"), 2).models.draft == "good"


def test_rows_that_run_together(clock: Clock) -> None:
    engine, drafter = pair(clock, (0.7, 0.3), (0.7, 0.3))
    seen, settings = list[tuple[int, int]](), replace(QUICK, batches=(1, 3), repetitions=2)
    report = make(engine, {"copy": drafter}, TEXTS, settings, lambda done, count, name: seen.append((done, count)))
    assert seen == [(i, len(seen)) for i in range(len(seen))]
    alone, three = (report.outlooks[rows]["copy"] for rows in (1, 3))
    assert three.costs.startup == pytest.approx(READING)
    assert {beat.rows for beat in three.costs.speculative} == {3}
    assert three.survival == alone.survival
    assert report.gammas == {1: 4, 3: 4}
    assert [each.rows for each in report.verifications] == [1, 3]
    # The steps of this clock cost the same for any rows; three texts are read for each step of three rows.
    assert three.best.factor < alone.best.factor
    assert abs(report.verifications[1].difference) < 0.1


def test_a_drafter_without_a_model(clock: Clock) -> None:
    """It copies the text's zeros, and drafts less than it is asked for after a token that is new."""
    target = Timed((1, 0), clock, lambda width: 1 + SLOPE * (width - 1))
    engine = Engine(Decoder(target), rule=TOKEN)
    report = make(engine, {"lookup": Lookup()}, TEXTS, QUICK)
    outlook = report.outlooks[1]["lookup"]
    assert outlook.best.c == 0 and outlook.best.factor > 2
    assert not report.verifications[0].off


def test_the_machine_may_drift(clock: Clock) -> None:
    """A machine that gets slower all the time gives the figures of one that does not."""
    engine, drafter = pair(clock, (0.7, 0.3), (0.7, 0.3), reading=0.0)
    steady = make(engine, {"copy": drafter}, TEXTS, QUICK).outlooks[1]["copy"].best
    pace = iter(range(10**6))
    for scorer in (engine.decoder.target, drafter.scorer):  # type: ignore[attr-defined]
        cost = scorer.cost
        scorer.cost = lambda width, cost=cost: cost(width) * (1 + next(pace) / 2000)
    drifting = make(engine, {"copy": drafter}, TEXTS, QUICK).outlooks[1]["copy"].best
    assert next(pace) > 1400  # 70 % slower in the end
    assert drifting.factor == pytest.approx(steady.factor, rel=0.02)


def test_sweep_asks_for_everything() -> None:
    controller, state, asked = Sweep(5, 2), 2, []
    for _ in range(15):
        asked += controller.gammas(state, [None])  # type: ignore[list-item]
        state = controller.update(state, None)  # type: ignore[arg-type]
    assert asked.count(5) == 7 and set(asked) == {1, 2, 3, 4, 5}


@pytest.mark.parametrize(
    ("texts", "settings", "drafts", "sentence"),
    [
        (TEXTS[:1], QUICK, 1, "a plan needs 2 prompts or more here, but there are 1"),
        (TEXTS[:3], replace(QUICK, batches=(4,)), 1, "a plan needs 4 prompts"),
        (TEXTS, QUICK, 0, "nothing to plan without a draft"),
    ],
)
def test_what_cannot_be_planned(clock: Clock, texts: Any, settings: PlanSettings, drafts: int, sentence: str) -> None:
    engine, drafter = pair(clock, (1, 0), (1, 0))
    with pytest.raises(ValueError, match=sentence):
        make(engine, dict([("a", drafter)][:drafts]), texts, settings)


@pytest.mark.parametrize("wrong", [{"most": 0}, {"gammas": (0,)}, {"batches": (0,)}, {"max_new_tokens": 1}])
def test_impossible_settings(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="cannot be planned for"):
        PlanSettings(**wrong)


# ---- formulas ---------------------------------------------------------------------------------------------------


def test_survival_is_the_product_limit() -> None:
    tallies = [AcceptanceCounts((10, 5, 2), (5, 2, 1)), AcceptanceCounts((10, 7), (7, 7))]
    assert survival(tallies) == pytest.approx([12 / 20, 12 / 20 * 9 / 12, 12 / 20 * 9 / 12 * 1 / 2])
    assert survival([AcceptanceCounts((4, 0), (0, 0))]) == [0, 0]
    assert survival([]) == []


def test_states_of_a_text() -> None:
    """Pooled shares 12/20 and 9/12; in flow 6/8 and 6/6; each state gets one pooled round more."""
    found = states(
        [AcceptanceCounts((10, 5), (5, 2)), AcceptanceCounts((10, 7), (7, 7), flow_tested=(8, 6), flow_kept=(6, 6))]
    )
    first, second = (6 + 0.6) / 13, (3 + 0.75) / 7
    assert found.pause == pytest.approx((first, first * second))
    first, second = (6 + 0.6) / 9, (6 + 0.75) / 7
    assert found.flow == pytest.approx((first, first * second))


def test_share_of_rounds_in_flow() -> None:
    """A two-state chain: into flow with chance 0.2, out of it with 0.4: a third of the rounds are in flow."""
    kept = Survival((0.5, 0.2), (0.9, 0.6))
    assert kept.mixed(2) == pytest.approx([0.5 * 2 / 3 + 0.9 / 3, 0.2 * 2 / 3 + 0.6 / 3])
    assert kept.mixed(1) == pytest.approx([0.5 / 0.6])  # into flow 0.5, out of it 0.1: the share is 5 of 6
    assert Survival((0.0,), (1.0,)).mixed(1) == [0.0]


def test_texts_with_easy_stretches() -> None:
    """Runs of kept tokens in a text, replayed with every gamma: mixed gammas would mislead, the two states do not.

    Tokens are kept with chance 0.95 in easy stretches and 0.2 in hard ones; both last 30 tokens in the mean."""
    rng, marks, easy = random.Random(3), list[bool](), True
    for _ in range(60_000):
        easy = easy if rng.random() > 1 / 30 else not easy
        marks.append(rng.random() < (0.95 if easy else 0.2))

    def replay(asked: Callable[[int], int]) -> tuple[float, AcceptanceCounts]:
        ledger, place, count = AcceptanceCounts.blank(8), 0, 0
        while place + 9 < len(marks):
            gamma = asked(count)
            run_ = next((i for i in range(gamma) if not marks[place + i]), gamma)
            ledger.add(gamma, run_)
            place, count = place + run_ + 1, count + 1
        return place / count, ledger

    sweeping = Sweep(8)
    tally = replay(lambda count: sweeping.gammas(count, [None])[0])[1]  # type: ignore[list-item]
    pooled, kept = survival([tally]), states([tally])
    errors = {"pooled": 0.0, "states": 0.0}
    for gamma in (2, 8):
        truth = replay(lambda count, gamma=gamma: gamma)[0]
        errors["pooled"] = max(errors["pooled"], abs((1 + sum(pooled[:gamma])) / truth - 1))
        errors["states"] = max(errors["states"], abs((1 + sum(kept.mixed(gamma))) / truth - 1))
    assert errors["states"] < 0.05 < 0.08 < errors["pooled"]


def brute(kept: Sequence[float], gamma: int, left: int) -> float:
    """Expected rounds, outcome by outcome."""
    if not left:
        return 0.0
    chances, room = [1.0, *kept, 0.0], min(gamma, left - 1)
    total = 1.0
    for k in range(room + 1):
        total += (chances[k] - (chances[k + 1] if k < room else 0.0)) * brute(kept, gamma, left - k - 1)
    return total


@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_rounds_of_a_text(gamma: int) -> None:
    kept = [0.7, 0.6, 0.2]
    for length in range(1, 9):
        calls, seconds = emitting(Survival(tuple(kept), tuple(kept)), gamma, length, lambda drafted: 2.0)
        assert calls == pytest.approx(brute(kept, gamma, length))
        assert seconds == pytest.approx(2 * calls)
    all_, none = (1.0,) * 3, (0.0,) * 3
    assert emitting(Survival(all_, all_), gamma, 24, float)[0] == pytest.approx(24 / (gamma + 1))
    # After a first round that keeps nothing, it is never in flow; one that keeps all stays there.
    assert emitting(Survival(none, all_), gamma, 24, float)[0] > 20
    drafted = gamma * 24 - sum(range(1, gamma + 1))
    assert emitting(Survival(none, none), gamma, 24, float) == pytest.approx((24, drafted))


def beat(width: int, seconds: float = 1.0, new: int = 0) -> Beat:
    return Beat(1, new, width, 0.0, seconds, 0.0)


def test_widths_of_a_drafter_that_offers_less() -> None:
    costs = PlanCosts(1, (beat(1),), (beat(1), beat(3), beat(5)), (0, 0, 4, 4))
    assert costs.widths(2) == {1: 0.5, 3: 0.5}
    assert replace(costs, rows=2).widths(2) == {1: 0.25, 3: 0.75}
    assert costs.widths(4) == {1: 0.5, 5: 0.5}
    assert replace(costs, lengths=(4,)).widths(3) == {4: 1.0}


def test_costs_between_what_was_measured() -> None:
    ours = (beat(2, 2.0), beat(4, 4.0), beat(4, 4.4), beat(4, 9.0), beat(3, 99.0, new=1))
    costs = PlanCosts(1, (beat(1),), ours, (3,))
    assert costs.round(3) == 4.4  # the median
    assert costs.round(2) == pytest.approx(3.2)  # between its neighbours: the round with a new row does not count
    assert predict.between({2: 2.0, 4: 5.0}, 9) == 5.0
    assert predict.between({2: 2.0, 4: 5.0}, 1) == 2.0


def test_intervals_cover() -> None:
    """60 samples of 25 prompts whose alphas differ. An interval that covers with only 0.9 would miss more than 15 of 60
    with chance 1e-4; one over rounds instead of prompts would cover about half of them and fail."""
    plain, rounds_ = tuple([beat(1)] * 3), tuple([beat(3, 1.5)] * 3)
    costs, rng, hits = PlanCosts(1, plain, rounds_, (2,)), random.Random(7), 0
    mean = [sum(x**i for x in (0.3, 0.5, 0.9)) / 3 for i in (1, 2)]
    truth = (1 + sum(mean)) / 1.5
    for _ in range(60):
        tallies = []
        for _ in range(25):
            alpha = rng.choice((0.3, 0.5, 0.9))
            kept = [min(2, next(i for i in range(9) if i == 8 or rng.random() > alpha)) for _ in range(40)]
            first, second = sum(k >= 1 for k in kept), sum(k >= 2 for k in kept)
            tallies.append(AcceptanceCounts((40, first), (first, second), alpha * 40, 40))
        found = predict.predict(tallies, costs, (2,), 50, replicates=100).best
        hits += found.low <= truth * found.factor / found.long <= found.high
    assert hits >= 45


def test_measured_acceptance_counts_room(clock: Clock) -> None:
    """Rounds near the end have room for less; what they could not test is not counted as refused."""
    engine, drafter = pair(clock, (1, 0), (1, 0))
    task = PlanTask(tuple(request_for(tuple(text), Sampling(), 7) for text in TEXTS), 1)
    _, (record,) = sweep(engine.decoder, [drafter], task, 5, lambda name: None)
    assert survival(record.tallies) == [1] * 5
    assert all(tuple(tally.kept) == tuple(tally.tested) for tally in record.tallies)
    assert sum(tally.tested[0] for tally in record.tallies) > sum(tally.tested[4] for tally in record.tallies) > 0


# ---- figures alone ----------------------------------------------------------------------------------------------


def test_promise_is_the_papers() -> None:
    found = promise(0.8, 0.05)
    assert found.best.gamma == 8 and found.best.walltime_factor == pytest.approx(3.09, abs=0.005)
    assert [line.gamma for line in found.lines] == list(range(4, 13))
    assert promise(0.8, 0.0, gammas=[2, 5]).lines[1].walltime_factor == pytest.approx(3.69, abs=0.005)  # Table 1
    assert promise(0.8, 0.0, gammas=[2, 5]).lines[1].operations_factor == pytest.approx(1.63, abs=0.005)
    assert promise(0.3, 0.5).best.gamma == 0


def test_promise_with_a_curve() -> None:
    verify = as_curve([1, 1.2, 1.3])
    assert [verify(rows) for rows in (1, 2, 3, 5)] == pytest.approx([1, 1.2, 1.3, 1.5])
    steep, gentle = promise(0.8, 0.05, curve=[1, 1.5]), promise(0.8, 0.05, curve=[1, 1.01])
    assert steep.best.gamma < gentle.best.gamma
    for wrong in ([1.1, 2], [], [1, -1]):
        with pytest.raises(ValueError, match="not possible"):
            as_curve(wrong)


def test_promise_for_a_draft_elsewhere() -> None:
    """With the distance falls what is gained, until nothing is."""
    near, far, beyond = (promise(0.8, 0.1, delay=delay) for delay in (0.0, 1.0, 9.0))
    assert near.best.walltime_factor > far.best.walltime_factor > 1 and far.best.gamma > 0
    assert beyond.best.gamma == 0 and beyond.longest_delay is not None and 1 < beyond.longest_delay < 9
    assert near.longest_delay == far.longest_delay == beyond.longest_delay
    assert promise(0.8, 0.1).longest_delay is None


def test_a_plan_for_a_draft_elsewhere_pays_for_its_distance() -> None:
    """Whole rounds of 1 s, of which drafting 2 tokens takes 0.2: what is away costs that, less what is ready."""
    plain, ours = (beat(1),) * 5, (Beat(1, 0, 3, 0.2, 0.8, 0.0),) * 5
    here = PlanCosts(1, plain, ours, (2,) * 5)
    kept = states([AcceptanceCounts((20, 10), (10, 5), 10.0, 20)])
    local, drafting = here.round(2), here.draft(2)
    never = Survival((0.0, 0.0), (0.0, 0.0))
    assert here.lasting(2, kept) == local
    assert replace(here, delay=5 * local).lasting(2, never) == pytest.approx(6 * local)
    always = replace(here, delay=5 * local).lasting(2, Survival((1.0, 1.0), (1.0, 1.0)))
    assert always == pytest.approx(6 * local - drafting)
    assert always < replace(here, delay=5 * local).lasting(2, kept) < 6 * local


# ---- the file ---------------------------------------------------------------------------------------------------

PAIR = ModelOptions("org/big", "org/small", verify="token", dtype="bfloat16")
PLAN = Plan(PAIR, {1: 5, 8: 2}, 101, 0.7, {"cpu": "x"})


def with_models(plan: Plan, **models: Any) -> Plan:
    return replace(plan, models=replace(plan.models, **models))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "is no plan: it is no JSON"),
        ("[1]", "is no plan"),
        ('{"format": "other"}', "is no plan"),
        ('{"format": "slipstream plan", "version": 2}', "version 2, this release reads 1"),
        ('{"format": "slipstream plan", "version": 1}', "damaged .KeyError"),
        (json.dumps({**PLAN.as_dict(), "vocab": "many"}), "damaged .*vocab is 'many'"),
        (json.dumps({**PLAN.as_dict(), "verify": 5}), "damaged .*verify is 5"),
        (json.dumps({**PLAN.as_dict(), "compile": "yes"}), "damaged .*compile is 'yes'"),
        (json.dumps({**PLAN.as_dict(), "gammas": {}}), "damaged .*is no plan"),
        (json.dumps({**PLAN.as_dict(), "gammas": {"one": 1}}), "damaged"),
        (json.dumps({**PLAN.as_dict(), "gammas": {"1": 1.5}}), "damaged"),
    ],
)
def test_wrong_files_are_named(tmp_path: Path, text: str, sentence: str) -> None:
    file = tmp_path / "plan.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=sentence):
        Plan.read(file)
    with pytest.raises(ValueError, match="cannot read the plan nowhere: No such file"):
        Plan.read("nowhere")


def test_load_follows_a_plan(tmp_path: Path) -> None:
    target, draft = tiny(FAMILIES["llama"]), tiny(FAMILIES["llama"], seed=1)
    plan = replace(with_models(PLAN, target="any", dtype="auto"), gammas={1: 3, 2: 1})
    plan.save(tmp_path / "p.json")
    assert Plan.read(tmp_path / "p.json") == plan and [each.name for each in tmp_path.iterdir()] == ["p.json"]
    engine = load(target, draft, plan=tmp_path / "p.json")
    assert engine.decoder.controller == Planned({1: 3, 2: 1}) and engine.rule.name == "token"
    widths: list[int] = []
    target.register_forward_hook(lambda *args: widths.append(args[-1].logits.shape[1]))
    engine.generate([[5, 9, 2]], max_new_tokens=12)
    assert max(widths) == 4
    explicit = load(target, draft, plan=plan, gamma=2, verify="block")
    assert explicit.decoder.controller == Fixed(2) and explicit.rule.name == "block"
    with pytest.raises(ValueError, match="a target of 7 token ids, this one has 101"):
        load(target, draft, plan=replace(plan, vocab=7))
    with pytest.raises(ValueError, match="the plan is for any, not for org/other"):
        load("org/other", draft, plan=plan)


def test_load_takes_models_from_the_plan(tmp_path: Path) -> None:
    for name, seed in (("big", 0), ("small", 1)):
        tiny(FAMILIES["llama"], seed=seed).save_pretrained(tmp_path / name)
    plan = Plan(ModelOptions(str(tmp_path / "big"), str(tmp_path / "small"), verify="block"), {1: 2}, HF_VOCAB)
    engine = load(plan=plan)
    assert engine.decoder.target.name.endswith("big") and isinstance(engine.decoder.drafter, ModelDrafter)
    alone = load(tmp_path / "big", plan=replace(with_models(plan, draft=None), gammas={1: 0}))
    assert alone.decoder.controller == Fixed(0)


# ---- the command ------------------------------------------------------------------------------------------------


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """`slipstream plan` and others with a tiny pair, in 80 columns, with nobody watching."""

    def draft(name: str, context: BuildContext) -> Drafter:
        context.notes.extend(["small draft"] * (name == "org/small"))
        return ModelDrafter(CausalScorer(tiny(FAMILIES["llama"], seed=1)), context.target.vocab)

    monkeypatch.setattr(engine_room, "load", lambda *_, **__: load(tiny(FAMILIES["llama"])))
    monkeypatch.setattr(drafting, "drafter", draft)
    return partial(terminal_run, COLUMNS="80", NO_COLOR="1")


@pytest.fixture
def small(tmp_path: Path) -> list[str]:
    """Arguments that measure next to nothing."""
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"tokens": [5, 9, 2 + i]}) for i in range(6)))
    sizes = ["--max-new-tokens", "12", "--repetitions", "1", "--sample", "3"]
    return ["plan", "--target", "org/big", "--draft", "org/small", "--prompts", str(file), "--gamma", "2", *sizes]


@pytest.mark.slow
def test_command_prints_in_80_columns(command: Callable[..., Result], small: list[str], tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    result = command(*small, "--gamma", "1", "--batch", "1", "--batch", "2", "--save", str(file))
    assert result.exit_code == 0, result.stderr
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert result.stdout.count("draft org/small, ") >= 2 and "2 rows" in result.stdout
    assert result.stdout.count("measured with gamma") == 2
    made = Plan.read(file)
    assert made.models.target == "org/big" and set(made.gammas) == {1, 2} and made.vocab == HF_VOCAB
    assert made.figures["outlooks"]["2"]["org/small"]["rows"] == 2
    shown = command("plan", "--plan", str(file))
    assert shown.exit_code == 0 and "org/big: " in shown.stdout


def test_command_prints_json_and_nothing_else(command: Callable[..., Result], small: list[str]) -> None:
    made = json.loads((result := command(*small, "--json")).stdout)
    assert (made["format"], made["figures"]["settings"]["gammas"]) == ("slipstream plan", [2])
    assert (made["machine"]["rule"], len(made["figures"]["verifications"])) == ("block", 1) and "note:" in result.stderr


def test_ctrl_c_leaves_no_traceback(
    command: Callable[..., Result], small: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "speeds", interrupted)
    result = command(*small)
    assert result.exit_code == 130 and "T(n)/T(1)" in result.stdout and "the choice was not run" in result.stderr
    monkeypatch.setattr(run, "sweep", interrupted)
    result = command(*small)
    assert result.exit_code == 130 and not result.stdout and "too little was measured" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--alpha", "0.8"], "--alpha and --cost go together"),
        (["--alpha", "2", "--cost", "0"], "Invalid value for '--alpha'"),
        (["--alpha", "0.8", "--cost", "0.1", "--curve", "1,x"], "--curve '1,x' is not a list"),
        (["--alpha", "0.8", "--cost", "0.1", "--curve", "2,3"], "the curve [2.0, 3.0] is not possible"),
        (["--plan", "nowhere"], "cannot read the plan nowhere"),
        (["--prompts", "nowhere"], "cannot read nowhere"),
        (["--target", "org/big"], "there is nothing to plan without a draft"),
        (["one prompt"], "a plan needs 2 prompts or more here"),
        (["--chat"], "--chat wraps prompts, and there are none"),
        (["--chat", "--audio", "x"], "recordings are planned for, so --chat cannot be used"),
        (["--language", "de"], "prompts are texts, so --language cannot be used"),
        (["--save", "no/where/plan.json"], "cannot write no/where/plan.json: there is no folder no/where"),
        (["--save", "."], "cannot write .: it is a folder"),
    ],
)
def test_errors_are_one_sentence(command: Callable[..., Result], arguments: list[str], sentence: str) -> None:
    result = command("plan", *arguments)
    assert result.exit_code == 2, result.output
    assert sentence in result.stderr and result.stderr.count("\n") == 1 and not result.stdout


COMMAND = next(each for each in cli.app.registered_commands if each.callback and each.callback.__name__ == "plan")
PARAMETERS = typer.main.get_command_from_info(COMMAND, pretty_exceptions_short=True, rich_markup_mode=None).params
BOTH = {"--alpha", "--cost", "--operations-cost", "--curve", "--gamma", "--json", "--plan", "--step-ms", "--network-ms"}
VALUES = dict.fromkeys(["--dtype", "--encoder-dtype"], "float32") | {"--kv-dtype": "int8", "--activations": "float"}
VALUES |= {f"--{name.replace('_', '-')}": "1" for name in SHAPES}
MEASURED: dict[str, list[str]] = {"PROMPT": ["a prompt"]}  # what only a measurement uses
MEASURED |= {
    each.opts[0]: [each.opts[0], *([] if each.is_flag else [VALUES.get(each.opts[0], "2")])]
    for each in PARAMETERS
    if each.param_type_name == "option" and each.opts[0] not in BOTH | {"--threads"}
}


@pytest.mark.parametrize("mode", ["figures", "plan"])
@pytest.mark.parametrize("name", [*MEASURED, "--gamma", "--curve", "--plan"])
def test_what_a_mode_does_not_use_is_refused(
    command: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    PLAN.save("plan.json")
    others = {"--gamma": "2", "--curve": "1,1", "--plan": "plan.json"}
    extra = MEASURED.get(name) or [name, others[name]]
    base = ["--alpha", "0.8", "--cost", "0.1"] if mode == "figures" else ["--plan", "plan.json"]
    result = command("plan", *base, *extra)
    used = {"figures": {"--gamma", "--curve"}, "plan": {"--plan"}}[mode]
    assert result.exit_code == (0 if name in used else 2), result.output
    if name not in used:
        reason = "a plan from figures alone" if mode == "figures" or name == "--curve" else "--plan shows what was"
        assert reason in result.stderr and result.stderr.count("\n") == 1 and not result.stdout
        assert ("--plan" if mode == "plan" and name == "--curve" else name.removeprefix("PROMPT")) in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.slow
def test_command_for_a_draft_elsewhere(command: Callable[..., Result], small: list[str]) -> None:
    """What is away is predicted and not run, and the report says how far it may be."""
    found = json.loads(command(*small, "--network-ms", "2000", "--json").stdout)["figures"]
    [outlook] = [one for by_draft in found["outlooks"].values() for one in by_draft.values()]
    assert not outlook["speculate"] and outlook["longest_delay_milliseconds"] < 2000
    assert found["verifications"] == [] and found["settings"]["network_ms"] == 2000
    shown = command(*small, "--network-ms", "2000")
    assert "2000 ms away" in shown.stdout and "pay" in shown.stdout and "measured with gamma" not in shown.stdout
    figures = command("plan", "--alpha", "0.8", "--cost", "0.1", "--network-ms", "5", "--step-ms", "20")
    assert figures.exit_code == 0 and "5 ms away" in figures.stdout
    for one in ("--network-ms", "--step-ms"):
        wrong = command("plan", "--alpha", "0.8", "--cost", "0.1", one, "5")
        assert wrong.exit_code == 2 and "go together" in wrong.stderr


def test_figures_need_no_torch() -> None:
    source = "import sys; sys.modules['torch'] = None; from slipstream.cli import main; main()"
    command = [sys.executable, "-c", source, "plan", "--alpha", "0.8", "--cost", "0.05", "--json"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert json.loads(done.stdout)["best"]["gamma"] == 8, done.stderr


def test_generate_takes_a_plan(command: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file, seen = tmp_path / "plan.json", list[ModelOptions]()
    PLAN.save(file)
    usual = engine_room.load
    monkeypatch.setattr(engine_room, "load", lambda models, **named: seen.append(models) or usual(models, **named))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"tokens": [5, 9]}')
    base = ["generate", "--prompts", str(prompts), "--max-new-tokens", "3", "--plan", str(file)]
    result = command(*base)
    assert result.exit_code == 0 and "measured at temperature 0.7; at 0" in result.stderr
    command(*base, "--gamma", "4", "--verify", "match", "--temperature", "0.7")
    found = [(models.plan, models.gamma, models.verify) for models in seen]
    assert found == [(PLAN, None, None), (PLAN, 4, "match")]
    assert "cannot read the plan" in command(*base[:-1], "nowhere").stderr


def test_warm_up_visits_every_width(clock: Clock) -> None:
    engine, drafter = pair(clock, (0.5, 0.5), (1, 0))
    widths: list[int] = []
    extend = engine.decoder.target.extend
    engine.decoder.target.extend = lambda tokens, *rest, **named: (  # type: ignore[method-assign]
        widths.append(tokens.shape[1]) or extend(tokens, *rest, **named)
    )
    task = PlanTask(tuple(request_for(tuple(text), Sampling(temperature=1.0), 30) for text in TEXTS), 1)
    measure.warm_up(engine.decoder, [drafter], task, 6, lambda name: None)
    assert set(widths) == set(range(1, 8))
    assert engine.decoder.target.lengths == []
    assert len(list(rounds(replace(engine.decoder, controller=Fixed(1)), task.requests([0])))) > 0
