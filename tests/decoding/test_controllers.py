"""Controllers: gammas per row, and the exactness of any choice that is made before anything is drafted."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import slipstream
from benchmarks import controllers as bench
from slipstream.core.draft import Draft
from slipstream.core.draws import Rng
from slipstream.core.protocols import Controller, Drafter
from slipstream.core.request import Row
from slipstream.core.round import Round
from slipstream.decoding.controllers import Adaptive, Chances, Fixed, Learned, Planned, RoundKind, Time, controller
from slipstream.decoding.decoder import Decoder, NoDraft
from slipstream.decoding.generate import generate
from slipstream.decoding.rules import BLOCK, TOKEN, Rule
from slipstream.decoding.sampling import Sampling
from slipstream.drafters.choice import Bandit
from slipstream.drafters.model import ModelDrafter
from toys.drafts import Altered
from toys.enumeration import EXACT, WRONG, Distribution, enumerate_outcomes, total_variation
from toys.tables import PAIRS, plain_law, scorer
from toys.texts import rare, request, row


@dataclass(frozen=True)
class Chooser:
    """A controller that asks a function of a row; the state is the last round."""

    choose: Callable[[Row, Round | None], int]
    most: int = 2

    def init(self) -> Round | None:
        return None

    def gammas(self, state: Round | None, rows: Sequence[Row]) -> list[int]:
        return [self.choose(row, state) for row in rows]

    def update(self, state: Round | None, round: Round) -> Round:
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
class Clocked:
    """`Adaptive` on a clock that the rounds drive."""

    inner: Adaptive
    clock: Callable[[Round], dict[str, float]]
    state: Learned = field(default_factory=Learned)
    chosen: set[tuple[tuple[int, ...], int]] = field(default_factory=set)
    most: int = 2

    def init(self) -> Learned:
        return self.state

    def gammas(self, state: Learned, rows: Sequence[Row]) -> Sequence[int]:
        found = self.inner.gammas(state, rows)
        self.chosen.add((tuple(rows[0].tokens), found[0]))
        return found

    def update(self, state: Learned, round: Round) -> Learned:
        return self.inner.update(state, replace(round, seconds=self.clock(round)))


def by_tokens(round: Round) -> dict[str, float]:
    """The worst that time can do: it depends on what was emitted."""
    return {"draft": 0.3 * len(round.tokens[0]), "target": 1.0 + sum(round.tokens[0])}


def on_the_edge() -> Learned:
    """A state in which one round decides whether and how far to speculate."""
    alone = RoundKind(1, sampled=True)
    rest, draft = {0: 1.0, 1: 1.1, 2: 1.2}, {1: 0.3, 2: 0.55}
    times = {
        (part, alone): {depth: Time(3, level) for depth, level in levels.items()}
        for part, levels in (("rest", rest), ("draft", draft))
    }
    stands, drafted = Chances((6.0, 3.0), (10.0, 5.0)), Chances((90.0, 90.0), (90.0, 90.0))
    return Learned(times, {True: stands}, {True: drafted}, credit=100.0)


@pytest.mark.parametrize("rule", [TOKEN, BLOCK], ids=["token", "block"])
@pytest.mark.parametrize("pair", PAIRS)
def test_the_law_is_exact_when_gamma_adapts(pair: str, rule: Rule) -> None:
    chooser = Clocked(Adaptive(2), by_tokens, on_the_edge())
    assert total_variation(law(pair, rule, chooser=chooser), plain_law(PAIRS[pair][0], (0, 2), 3)) < EXACT
    later = {gamma for text, gamma in chooser.chosen if len(text) == 3}
    if pair == "generic":
        assert len(later) > 1, "the choice did not depend on what was emitted"


@pytest.mark.parametrize("rule", [BLOCK, *rare(TOKEN)], ids=["block", "token"])
def test_the_law_is_exact_where_one_row_of_a_batch_drafts_now_and_then(rule: Rule) -> None:
    target, small = PAIRS["generic"]
    drafted = set[bool]()
    known = on_the_edge()
    pair = {(part, RoundKind(2, kind.sampled)): levels for (part, kind), levels in known.times.items()}

    def run(rng: Rng) -> tuple[int, ...]:
        chooser = Clocked(Adaptive(2), by_tokens, replace(known, times={**known.times, **pair}, stands={}))
        decoder = Decoder(scorer(target), ModelDrafter(scorer(small)), rule.verify, chooser, batch_size=2, rng=rng)
        greedy = request([1], 4, key=1, gamma=0, eos=frozenset({0, 1, 2}))
        first, _ = generate(decoder, [request((0, 2), 3, key=2), greedy])
        drafted.add(first.stats.drafted > 0)
        return tuple(first.output)

    assert total_variation(enumerate_outcomes(run), plain_law(target, (0, 2), 3)) < EXACT
    assert True in drafted


# ---- adaptive: speed, in simulations whose costs and chances are known --------------------------------------------


def machine(c: float, widening: float = 0.02, rows: Sequence[int] = (1, 4, 8), reading: float = 0.02) -> Any:
    """A draft step costs `c` plain steps of one row, verifying one token more `widening` per row; every further row a
    twentieth more. Reading a token takes `reading` steps of the draft. Times have noise, one in fifty is tripled."""
    depths = range(bench.MOST + 1)
    draft = [[c * depth * (1 + 0.05 * (count - 1)) for depth in depths] for count in rows]
    rest = [[1 + 0.05 * (count - 1) + widening * count * depth for depth in depths] for count in rows]
    return bench.Machine(rows, draft, rest, c * reading)


def texts(chances: Sequence[float], rows: int, count: int = 12, **settings: Any) -> list[Any]:
    """Texts of 240 tokens for each of the rows, in parts whose drafts stand with these chances."""
    each = [chance for chance in chances for _ in range(240 // len(chances))]
    return bench.simulated(each, count * rows, **settings)


def against(gammas: Sequence[int], chooser: Controller, some: Sequence[Any], on: Any, rows: int) -> tuple[float, float]:
    """The speed of a controller, in that of plain decoding and in that of the best of fixed gammas."""
    fixed = [bench.replay(Fixed(gamma), some, on, rows).seconds for gamma in gammas]
    took = bench.replay(chooser, some, on, rows).seconds
    return fixed[0] / took, min(fixed) / took


FIXED, PLAIN = (0, 1, 2, 3, 4, 6, 8), (0,)
NEVER = [(0.0, 0.1), (0.1, 0.5), (0.3, 1.0)]
"""Chances of drafted tokens, and costs of a draft step with which drafting never pays."""


@pytest.mark.parametrize(("rows", "temperature"), [(1, 0.0), (4, 1.0)])
@pytest.mark.parametrize(("alpha", "c"), NEVER)
def test_where_drafting_never_pays_less_than_2_percent_are_lost(
    alpha: float, c: float, rows: int, temperature: float
) -> None:
    plain, _ = against(PLAIN, Adaptive(), texts([alpha], rows, temperature=temperature), machine(c, 0.05), rows)
    assert 0.98 <= plain <= 1


@pytest.mark.parametrize("rows", [1, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("alpha", "c"), NEVER)
def test_control_with_a_large_budget_more_is_lost(alpha: float, c: float, rows: int) -> None:
    assert against(PLAIN, Adaptive(budget=0.2), texts([alpha], rows), machine(c, 0.05), rows)[0] < 0.98


@pytest.mark.parametrize(("alpha", "c", "rows"), [(0.5, 0.05, 1), (0.7, 0.2, 1), (0.9, 0.4, 1), (0.8, 0.1, 4)])
def test_within_5_percent_of_the_best_fixed_gamma_where_drafting_pays(alpha: float, c: float, rows: int) -> None:
    plain, best = against(FIXED, Adaptive(), texts([alpha], rows), machine(c), rows)
    assert best >= 0.95
    assert plain > 1.2


def test_control_with_wrong_costs_the_best_gamma_is_missed() -> None:
    misled = Clocked(Adaptive(), lambda round: {"draft": 1.0 * max(round.gammas), "target": 1.0}, most=8)
    assert against(FIXED, misled, texts([0.7], 1), machine(0.05), 1)[1] < 0.95


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("c", [0.05, 0.2])
def test_texts_that_change_their_character(c: float, rows: int) -> None:
    """Code, then random words, then copying."""
    plain, best = against(FIXED, Adaptive(), texts([0.7, 0.02, 0.97], rows), machine(c), rows)
    assert plain >= 0.98 and best >= 0.95


def test_control_a_gamma_that_was_right_at_first_is_not_in_the_end() -> None:
    some, on = texts([0.7, 0.02, 0.97], 1), machine(0.2)
    assert against(FIXED, Fixed(8), some, on, 1)[1] < 0.95


def test_rows_that_come_and_go() -> None:
    """Texts of many lengths, of which eight run together and fewer in the end."""
    some = [text for count in [*range(20, 260, 5)] * 5 for text in bench.simulated([0.8] * count, 1, seed=count)]
    plain, best = against(FIXED, Adaptive(), some, machine(0.05, 0.01), 8)
    assert plain >= 1.2 and best >= 0.95


RECORDED = ["small code 0, Xeon, 134 M, 1", "small prose 1, Xeon, 134 M, 1"]
RECORDED += ["small random 0, H200", "lookup code 0, H200"]


@pytest.mark.parametrize("only", RECORDED)
def test_recorded_traces(only: str) -> None:
    recorded = json.loads(bench.TRACES.read_text())
    played = list(bench.races(recorded, Adaptive(), only))
    assert played and not [race for race in played if race.missed]


def test_control_a_fixed_gamma_misses_the_bars_on_recorded_traces() -> None:
    recorded = json.loads(bench.TRACES.read_text())
    assert all(race.missed for race in bench.races(recorded, Fixed(8), "small random 0, H200"))


# ---- adaptive: parts --------------------------------------------------------------------------------------------


def play(chooser: Adaptive, state: Learned, rounds: int, seconds: Callable[[int], float], stood: int = 8) -> Any:
    gammas = list[int]()
    for _ in range(rounds):
        gammas += chooser.gammas(state, [row([1])])
        round = turn(gammas[-1:], gammas[-1:], stood, 0.1 * gammas[-1], seconds(gammas[-1]))
        state = chooser.update(state, round)
    return state, gammas


def test_slow_first_drafts_do_not_end_drafting() -> None:
    chooser, runs = Adaptive(), list[int]()

    def seconds(gamma: int) -> float:
        runs.append(gamma)
        return 50.0 if gamma and runs.count(gamma) < 3 else 1.0 + 0.05 * gamma

    _, gammas = play(chooser, chooser.init(), 60, seconds)
    assert (gammas[:3], gammas[-10:]) == ([0] * 3, [8] * 10)


def test_one_row_with_bad_luck_does_not_end_the_drafting_of_a_batch() -> None:
    speeds = [against(PLAIN, Adaptive(), texts([0.5], 8, 1, seed=seed), machine(0.1), 8)[0] for seed in range(6)]
    assert min(speeds) > 1.08


def test_a_slower_machine_does_not_make_what_was_measured_before_look_fast() -> None:
    chooser = Adaptive()
    state, gammas = play(chooser, chooser.init(), 60, lambda gamma: 1.0 + 0.05 * gamma)
    assert gammas[-1] == 8
    _, gammas = play(chooser, state, 90, lambda gamma: 3 * (1.0 + 0.05 * gamma))
    assert set(gammas) <= {0, 8} and gammas.count(0) <= 1


def test_after_as_many_drafts_as_the_budget_allows_a_plain_round_is_measured() -> None:
    chooser = Adaptive(budget=0.1)
    _, gammas = play(chooser, chooser.init(), 100, lambda gamma: 1.0 + 0.05 * gamma)
    places = [place for place, gamma in enumerate(gammas) if not gamma]
    assert {after - before for before, after in pairwise(places[3:])} == {11}


def test_nothing_is_drafted_that_the_account_cannot_pay() -> None:
    state = on_the_edge()
    assert Adaptive().gammas(state, [row([1])]) != [0]
    assert Adaptive().gammas(replace(state, credit=0.1), [row([1])]) == [0]


def test_one_row_drafts_until_tokens_were_tested_and_rows_that_cost_more_than_they_gain_never_do() -> None:
    rows = [Row(request([1] * 100, 60, key=index), index, [1] * 100) for index in range(4)]
    four, one = RoundKind(4, sampled=True), RoundKind(1, sampled=True)
    times = {
        ("rest", four): {0: Time(3, 1.0), 1: Time(3, 1.1)},
        **{("draft", kind): {1: Time(3, 0.1)} for kind in (one, four)},
    }
    known = Learned(times, {True: Chances((9.0,), (10.0,))}, credit=100.0, reading=(0.1, 100.0))
    drafting = [
        sum(map(bool, Adaptive().gammas(state, rows)))
        for state in (known, replace(known, stands={}), replace(known, reading=(30.0, 100.0), wait=1.0))
    ]
    assert drafting == [4, 1, 0]


def test_what_is_known_of_sampled_rounds_says_nothing_of_greedy_ones() -> None:
    chooser, greedy = Adaptive(2), row([1], sampler=Sampling())
    state = chooser.update(on_the_edge(), turn([2], [2], 0, 0.1, 1.0))  # sampled: nothing stood
    assert False not in state.stands and chooser.gammas(state, [greedy]) == [0]
    round = turn([2], [2], 2, 0.1, 1.0)
    state = chooser.update(state, replace(round, rows=(greedy,)))  # greedy: everything stood
    assert state.stands[False].at(2) > [0.7, 0.7] > state.stands[True].at(2)
    assert {kind.sampled for _, kind in state.times} == {True, False}


def test_a_later_call_goes_on_with_what_an_earlier_one_learned() -> None:
    engine = slipstream.load(gamma="auto")
    engine.generate(["def f(x):"], max_new_tokens=24)
    state = engine.decoder.experience.begin(engine.decoder.controller)
    assert state.times and not state.rows and not state.read
    assert not engine.decoder.experience.begin(controller("auto", most=2)).times, "another controller"
    assert engine.decoder.experience.begin(Fixed(2)) is None


# ---- adaptive: whatever happens ---------------------------------------------------------------------------------


NONSENSE = (0.0, -1.0, math.inf, -math.inf, math.nan, 5e-324, 1e308)
TIMES = st.sampled_from(NONSENSE) | st.floats(1e-6, 100.0)
TURNS = st.lists(st.tuples(st.integers(1, 33), st.integers(0, 8), st.integers(0, 8), TIMES, TIMES), max_size=30)
CONTROLLERS = (Adaptive(), Adaptive(1), Adaptive(budget=0.5), Planned({1: 3, 4: 0}), Fixed(2))


def turn(asked: Sequence[int], depths: Sequence[int], stood: int, draft: float, target: float, start: int = 0) -> Round:
    """A round whose rows draft so many tokens at most, of which at most `stood` stand."""
    depths = tuple(map(min, asked, depths))
    accepted = tuple(min(each, stood) for each in depths)
    rows = tuple(row([1], index=start + place) for place in range(len(asked)))
    tokens = tuple((1,) * (each + 1) for each in accepted)
    proposed = Draft(torch.empty(len(asked), max(depths)), None, depths)
    seconds = {"draft": draft, "target": target, "rest": 0.0}
    return Round(rows, proposed, bench.NOTHING, tokens, accepted, tuple(asked), seconds)


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
            assert 0 < state.load < math.inf
            assert math.isfinite(state.wait) and math.isfinite(state.credit or 0.0)


@given(st.lists(st.tuples(st.integers(1, 9), TIMES), max_size=30))
def test_a_choice_by_speed_never_ends_a_call(turns: list[tuple[int, float]]) -> None:
    bandit = Bandit([NoDraft()] * 3, hold=2)
    for tokens, seconds in turns:
        bandit.choose()
        bandit.count(tokens, seconds)
        assert all(0 <= arm.speed < math.inf for arm in bandit.arms)
        assert not any(map(math.isnan, bandit.bounds()))


@pytest.mark.parametrize("seconds", NONSENSE)
def test_times_that_cannot_be_true_teach_nothing(seconds: float) -> None:
    known = on_the_edge()
    state = Adaptive(2).update(known, turn([1], [1], 1, 0.4, seconds))
    assert (state.times, state.load, state.credit) == (known.times, known.load, known.credit)
    assert state.stands != known.stands, "what was accepted holds, whatever the clock says"
    bandit = Bandit([NoDraft()] * 2)
    bandit.count(3, seconds)
    assert not any(arm.rounds for arm in bandit.arms)


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


@pytest.mark.parametrize("settings", [{"most": 0}, {"budget": 0.0}, {"budget": math.nan}, {"budget": 1.0}])
def test_impossible_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="is not possible: draft 1 token or more"):
        Adaptive(**settings)


def test_what_users_give_becomes_a_controller() -> None:
    assert controller(3) == Fixed(3)
    assert controller("auto") == Adaptive()
    assert controller("auto", most=2) == Adaptive(2)
    assert controller(Planned({1: 2})).most == 2
    with pytest.raises(ValueError, match=r'^gamma=\'some\' is not possible: give a number of tokens, "auto" or'):
        controller("some")
