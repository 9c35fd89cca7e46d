"""Controllers: gammas per row, and the exactness of any choice that is made before anything is drafted."""

from __future__ import annotations

import importlib.util
import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import slipstream
from slipstream.core.draft import Draft
from slipstream.core.draws import Rng
from slipstream.core.protocols import Controller, Drafter
from slipstream.core.request import Request, Row
from slipstream.core.round import Round
from slipstream.decoding.adaptive import Adaptive, Learned
from slipstream.decoding.budget import Guarded
from slipstream.decoding.controllers import Fixed, Planned, controller
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.generate import generate
from slipstream.decoding.round_estimates import Acceptance, Curve, RoundCosts, RoundKind
from slipstream.decoding.rules import BLOCK, TOKEN, Rule
from slipstream.decoding.sampling import Sampling
from slipstream.drafters.choice import Ucb
from slipstream.drafters.model import ModelDrafter
from toys import (
    EXACT,
    PAIRS,
    WRONG,
    Altered,
    Distribution,
    enumerate_outcomes,
    plain_law,
    request,
    row,
    scorer,
    total_variation,
)

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "controllers.py"


def load_script() -> ModuleType:
    """benchmarks/controllers.py, whose replay of traces the tests use too."""
    spec = importlib.util.spec_from_file_location("controllers_benchmark", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


bench = load_script()


@dataclass(frozen=True)
class Chooser:
    """A controller that asks a function of a row; the state is the last round."""

    choose: Callable[[Row, Round | None], int]
    most: int = 2

    def init(self) -> Round | None:
        """Nothing was seen."""
        return None

    def gammas(self, state: Round | None, rows: Sequence[Row]) -> list[int]:
        """The function, row by row."""
        return [self.choose(row, state) for row in rows]

    def update(self, state: Round | None, round: Round) -> Round:
        """The round itself."""
        return round


def by_text(row: Row, last: Round | None) -> int:
    """Depends on everything that a controller may know: the text, and what was accepted."""
    return (sum(row.tokens) + (sum(last.accepted) if last else 1)) % 3


def law(
    pair: str,
    rule: Rule,
    wrap: Callable[[Drafter], Drafter] = lambda drafter: drafter,
    chooser: Controller = Chooser(by_text),
) -> Distribution:
    """The joint law of the first three tokens."""

    def run(rng: Rng) -> tuple[int, ...]:
        target, draft = (scorer(table, name) for table, name in zip(PAIRS[pair], ("target", "draft"), strict=True))
        decoder = Decoder(target, wrap(ModelDrafter(draft)), rule.verify, chooser, rng=rng)
        (row,) = generate(decoder, [request((0, 2), 3)])
        return tuple(row.output)

    return enumerate_outcomes(run)


@pytest.mark.parametrize("rule", [TOKEN, BLOCK], ids=["token", "block"])
@pytest.mark.parametrize("pair", PAIRS)
def test_gammas_that_depend_on_the_past_leave_the_law_exact(pair: str, rule: Rule) -> None:
    assert total_variation(law(pair, rule), plain_law(PAIRS[pair][0], (0, 2), 3)) < EXACT


def less_when_unlikely(draft: Draft) -> Draft:
    """The mistake: gamma is chosen after a look at the drafted tokens, so an unlikely one is taken back."""
    if draft.law is None or draft.law.probs is None:
        return draft
    chances = draft.law.probs.gather(-1, draft.tokens.unsqueeze(-1))[0, :, 0].tolist()
    kept = next((place for place, chance in enumerate(chances) if chance < 0.3), len(chances))
    return replace(draft, lengths=(min(kept, draft.lengths[0]),))


@pytest.mark.parametrize("rule", [TOKEN, BLOCK], ids=["token", "block"])
def test_a_gamma_chosen_after_a_look_at_the_draft_is_caught(rule: Rule) -> None:
    wrong = law("generic", rule, lambda drafter: Altered(drafter, less_when_unlikely))
    assert total_variation(wrong, plain_law(PAIRS["generic"][0], (0, 2), 3)) > WRONG


def test_rows_of_one_round_draft_as_many_tokens_as_each_was_given() -> None:
    seen: list[Round] = []

    def choose(row: Row, last: Round | None) -> int:
        seen.extend([last] if last else [])
        return row.index

    target, draft = PAIRS["generic"]
    requests = [request((index, 2), 12, key=index) for index in range(3)]

    def texts(controller: Chooser | Fixed) -> list[list[int]]:
        decoder = Decoder(scorer(target, "target"), ModelDrafter(scorer(draft, "draft")), controller=controller)
        rows = generate(decoder, requests)
        if isinstance(controller, Chooser):
            assert [row.stats.drafted > 0 for row in rows] == [False, True, True]
            assert [len(row.stats.drafted_by_position) for row in rows] == [0, 1, 2]
        return [row.output for row in rows]

    mixed = texts(Chooser(choose))
    assert seen[0].gammas == seen[0].draft.lengths == (0, 1, 2)
    # A row's text depends on its own gammas alone.
    assert mixed == [texts(Fixed(gamma))[gamma] for gamma in range(3)]


# ---- planned ----------------------------------------------------------------------------------------------------


def test_a_plan_gives_each_number_of_rows_its_gamma() -> None:
    plan = Planned({8: 0, 1: 5, 4: 2})
    answers = [plan.gammas(plan.init(), [row([1])] * count) for count in (1, 2, 4, 5, 8, 9)]
    assert [gammas[0] for gammas in answers] == [5, 2, 2, 0, 0, 0]
    assert [len(gammas) for gammas in answers] == [1, 2, 4, 5, 8, 9]
    assert plan.most == 5


@pytest.mark.parametrize("by_rows", [{}, {0: 5}, {1: -1}, {1: 3, -2: 3}], ids=str)
def test_an_impossible_plan_is_refused(by_rows: dict[int, int]) -> None:
    with pytest.raises(ValueError, match=r"^the plan .* is not possible: give a gamma of 0"):
        Planned(by_rows)


def test_a_plan_cannot_be_changed() -> None:
    gammas = {1: 5}
    plan = Planned(gammas)
    gammas[1] = 9
    assert plan.most == 5
    with pytest.raises(TypeError):
        plan.by_rows[1] = 9  # type: ignore[index]


# ---- adaptive: exactness ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prepared:
    """`Adaptive` in the middle of its work, on a clock that the emitted tokens drive: the worst that time can do."""

    inner: Adaptive
    state: Learned
    chosen: set[tuple[tuple[int, ...], int]]
    most: int = 2

    def init(self) -> Learned:
        """What was learned before."""
        return self.state

    def gammas(self, state: Learned, rows: Sequence[Row]) -> Sequence[int]:
        """Its choice, noted with the text."""
        found = self.inner.gammas(state, rows)
        self.chosen.add((tuple(rows[0].tokens), found[0]))
        return found

    def update(self, state: Learned, round: Round) -> Learned:
        """Time as the tokens say."""
        slow = 1.0 + sum(round.tokens[0])
        return self.inner.update(state, replace(round, seconds={"draft": 0.3 * len(round.tokens[0]), "target": slow}))


def on_the_edge() -> Learned:
    """A state in which one round decides whether and how far to speculate."""
    curve = Curve().add(0, 1.0).add(0, 1.0).add(1, 1.1).add(2, 1.2)
    alone = RoundKind(1, sampled=True)
    costs = RoundCosts({alone: Curve().add(1, 0.3).add(2, 0.55)}, {alone: curve})
    return Learned(costs, {True: Acceptance((1.0, 0.5), (2.0, 1.0))}, wait=1)


@pytest.mark.parametrize("rule", [TOKEN, BLOCK], ids=["token", "block"])
@pytest.mark.parametrize("pair", PAIRS)
def test_the_law_is_exact_when_gamma_adapts(pair: str, rule: Rule) -> None:
    adaptive = Adaptive(2)
    learned = on_the_edge()
    chooser = Prepared(adaptive, learned, set())
    assert total_variation(law(pair, rule, chooser=chooser), plain_law(PAIRS[pair][0], (0, 2), 3)) < EXACT
    later = {gamma for text, gamma in chooser.chosen if len(text) == 3}
    if pair == "generic":
        assert len(later) > 1, "the choice did not depend on what was emitted"


# ---- adaptive: speed, on synthetic traces -----------------------------------------------------------------------


def text(alpha: float, length: int, seed: int) -> list[bool]:
    """A synthetic trace: would the draft say the same, position by position."""
    rng = random.Random(f"{alpha} {seed}")
    return [rng.random() < alpha for _ in range(length)]


def machine(c: float, widening: float = 0.02, **noise: Any) -> Any:
    """A draft step costs `c` plain steps, verifying one token more `widening`."""
    steps = range(17)
    noise = {"noise": 0.05, "stalls": 50} | noise
    return bench.Machine([c * k for k in steps], [1 + widening * k for k in steps], missing=c / 20, **noise)


def seconds(chooser: Controller, texts: Sequence[Sequence[bool]], on: Any, batch: int = 1) -> float:
    """The time that the texts take."""
    return bench.replay(chooser, texts, on, batch).seconds


def best_fixed(texts: Sequence[Sequence[bool]], on: Any, batch: int = 1) -> float:
    """The time of the best fixed gamma in hindsight, plain decoding included."""
    return min(seconds(Fixed(gamma), texts, on, batch) for gamma in range(9))


@pytest.mark.parametrize(("c", "alpha"), [(0.05, 0.5), (0.05, 0.9), (0.2, 0.1), (0.2, 0.7), (0.4, 0.7), (0.4, 0.9)])
def test_within_5_percent_of_the_best_fixed_gamma_on_stationary_text(c: float, alpha: float) -> None:
    texts = [text(alpha, 600, seed) for seed in range(4)]
    assert seconds(Adaptive(), texts, machine(c)) < 1.05 * best_fixed(texts, machine(c))


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("c", [0.05, 0.2, 0.4])
@pytest.mark.parametrize("first", [0, 100, 200])
def test_better_than_any_fixed_gamma_where_the_text_changes_character(c: float, batch: int, first: int) -> None:
    """Code, then random words, then copying."""
    seeds = range(first, first + batch)
    texts = [text(0.7, 400, seed) + text(0.02, 400, seed) + text(0.98, 400, seed) for seed in seeds]
    assert seconds(Adaptive(), texts, machine(c), batch) < best_fixed(texts, machine(c), batch)


@pytest.mark.parametrize("alpha", [0.0, 0.02])
@pytest.mark.parametrize("c", [0.05, 0.2, 0.5, 1.0])
def test_never_5_percent_slower_than_plain_over_500_tokens_of_a_useless_draft(c: float, alpha: float) -> None:
    for seed in range(3):
        useless, on = [text(alpha, 500, seed)], machine(c, stalls=0, noise=0.02)
        assert seconds(Adaptive(), useless, on) < 1.05 * seconds(Fixed(0), useless, on)
        assert seconds(Fixed(5), useless, on) > 1.05 * seconds(Fixed(0), useless, on), "the draft costs nothing"


# ---- adaptive: parts --------------------------------------------------------------------------------------------


def test_a_curve_takes_medians_and_never_falls() -> None:
    curve = Curve().add(1, 9.0).add(1, 1.0).add(1, 1.1)  # the first run of a shape is slow
    assert curve.at(1) == curve.at(0) == 1.1
    curve = curve.add(3, 2.1)
    assert [curve.at(tokens) for tokens in (2, 3, 4)] == pytest.approx([1.6, 2.1, 2.6])
    fallen = curve.add(5, 0.9)
    assert fallen.at(3) == fallen.at(5) == pytest.approx(1.5)
    assert Curve().at(4) == 0.0


def test_an_unknown_kind_of_rounds_borrows_the_shape_of_the_nearest() -> None:
    known, steep = Curve().add(0, 1.0).add(4, 2.0), Curve().add(0, 1.0).add(4, 9.0)
    alone, four, rows = RoundKind(1, sampled=True), RoundKind(4, sampled=True), [row([1])] * 3
    assert RoundCosts({}, {alone: known}).of(RoundKind.of(rows))[1].at(4) == 2.0
    assert RoundCosts({}, {alone: known, four: Curve().add(0, 3.0)}).of(RoundKind.of(rows))[1].at(4) == 6.0
    assert RoundCosts({}, {alone: known, RoundKind(4, sampled=False): steep}).of(RoundKind.of(rows))[1].at(4) == 2.0


def test_stalls_do_not_make_what_is_measured_often_look_cheaper() -> None:
    """A round in twenty takes three times as long: the costs of 1,000 plain rounds stay beside those of old drafts."""
    costs = RoundCosts()
    for number in range(1000):
        depth, stall = 2 * (number < 12 and number % 2), 3 if number % 20 == 19 else 1
        round = turn([depth], [depth], 0, 0.2 * depth, stall * (1.0 + 0.2 * depth))
        costs = costs.learn(round, RoundKind.of(round.rows), 0)
    rest = costs.of(RoundKind.of([row([1])]))[1]
    assert rest.at(2) / rest.at(0) == pytest.approx(1.4, rel=0.1)


# ---- adaptive: reading the texts, and what is kept from call to call ---------------------------------------------


READING = 0.02  # plain steps in which the draft reads a token of a prompt


def call(
    adaptive: Adaptive, state: Learned, prompt: int, most: int, stands: bool, reading: float = READING
) -> tuple[Learned, float, int]:
    """Decode four texts of `most` tokens -> the state, the plain steps that it took for each token, drafting rounds."""
    rows = [Row(Request((0,) * prompt, Sampling(), most), index, [0] * prompt) for index in range(4)]
    read, spent, drafting = [0] * len(rows), 0.0, 0
    while rows:
        gammas = adaptive.gammas(state, rows)
        asked = tuple(min(gamma, each.room - 1) for gamma, each in zip(gammas, rows, strict=True))
        drafted = [each for each, gamma in zip(rows, asked, strict=True) if gamma]
        unread = sum(len(each.tokens) - 1 - read[each.index] for each in drafted)
        depth, drafting = max(asked), drafting + bool(drafted)
        accepted = tuple(gamma * stands for gamma in asked)
        tokens = tuple((1,) * (stood + 1) for stood in accepted)
        for each, new in zip(rows, tokens, strict=True):
            each.tokens += new
            each.finish_reason = None if each.room else "length"
        for each in drafted:
            read[each.index] = len(each.tokens) - 1
        seconds = {"draft": 0.2 * depth, "target": 1.0 + 0.05 * depth, "prefill": reading * unread}
        draft = Draft(torch.empty(len(rows), depth), None, asked)
        state = adaptive.update(state, Round(tuple(rows), draft, bench.NOTHING, tokens, accepted, asked, seconds))
        rows, spent = [each for each in rows if each.room], spent + sum(seconds.values())
    return state, spent / most, drafting


def test_a_later_call_does_not_pay_for_what_an_earlier_one_learned() -> None:
    adaptive = Adaptive()
    state, first, drafting = call(adaptive, adaptive.init(), 100, 96, stands=False)
    assert drafting >= 2
    assert 1.03 < first < 1.05, "learning costs nothing, or more than needed"
    for _ in range(8):
        state, again, _ = call(adaptive, adaptive.resume(state), 100, 96, stands=False)
        assert again < 1.05
    total = 0.0
    for _ in range(10):
        state, again, _ = call(adaptive, adaptive.resume(state), 100, 96, stands=False)
        total += again / 10
    assert total < 1.02
    _, anew, _ = call(adaptive, adaptive.init(), 100, 96, stands=False)
    assert anew > 1.03, "control: without it every call pays"


def test_reading_long_prompts_for_attempts_that_fail_is_not_free() -> None:
    """A prompt costs 1.6 plain steps to read here: attempts take what the allowance gives, their reading included."""
    adaptive, total = Adaptive(), 0.0
    state = adaptive.init()
    for number in range(24):
        state, steps, _ = call(adaptive, adaptive.resume(state), 400, 96, stands=False, reading=0.004)
        total += steps / 20 * (number >= 4)
    assert total < 1.01


def test_texts_are_read_if_drafts_win_the_time_back() -> None:
    """Drafts that stand win about half a step per token: 8 steps of reading pay in 96 tokens, but not in 8."""
    adaptive = Adaptive()
    state, _, _ = call(adaptive, adaptive.init(), 100, 96, stands=True)
    state, steps, drafting = call(adaptive, adaptive.resume(state), 100, 96, stands=True)  # reads all texts at once
    assert drafting > 5
    assert steps < 0.7
    short = adaptive.resume(state)
    for _ in range(3):  # until short texts are what it expects
        short, steps, drafting = call(adaptive, adaptive.resume(short), 100, 8, stands=True)
        assert (steps, drafting) == (pytest.approx(1.0), 0)
    _, _, drafting = call(adaptive, adaptive.resume(short), 100, 400, stands=True)
    assert drafting > 20, "a text that is longer than those before is not taken for one of them"


def test_an_engine_goes_on_with_what_its_controller_learned() -> None:
    engine = slipstream.load(gamma="auto")
    engine.generate("def f(x):", max_new_tokens=12)
    state = engine.decoder.experience.begin(engine.decoder.controller)
    assert state.inside.costs.rest
    assert state.inside.acceptance and not any(each.rows for each in state.inside.acceptance.values())
    assert not engine.decoder.experience.begin(controller("auto", most=2)).inside.costs.rest, "another controller"
    engine.generate("def f(x):", max_new_tokens=12, gamma=2)
    assert engine.decoder.experience.begin(Fixed(2)) is None


def test_it_switches_off_and_comes_back_on() -> None:
    """Within a few dozen tokens of the change, on a trace that is all wrong and then all right."""
    trace = [False] * 200 + [True] * 200
    played = bench.replay(Adaptive(), [trace], machine(0.2, noise=0.0, stalls=0))
    emitted, drafted = 0, list[tuple[int, int]]()
    for (gamma,), stood in zip(played.gammas, played.accepted, strict=True):
        drafted.append((emitted, gamma))
        emitted += stood + 1
    assert sum(gamma for place, gamma in drafted if 30 < place < 200) < 20
    assert all(gamma >= 4 for place, gamma in drafted if 260 < place < 390)


def play_batch(
    count: int, rounds: int, alpha: float, seconds: Callable[[int, int], dict[str, float]]
) -> Iterator[tuple[list[int], float, float]]:
    """Play rounds of texts that the draft has yet to read, each in one unit of time.

    `seconds` are those of (rows that draft, greatest gamma). Yields the gammas of every round, the time that it took,
    and that of plain decoding of its tokens.
    """
    adaptive, rows, unread, rng = (
        Adaptive(),
        [Row(request([1] * 100, 10 * rounds, key=index), index, [1] * 100) for index in range(count)],
        set(range(count)),
        random.Random(0),
    )
    state = adaptive.init()
    for _ in range(rounds):
        asked = adaptive.gammas(state, rows)
        drafting = {place for place, gamma in enumerate(asked) if gamma}
        times = {**seconds(len(drafting), max(asked)), "prefill": float(len(drafting & unread))}
        unread -= drafting
        stood = [next((i for i in range(gamma) if rng.random() > alpha), gamma) for gamma in asked]
        tokens = tuple((1,) * (accepted + 1) for accepted in stood)
        for each, new in zip(rows, tokens, strict=True):
            each.tokens += new
        draft = Draft(torch.empty(count, max(asked)), None, tuple(asked))
        round = Round(tuple(rows), draft, bench.NOTHING, tokens, tuple(stood), tuple(asked), times)
        state = adaptive.update(state, round)
        yield asked, sum(times.values()), sum(map(len, tokens)) / count


def test_one_row_drafts_before_the_draft_reads_the_texts_of_all() -> None:
    """A probe costs the reading of one text; the texts of all are read by and by while drafts stand."""
    played = play_batch(8, 30, 1.0, lambda rows, gamma: {"draft": 0.1 * gamma, "target": 1.0 + 0.05 * gamma})
    drafting = [sum(map(bool, asked)) for asked, _, _ in played if any(asked)]
    assert drafting[:6] == [1, 1, 2, 4, 8, 8]


def test_many_rows_draft_only_if_that_pays_for_many() -> None:
    """One row drafts quickly, but each further one takes as long again: if all sixteen drafted, time would be lost."""
    played = play_batch(16, 400, 0.7, lambda rows, gamma: {"draft": 0.12 * gamma * rows, "target": 1.0 + 0.1 * gamma})
    asked, took, plain = zip(*played, strict=True)
    assert 0 < max(sum(map(bool, each)) for each in asked) < 16
    assert sum(took) < 1.02 * sum(plain)


def concave(rows: int, gamma: int) -> dict[str, float]:
    """A target that takes much longer for two tokens per row than for one, but hardly longer for three than for two."""
    return {"draft": 0.15 * gamma, "target": 1.0 if not gamma else 1.7 + 0.05 * gamma}


def test_a_batch_measures_two_drafted_tokens_before_it_gives_up() -> None:
    """One drafted token never pays there; if the cost of two were extrapolated, they would not seem to either."""
    asked, took, plain = zip(*play_batch(8, 200, 0.9, concave), strict=True)
    assert sum(max(each) >= 2 for each in asked) > 100
    assert sum(took) < 0.92 * sum(plain)


def test_control_without_the_second_token_the_batch_decodes_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.decoding.adaptive.FURTHEST", 1)
    asked, _, _ = zip(*play_batch(8, 200, 0.9, concave), strict=True)
    assert sum(max(each) >= 2 for each in asked) < 10


def test_reading_one_text_is_no_measure_of_reading_many() -> None:
    """What the first text took may be twice what each takes in a batch, until reading so many at once was measured."""
    adaptive, rows = Adaptive(), [Row(request([1] * 100, 60, key=index), index, [1] * 100) for index in range(8)]
    curve = Curve()
    for depth in (0, 0, 0, 0, 0, 1, 1, 2, 2):
        curve = curve.add(depth, 1.0 + 0.15 * depth)
    kind = RoundKind.of(rows)
    drafts = {RoundKind(1, sampled=True): Curve().add(0, 0.0).add(2, 0.2)}
    one = Curve().add(0, 0.0).add(128, 2.5)
    states = [
        Learned(RoundCosts(drafts, {kind: curve}, reading), {True: Acceptance((6.0, 5.0), (8.0, 6.0))}, pilots=8)
        for reading in (one, one.add(1024, 20.0))
    ]
    drafting = [sum(map(bool, adaptive.gammas(state, rows))) for state in states]
    assert drafting == [8, 1], "all of them, or one in an attempt"


def test_slow_first_rounds_do_not_make_plain_decoding_of_a_batch_look_slow() -> None:
    """A round that drafts takes 1.25 steps per token: less than the first plain ones take, but more than later ones."""
    made, drafted, rows = Adaptive(), 0, [row([1], index=place) for place in range(8)]
    state = made.init()
    for number in range(60):
        gammas = made.gammas(state, rows)
        depth, slow = max(gammas), 1.5 if number < 2 else 1.0
        drafted += bool(depth)
        seconds = (0.1 * depth, 1.25 * (depth + 1) - 0.1 * depth) if depth else (0.0, slow)
        state = made.update(state, turn(gammas, gammas, 8, *seconds))
    assert drafted < 15


def test_what_more_rows_cost_goes_on_as_the_last_doubling_has_shown() -> None:
    kinds = [RoundKind(size, sampled=True) for size in (1, 2, 16)]
    alone, two = Curve().add(0, 0.0).add(2, 0.2), Curve().add(0, 0.0).add(1, 0.2)
    serial = RoundCosts(dict(zip(kinds, (alone, two), strict=False)))
    assert serial.of(kinds[2])[0].at(1) == pytest.approx(0.1 * 16)
    four = RoundKind(4, sampled=True)
    skipped = RoundCosts(
        {kinds[0]: alone, four: Curve().add(0, 0.0).add(1, 0.2)}
    )  # twice as long for four times as many
    assert skipped.of(kinds[2])[0].at(1) == pytest.approx(0.4)
    together = RoundCosts(dict(zip(kinds, (alone, alone), strict=False)))
    assert together.of(kinds[2])[0].at(2) == pytest.approx(0.2)
    measured = RoundCosts(dict(zip(kinds, (alone, two, alone), strict=False)))
    assert measured.of(kinds[2])[0].at(2) == pytest.approx(0.2)


def test_of_plain_rounds_that_follow_each_other_few_are_measured_and_all_earn() -> None:
    made, rows = Adaptive(credit=100.0), [row([1], index=place) for place in range(4)]
    kind, measured = RoundKind.of(rows), 0
    state = Learned(credits={kind: -50.0}, behind=20, wait=10**6)
    for _ in range(400):
        before, state = state, made.update(state, turn([0] * 4, [0] * 4, 0, 0.0, 1.0))
        measured += state.costs is not before.costs
    assert measured == 100 and state.behind == 420 and state.wait == 10**6 - 400
    assert state.credits[kind] == pytest.approx(-50 + 400 * made.allowance, abs=4 * made.allowance)


@pytest.mark.parametrize("slow", [3.0, 100.0])
def test_a_slow_first_draft_does_not_end_drafting(slow: float) -> None:
    """The first run of a shape makes its graph and fetches its weights: the second one is what counts."""
    adaptive = Adaptive()
    state, gammas = adaptive.init(), list[int]()
    for _ in range(8):
        gammas += adaptive.gammas(state, [row([1])])
        factor = slow if gammas[-1] and not any(gammas[:-1]) else 1.0
        seconds = factor * 0.1 * gammas[-1], factor * (1.0 + 0.05 * gammas[-1])
        state = adaptive.update(state, turn(gammas[-1:], gammas[-1:], 8, *seconds))
    assert gammas[2:4] == [adaptive.probe, adaptive.probe]
    assert gammas[5:] == [adaptive.most] * 3


def test_several_slow_first_drafts_do_not_end_drafting_for_ever() -> None:
    """As when nothing was warmed up: the second draft too makes a graph, so that no gain can be expected."""
    adaptive, drafts = Adaptive(), 0
    state, gammas = adaptive.init(), list[int]()
    for _ in range(1500):
        gammas += adaptive.gammas(state, [row([1])])
        drafts += bool(gammas[-1])
        seconds = (5.0 if drafts <= 2 else 0.1) * gammas[-1], 1.0 + 0.05 * gammas[-1]
        state = adaptive.update(state, turn(gammas[-1:], gammas[-1:], 8, *seconds))
    assert sum(map(bool, gammas[:500])) < 6
    assert all(gammas[-50:]), "it never finds out that the drafts have become fast"


def test_drafts_that_fail_in_a_row_at_times_do_not_end_drafting() -> None:
    """A dear draft that gains on average loses as often as not: what it has gained pays for that."""
    texts = [text(0.9, 600, seed) for seed in range(4)]
    played = bench.replay(Adaptive(), texts, machine(0.4))
    assert sum(gammas == (0,) for gammas in played.gammas) < 20


def test_what_was_lost_in_large_batches_does_not_keep_a_single_text_from_drafting() -> None:
    adaptive = Adaptive()
    state, asked = Learned(credits={RoundKind(16, sampled=True): -adaptive.credit}), list[int]()
    for count in [16] * 50 + [1] * 10:
        gammas = adaptive.gammas(state, [row([1], index=place) for place in range(count)])
        state = adaptive.update(state, turn(gammas, gammas, 8, 0.1 * max(gammas), 1.0))
        asked.append(max(gammas))
    assert not any(asked[:50]), "a spent credit does not stop attempts"
    assert asked[-1] == adaptive.most


def test_a_row_without_hope_drafts_less_than_its_neighbours() -> None:
    traces = [[True] * 300, [False] * 300]
    played = bench.replay(Adaptive(), traces, machine(0.2), batch=2)
    together = [pair for pair in played.gammas if len(pair) == 2]
    assert sum(pair[1] for pair in together) < 0.6 * sum(pair[0] for pair in together)


# ---- adaptive: whatever happens ---------------------------------------------------------------------------------


NONSENSE = (0.0, -1.0, math.inf, -math.inf, math.nan, 5e-324, 1e308)
TIMES = st.sampled_from(NONSENSE) | st.floats(1e-6, 100.0)
TURNS = st.lists(st.tuples(st.integers(1, 33), st.integers(0, 8), st.integers(0, 8), TIMES, TIMES), max_size=30)
CONTROLLERS = (Adaptive(), Adaptive(1), Adaptive(credit=0.0, allowance=0.0), Planned({1: 3, 4: 0}), Fixed(2))


def turn(asked: Sequence[int], depths: Sequence[int], stood: int, draft: float, target: float, start: int = 0) -> Round:
    """A round whose rows draft so many tokens at most, of which at most `stood` stand."""
    depths = tuple(map(min, asked, depths))
    accepted = tuple(min(each, stood) for each in depths)
    rows = tuple(row([1], index=start + place) for place in range(len(asked)))
    tokens = tuple((1,) * (each + 1) for each in accepted)
    proposed = Draft(torch.empty(len(asked), max(depths)), None, depths)
    return Round(
        rows, proposed, bench.NOTHING, tokens, accepted, tuple(asked), {"draft": draft, "target": target, "rest": 0.0}
    )


@given(st.sampled_from(CONTROLLERS), TURNS)
def test_a_controller_never_ends_a_call(chooser: Controller, turns: list[tuple[int, int, int, float, float]]) -> None:
    """Whatever number of rows runs, whatever they draft and accept, and whatever the clock says."""
    state = chooser.init()
    for place, (count, depth, stood, draft, target) in enumerate(turns):
        asked = chooser.gammas(state, [row([1], index=place + other) for other in range(count)])
        assert len(asked) == count
        assert all(0 <= gamma <= chooser.most for gamma in asked)
        depths = [(depth + other) % 9 for other in range(count)]
        round = turn(asked, depths, stood, draft, target, place)
        round.rows[0].finish_reason = "length"
        state = chooser.update(state, round)
        if isinstance(state, Learned):
            assert all(map(math.isfinite, state.credits.values()))
            assert 0 < state.costs.load < math.inf


def test_what_stands_is_known_for_greedy_and_for_sampled_rounds() -> None:
    """Greedy drafts stand more often: what is known of them says nothing about sampled ones."""
    adaptive, greedy = Adaptive(2), row([1], sampler=Sampling())
    state = adaptive.update(on_the_edge(), turn([2], [2], 0, 0.1, 1.0))  # sampled: nothing stood
    sampled = state.acceptance_of(RoundKind.of([row([1])]))
    assert state.acceptance_of(RoundKind.of([greedy])) == Acceptance() != sampled
    assert state.acceptance_of(RoundKind.of([greedy])).chances(2) > sampled.chances(2)
    round = turn([2], [2], 2, 0.1, 1.0)
    state = adaptive.update(state, replace(round, rows=(greedy,)))  # greedy: everything stood
    assert state.acceptance_of(RoundKind.of([row([1])])) == sampled
    assert state.acceptance_of(RoundKind.of([greedy])).chances(2) > Acceptance().chances(2)


@given(st.lists(st.tuples(st.integers(1, 9), TIMES), max_size=30))
def test_a_choice_by_speed_never_ends_a_call(turns: list[tuple[int, float]]) -> None:
    settings = Ucb(hold=2)
    state = settings.init(3)
    for tokens, seconds in turns:
        state = settings.update(settings.choose(state), tokens, seconds)
        assert all(0 <= arm.speed < math.inf for arm in state.arms)
        assert not any(math.isnan(bound) for bound in settings.bounds(state))


@pytest.mark.parametrize("seconds", NONSENSE)
def test_times_that_cannot_be_true_teach_nothing(seconds: float) -> None:
    adaptive, known = Adaptive(2), on_the_edge()
    state = adaptive.update(known, turn([1], [1], 1, 0.4, seconds))
    assert (state.costs, state.behind) == (known.costs, 0)
    assert min(state.credits.values()) >= adaptive.credit
    assert state.acceptance != known.acceptance, "what was accepted holds, whatever the clock says"
    pulls = Ucb().init(2)
    assert Ucb().update(pulls, 3, seconds) == pulls


def test_what_was_never_timed_is_measured_first() -> None:
    """While rows end, one is left, of whose like nothing is known: plain steps, then a probe; a first run is slow."""
    adaptive = Adaptive()
    state = adaptive.init()
    for count in (8, 4, 2):
        asked = adaptive.gammas(state, [row([1])] * count)
        state = adaptive.update(state, turn(asked, asked, 8, 0.1 * asked[0], 1.0))
    asked = []
    for _ in range(9):
        asked += adaptive.gammas(state, [row([1])])
        state = adaptive.update(state, turn(asked[-1:], asked[-1:], 8, 0.1 * asked[-1], 1.0))
    assert asked[:4] == [0, 0, adaptive.probe, adaptive.probe]
    assert max(asked) == adaptive.most, "a draft that always stands is not used"


@pytest.mark.parametrize(
    ("draft", "prompts", "options"),
    [
        ("embedded", [f"x{index} =" for index in range(25)], {"max_new_tokens": 1}),
        ("lookup", [[10 + 3 * n, 7 + n, 40 + 5 * n] for n in range(9)], {"max_new_tokens": 4, "temperature": 1.0}),
        ("lookup||plain", [[10 + 3 * n, 7 + n, 40 + 5 * n] for n in range(9)], {"max_new_tokens": 4}),
        ("lookup||embedded||plain", [[5 + n] for n in range(25)], {"max_new_tokens": 1}),
    ],
)
def test_batches_that_shrink_before_anything_is_known(draft: str, prompts: list[Any], options: dict[str, Any]) -> None:
    engine = slipstream.load(draft=draft, gamma="auto")
    found = engine.generate(prompts, **options)
    if not options.get("temperature"):
        assert [one.tokens for one in found] == [one.tokens for one in engine.generate(prompts, plain=True, **options)]
    assert len(found) == len(prompts)


@pytest.mark.parametrize(
    "settings", [{"probe": 9}, {"probe": 0}, {"most": 0}, {"credit": -1.0}, {"allowance": math.nan}]
)
def test_impossible_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"not possible|must be 0 or more"):
        Adaptive(**settings)


def test_what_users_give_becomes_a_controller() -> None:
    assert controller(3) == Fixed(3)
    assert controller("auto") == Guarded(Adaptive())
    assert controller("auto", most=2) == Guarded(Adaptive(2))
    assert controller(Planned({1: 2})).most == 2
    with pytest.raises(ValueError, match=r'^gamma=\'some\' is not possible: give a number of tokens, "auto" or'):
        controller("some")
