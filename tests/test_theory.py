"""Theory against the paper's printed figures, exact enumeration with fractions, and simulated rounds."""

import math
import random
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream import theory

F = Fraction
Exact = Sequence[Fraction]
Table = Callable[[tuple[int, ...]], Exact]  # prefix -> law


def printed(value: float, decimals: int) -> object:
    """What a figure printed with so many decimals may stand for."""
    return pytest.approx(value, abs=0.5 * 10**-decimals + 1e-9)


TABLE_4 = [  # task and draft, gamma, alpha, c, the paper's expectation, recomputed from the printed alpha and c
    ("EnDe small t=0", 7, 0.75, 0.02, 3.2, 3.16),
    ("EnDe base t=0", 7, 0.80, 0.04, 3.3, 3.25),
    ("EnDe large t=0", 7, 0.82, 0.11, 2.5, 2.50),
    ("EnDe small t=1", 7, 0.62, 0.02, 2.3, 2.26),
    ("EnDe base t=1", 5, 0.68, 0.04, 2.4, 2.35),
    ("EnDe large t=1", 3, 0.71, 0.11, 2.0, 1.93),
    ("CNN/DM small t=0", 5, 0.65, 0.02, 2.4, 2.40),
    ("CNN/DM base t=0", 5, 0.73, 0.04, 2.6, 2.62),
    ("CNN/DM large t=0", 3, 0.74, 0.11, 2.0, 2.02),
    ("CNN/DM small t=1", 5, 0.53, 0.02, 1.9, 1.89),
    ("CNN/DM base t=1", 3, 0.55, 0.04, 1.8, 1.80),
    ("CNN/DM large t=1", 3, 0.56, 0.11, 1.6, 1.54),
]
table_4 = pytest.mark.parametrize(("row", "gamma", "alpha", "c", "expected", "recomputed"), TABLE_4)


@table_4
def test_table_4(row: str, gamma: int, alpha: float, c: float, expected: float, recomputed: float) -> None:
    assert theory.walltime_factor(alpha, gamma, c) == printed(recomputed, 2)
    # The paper's own column came from unrounded figures: alpha and c are printed to two decimals, it to one.
    low = theory.walltime_factor(alpha - 0.005, gamma, c + 0.005)
    high = theory.walltime_factor(alpha + 0.005, gamma, c - 0.005)
    assert low - 0.05 <= expected <= high + 0.05


@pytest.mark.parametrize("row", [row for row in TABLE_4 if "large" in row[0]], ids=lambda row: row[0])
def test_the_large_drafts_did_not_cost_under_5_percent(row: tuple[str, int, float, float, float, float]) -> None:
    """Section 3.3 says that c was always below 0.05: Table 4's figures for T5-large cannot come from that."""
    _, gamma, alpha, _, expected, _ = row
    assert theory.walltime_factor(alpha - 0.005, gamma, 0.05) > expected + 0.05


def test_60_percent_is_the_oracles_extreme() -> None:
    """Section 3.5 promises up to about 60 %: that is the top of the typical range, not its middle."""
    gains = [theory.oracle_gain(alpha / 100, c / 100) for alpha in range(50, 97) for c in range(1, 11)]
    assert 0.5 < max(gains) < 0.65
    assert sorted(gains)[len(gains) // 2] < 0.4


@pytest.mark.parametrize(
    ("alpha", "speed", "reached"), [(0.62, 2.5, 2.33), (0.71, 3.1, 2.94), (0.76, 3.6, 3.45), (0.84, 5, 4.79)]
)
def test_sampled_lenience_speeds_do_not_follow(alpha: float, speed: float, reached: float) -> None:
    """Section A.5 prints speeds that no gamma reaches with its own alphas and c = 0.015."""
    top = max(theory.walltime_factor(alpha, gamma, 0.015) for gamma in range(101))
    assert top == printed(reached, 2)
    assert top < speed - 0.1


def test_lenience_03_allows_ten_thirds() -> None:
    """A token may be kept up to p / 0.3 = 3.33 p, not 3 p as printed."""
    assert theory.lenient_beta((0.3, 0.7), (1, 0), 0.3) == pytest.approx(1.0)
    assert theory.lenient_beta((0.27, 0.73), (1, 0), 0.3) == pytest.approx(0.9)


def test_eq_1_is_only_a_model() -> None:
    """Half of all rounds keep everything, half nothing: 3 tokens per round, where Equation 1 says 1.94 or 3.36."""
    assert theory.expected_tokens([0.5] * 4) == 3
    assert theory.tokens_per_round(0.5, 4) == 1.9375
    assert theory.tokens_per_round(4 / (4 + 1), 4) == pytest.approx(3.3616)  # accepted / tested tokens


SMALL_LAWS = [tuple(F(n, 4) for n in counts) for counts in product(range(5), repeat=3) if sum(counts) == 4]
every_pair = pytest.mark.parametrize("p", SMALL_LAWS, ids=lambda law: "-".join(str(int(4 * x)) for x in law))


def keep(p: Fraction, q: Fraction) -> Fraction:
    """The chance that a drafted token is kept; q > 0, as it was drafted."""
    return min(F(1), p / q)


def lengths(p: Table, q: Table, vocab: int, gamma: int) -> dict[int, Fraction]:
    """The law of how many drafted tokens Algorithm 1 keeps: every draft times every outcome of its gamma tests."""
    law = dict.fromkeys(range(gamma + 1), F(0))
    for draft in product(range(vocab), repeat=gamma):
        laws = [(p(draft[:i])[x], q(draft[:i])[x]) for i, x in enumerate(draft)]
        drawn = math.prod((y for _, y in laws), start=F(1))
        if not drawn:
            continue
        for tests in product((True, False), repeat=gamma):
            chance = drawn
            for (x, y), passed in zip(laws, tests, strict=True):
                chance *= keep(x, y) if passed else 1 - keep(x, y)
            law[(*tests, False).index(False)] += chance
    return law


def mean(law: dict[int, Fraction]) -> Fraction:
    return sum((count * chance for count, chance in law.items()), F(0))


@every_pair
def test_theorem_3_5(p: Exact) -> None:
    """beta is the chance of acceptance, its complement the distance; what is drawn after all has law p."""
    for q in SMALL_LAWS:
        kept = [y * keep(x, y) if y else F(0) for x, y in zip(p, q, strict=True)]
        assert theory.beta(p, q) == pytest.approx(float(sum(kept)), abs=1e-15)
        assert theory.distance(p, q) == pytest.approx(float(1 - sum(kept)), abs=1e-15)
        middle = [(x + y) / 2 for x, y in zip(p, q, strict=True)]
        assert theory.distance(p, q) == float(sum(abs(x - m) for x, m in zip(p, middle, strict=True)))  # Definition 3.2
        left = [max(F(0), x - y) for x, y in zip(p, q, strict=True)]
        assert sum(left) == 1 - sum(kept)  # the residual's normaliser
        assert [k + r for k, r in zip(kept, left, strict=True)] == list(p)


@pytest.mark.parametrize("gamma", range(5))
@pytest.mark.parametrize("q", [(F(1, 4), F(3, 4)), (F(2, 3), F(1, 3)), (F(1), F(0)), (F(1, 2), F(1, 2))], ids=str)
def test_eq_1_is_algorithm_1(q: Exact, gamma: int) -> None:
    p = (F(1, 2), F(1, 2))
    alpha = theory.beta(p, q)
    law = lengths(lambda prefix: p, lambda prefix: q, 2, gamma)
    assert sum(law.values()) == 1
    assert theory.tokens_per_round(alpha, gamma) == pytest.approx(float(1 + mean(law)), rel=1e-14)
    kept = [float(sum(law[n] for n in range(i, gamma + 1))) for i in range(1, gamma + 1)]
    assert theory.survival([alpha] * gamma) == pytest.approx(kept)  # a capped geometric law
    assert theory.expected_tokens(kept) == pytest.approx(float(1 + mean(law)))


def tables(seed: int, vocab: int, zeros: bool) -> Table:
    """A law for every prefix, at random, in twelfths or so."""
    laws: dict[tuple[int, ...], Exact] = {}

    def table(prefix: tuple[int, ...]) -> Exact:
        if prefix not in laws:
            rng = random.Random(f"{seed} {prefix}")
            counts = [rng.randint(0 if zeros else 1, 6) for _ in range(vocab)]
            counts[rng.randrange(vocab)] += 1
            laws[prefix] = [F(count, sum(counts)) for count in counts]
        return laws[prefix]

    return table


def mean_survival(p: Table, q: Table, vocab: int, gamma: int) -> list[float]:
    """The survival of token verification, prod_{j<=i} min(1, p(x_j)/q(x_j)), averaged over drafts x ~ q."""
    kept = [0.0] * gamma
    for draft in product(range(vocab), repeat=gamma):
        drawn = math.prod((q(draft[:i])[x] for i, x in enumerate(draft)), start=F(1))
        if drawn:
            ratios = [float(keep(p(draft[:i])[x], q(draft[:i])[x])) for i, x in enumerate(draft)]
            kept = [total + float(drawn) * b for total, b in zip(kept, theory.survival(ratios), strict=True)]
    return kept


@pytest.mark.parametrize(("vocab", "gamma"), [(2, 1), (2, 3), (3, 2)])
@pytest.mark.parametrize("seed", range(6))
def test_survival_of_prefix_dependent_laws(seed: int, vocab: int, gamma: int) -> None:
    p, q = tables(2 * seed, vocab, seed % 2 == 0), tables(2 * seed + 1, vocab, seed % 3 == 0)
    token = theory.expected_tokens(mean_survival(p, q, vocab, gamma))
    assert token == pytest.approx(float(1 + mean(lengths(p, q, vocab, gamma))))


shares = st.floats(0, 1)
grid = st.integers(0, 50).map(lambda n: F(n, 50))
costs = st.integers(0, 120).map(lambda n: F(n, 100))
gammas = st.integers(0, 60)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[list[float], list[float]]:
    """Two laws over one vocabulary, zeros included."""
    size = draw(st.integers(1, 6))
    counts = st.lists(st.integers(0, 9), min_size=size, max_size=size).filter(any)
    p, q = draw(counts), draw(counts)
    return [n / sum(p) for n in p], [n / sum(q) for n in q]


@given(pairs())
def test_distance(laws: tuple[list[float], list[float]]) -> None:
    p, q = laws
    assert theory.distance(p, q) == theory.distance(q, p)
    assert theory.beta(p, q) == theory.beta(q, p)
    assert theory.distance(p, p) == 0 and theory.beta(p, p) == pytest.approx(1)
    assert 0 <= theory.distance(p, q) <= 1
    assert theory.beta(p, q) == pytest.approx(1 - theory.distance(p, q), abs=1e-12)  # Lemma 3.3
    shared = any(x > 0 and y > 0 for x, y in zip(p, q, strict=True))
    assert (theory.distance(p, q) > 1 - 1e-9) == (not shared)  # Corollary 3.4


@given(pairs(), st.floats(0.01, 1), st.floats(0.01, 1))
def test_lenience_keeps_more(laws: tuple[list[float], list[float]], one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert 0 <= theory.lenient_beta(*laws, high) <= theory.lenient_beta(*laws, low) <= 1
    assert theory.lenient_beta(*laws, 1) == theory.beta(*laws)
    assert theory.lenient_beta(*laws, low) <= theory.beta(*laws) / low + 1e-12


NEAR_ONE = [1 - 2**-53, 1 - 1e-12, 1 - 1e-9, 1 - 1e-6, 0.999, 1.0, 0.0, 5e-324, 1e-9]


@pytest.mark.parametrize("alpha", NEAR_ONE)
@pytest.mark.parametrize("gamma", [0, 1, 2, 63, 64, 65, 66, 300])
def test_eq_1_is_stable(alpha: float, gamma: int) -> None:
    exact, power = F(0), F(1)
    for _ in range(gamma + 1):
        exact, power = exact + power, power * F(alpha)
    assert theory.tokens_per_round(alpha, gamma) == pytest.approx(float(exact), rel=1e-14)


@given(shares, shares, gammas)
def test_tokens_per_round(one: float, other: float, gamma: int) -> None:
    low, high = sorted((one, other))
    tokens = theory.tokens_per_round(low, gamma)
    assert 1 <= tokens <= gamma + 1
    assert tokens <= theory.tokens_per_round(high, gamma) * (1 + 1e-14)
    assert tokens <= theory.tokens_per_round(low, gamma + 1) * (1 + 1e-14)
    assert tokens <= theory.tokens_per_round(low, math.inf) * (1 + 1e-14)
    assert theory.walltime_factor(low, gamma, 0) == tokens


def test_tokens_per_round_of_an_endless_draft() -> None:
    assert theory.tokens_per_round(0.75, math.inf) == 4
    assert theory.tokens_per_round(1, math.inf) == math.inf
    assert theory.tokens_per_round(0, math.inf) == 1


@given(grid, gammas, costs)
def test_factors_are_their_formulae(alpha: Fraction, gamma: int, c: Fraction) -> None:
    """Theorems 3.8 and 3.11 as printed, in fractions."""
    tokens = (1 - alpha ** (gamma + 1)) / (1 - alpha) if alpha < 1 else F(gamma + 1)
    args = float(alpha), gamma, float(c)
    assert theory.walltime_factor(*args) == pytest.approx(float(tokens / (gamma * c + 1)), rel=1e-12)
    assert theory.operations_factor(*args) == pytest.approx(float((gamma * c + gamma + 1) / tokens), rel=1e-12)
    assert theory.walltime_factor(float(alpha), 0, float(c)) == 1


def slowed(cost: float) -> theory.Curve:
    """A target that pays for every row after the first."""
    return lambda rows: 1 + cost * (rows - 1)


@given(shares, gammas, st.floats(0, 1), st.floats(0, 1))
def test_a_measured_verify_cost(alpha: float, gamma: int, c: float, cost: float) -> None:
    """A linear cost per row is as good as a slower draft: T(gamma+1)/T(1) + gamma c = 1 + gamma (c + cost)."""
    assert theory.round_cost(gamma, c, slowed(cost)) == pytest.approx(1 + gamma * (c + cost))
    measured = theory.walltime_factor(alpha, gamma, c, slowed(cost))
    assert measured == pytest.approx(theory.walltime_factor(alpha, gamma, c + cost))


@given(grid.filter(bool), costs.filter(bool))
def test_best_gamma_follows_from_the_last_token(alpha: Fraction, c: Fraction) -> None:
    """One token more pays iff alpha^(gamma+1) / c > S(gamma), that is 1/c + gamma > sum_{j=1..gamma+1} alpha^-j."""
    gamma, total, limit = 0, 1 / alpha, 60
    while gamma < limit and 1 / c + gamma > total:
        gamma += 1
        total += alpha ** -(gamma + 1)
    assert theory.best_gamma(float(alpha), float(c), limit) == gamma


@given(shares, st.floats(0, 2), st.lists(st.floats(0.2, 3), min_size=13, max_size=13))
def test_best_gamma_is_the_argmax(alpha: float, c: float, measured: list[float]) -> None:
    """Also on a jagged curve, where looking at neighbours is not enough."""

    def verify(rows: int) -> float:
        return 1.0 if rows == 1 else measured[rows - 1]

    best = theory.best_gamma(alpha, c, 12, verify)
    factors = [theory.walltime_factor(alpha, gamma, c, verify) for gamma in range(13)]
    assert factors[best] >= max(factors) * (1 - 1e-10)
    assert all(factor < factors[best] for factor in factors[:best])


def test_best_gamma_edges() -> None:
    assert theory.best_gamma(1, 0, 9) == theory.best_gamma(1, 0.5, 9) == 9  # every token more is gain
    assert theory.best_gamma(0, 0) == theory.best_gamma(1, 1) == theory.best_gamma(0.3, 0.3) == 0
    assert theory.best_gamma(0.9, 0.01, 0) == 0
    assert theory.best_gamma(0.9, 0.01, 5) == 5


@given(grid, grid, costs, costs)
def test_best_gamma_is_monotone(one: Fraction, other: Fraction, cheap: Fraction, dear: Fraction) -> None:
    (low, high), (cheap, dear) = sorted((one, other)), sorted((cheap, dear))
    assert theory.best_gamma(float(low), float(dear), 60) <= theory.best_gamma(float(high), float(cheap), 60)


@given(grid, costs)
def test_corollary_3_9_and_its_converse(alpha: Fraction, c: Fraction) -> None:
    args = float(alpha), float(c)
    best = theory.best_gamma(*args)
    factor = theory.walltime_factor(args[0], best, args[1])
    assert (theory.guaranteed_factor(*args) > 1) == (alpha > c) == (best > 0)
    assert factor >= theory.guaranteed_factor(*args) * (1 - 1e-12)
    if alpha > c:
        assert theory.guaranteed_factor(*args) == pytest.approx(float((1 + alpha) / (1 + c)))
    else:
        assert theory.guaranteed_factor(*args) == 1
        assert all(theory.walltime_factor(args[0], gamma, args[1]) <= 1 + 1e-12 for gamma in range(30))


def test_best_gamma_by_position() -> None:
    powers = [0.8**i for i in range(1, 31)]
    assert theory.best_gamma_by_position(powers, 0.05) == theory.best_gamma(0.8, 0.05) == 8
    # All or nothing: the depth is worth it as long as c < s / (1 + gamma s), whatever Equation 1 says of alpha = 0.5.
    assert theory.best_gamma_by_position([0.5] * 12, 0.2) == 12 > theory.best_gamma(0.5, 0.2) == 1
    assert theory.best_gamma_by_position([0.5] * 12, 0.2, slowed(0.5)) == 0
    assert theory.best_gamma_by_position([], 0.2) == 0


@given(grid.filter(lambda alpha: alpha < 1), costs)
def test_oracle(alpha: Fraction, c: Fraction) -> None:
    """It drafts alpha / (1 - alpha) tokens, pays for those and one target step, and beats every fixed gamma."""
    tokens, paid = 1 / (1 - alpha), 1 + min(c, F(1)) * alpha / (1 - alpha)
    args = float(alpha), float(c)
    assert theory.oracle_factor(*args) == pytest.approx(float(tokens / paid), rel=1e-12)
    assert theory.oracle_gain(*args) >= -1e-12
    factor = theory.walltime_factor(args[0], theory.best_gamma(*args), args[1])
    assert (1 + theory.oracle_gain(*args)) * factor == pytest.approx(theory.oracle_factor(*args))


def test_oracle_edges() -> None:
    assert theory.oracle_factor(0.9, 0) == pytest.approx(theory.tokens_per_round(0.9, math.inf))
    assert theory.oracle_factor(1, 0) == math.inf
    assert theory.oracle_factor(1, 0.25) == 4
    assert theory.oracle_factor(0.9, 2) == 1  # a draft slower than the target is left alone
    assert theory.oracle_gain(0.3, 0.5) == pytest.approx(1 / (1 - 0.3 * 0.5) - 1)  # no fixed gamma helps, it still does


REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: theory.beta((0.5, 0.5), (1,)), "p has 2 entries and q 1"),
    (lambda: theory.beta((), ()), "p is no distribution"),
    (lambda: theory.distance((0.5, 0.4), (1, 0)), "p is no distribution.* not 0.9"),
    (lambda: theory.distance((1, 0), (1.5, -0.5)), "q is no distribution"),
    (lambda: theory.beta((0.5, 0.501), (1, 0)), "p is no distribution.* not 1.001"),
    (lambda: theory.beta((math.nan, 1), (1, 0)), "p is no distribution"),
    (lambda: theory.beta((math.inf, 1), (1, 0)), "p is no distribution"),
    (lambda: theory.lenient_beta((1, 0), (1, 0), 0), "lenience=0 "),
    (lambda: theory.lenient_beta((1, 0), (1, 0), 1.01), "lenience=1.01"),
    (lambda: theory.lenient_beta((1, 0), (1, 0), math.nan), "lenience=nan"),
    (lambda: theory.tokens_per_round(1.2, 3), "alpha=1.2 .*between 0 and 1"),
    (lambda: theory.tokens_per_round(math.nan, 3), "alpha=nan"),
    (lambda: theory.tokens_per_round(0.5, -1), "gamma=-1 .*whole number"),
    (lambda: theory.tokens_per_round(0.5, 1.5), "gamma=1.5"),
    (lambda: theory.tokens_per_round(0.5, math.nan), "gamma=nan"),
    (lambda: theory.survival([0.5, -0.1]), "beta=-0.1"),
    (lambda: theory.expected_tokens([1.1]), "chance=1.1"),
    (lambda: theory.round_cost(-1, 0.1), "gamma=-1"),
    (lambda: theory.round_cost(2, -0.1), "c=-0.1 .*0 or more"),
    (lambda: theory.round_cost(2, math.inf), "c=inf"),
    (lambda: theory.round_cost(2, 0.1, lambda rows: 0.0), r"verify\(3\)=0.0"),
    (lambda: theory.round_cost(2, 0.1, lambda rows: math.nan), r"verify\(3\)=nan"),
    (lambda: theory.round_cost(2, 0.1, lambda rows: math.inf), r"verify\(3\)=inf"),
    (lambda: theory.walltime_factor(0.5, 2, -1), "c=-1"),
    (lambda: theory.walltime_factor(0.5, math.inf, 0), "gamma=inf"),  # type: ignore[arg-type]
    (lambda: theory.operations_factor(0.5, 2, -1), "c_hat=-1"),
    (lambda: theory.operations_factor(0.5, math.inf, 0), "gamma=inf"),  # type: ignore[arg-type]
    (lambda: theory.guaranteed_factor(0.5, -0.1), "c=-0.1"),
    (lambda: theory.best_gamma(2, 0.1), "alpha=2 "),
    (lambda: theory.best_gamma(0.5, 0.1, -3), "limit=-3"),
    (lambda: theory.best_gamma(0.5, -0.1, 0), "c=-0.1"),
    (lambda: theory.best_gamma_by_position([0.5, 2], 0.1), "chance=2"),
    (lambda: theory.oracle_factor(0.5, -0.1), "c=-0.1"),
    (lambda: theory.oracle_gain(1.5, 0.1), "alpha=1.5"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=f"^.*{message}") as caught:
        call()
    assert str(caught.value).endswith(".") and "\n" not in str(caught.value)


def test_a_float32_softmax_is_a_law() -> None:
    """Rounding of a large vocabulary is no mistake of the caller's, and beta stays a chance."""
    law = [(1 + 2e-6) / 1000] * 1000
    assert theory.beta(law, law) == 1
    assert theory.expected_tokens([theory.beta(law, law)]) == 2
    assert theory.distance((1 + 2e-6, 0), (0, 1 + 2e-6)) == 1


def waited(gamma: int, c: float, single: float, until: float, right: bool) -> float:
    """How long a client waits whose question comes `until` after the last answer: the other machine goes ahead step by
    step, finishes the step that it is in, and either has what is wanted or begins anew."""
    steps = min(gamma + 1, math.floor(until / single))  # finished when the question comes
    busy = steps < gamma + 1
    now = (steps + 1) * single - until if busy else 0.0
    return now + single * max(0, gamma - steps) if right else now + gamma * c


@pytest.mark.parametrize("delay", [0.0, 0.3, 2.0])
@pytest.mark.parametrize(
    ("gamma", "c", "single"), [(1, 0.05, 0.05), (4, 0.1, 0.1), (4, 0.4, 0.4), (4, 0.4, 0.45), (7, 0.6, 0.6)]
)
def test_a_remote_round_costs_what_going_through_its_steps_gives(
    gamma: int, c: float, single: float, delay: float
) -> None:
    """Averaged over where in a step the question falls: delays over one step, at equal distances."""
    grid = [delay + single * (place + 0.5) / 400 for place in range(400)]
    for right in (True, False):
        want = sum(1 + each + waited(gamma, c, single, 1 + each, right) for each in grid) / len(grid)
        costs = (theory.remote_round_cost(gamma, c, each, float(right), single=single) for each in grid)
        assert sum(costs) / len(grid) == pytest.approx(want, rel=0.01)


def test_a_remote_round_is_a_local_one_where_nothing_is_away_or_ahead() -> None:
    assert theory.remote_round_cost(0, 0.1, 5.0, 0.0) == 1
    assert theory.remote_round_cost(3, 0.1, 0.0, 0.0) == theory.round_cost(3, 0.1)  # all done before it is asked
    assert theory.remote_round_cost(3, 0.1, 2.0, 1.0) == 3.0  # all ready: the network alone
    assert theory.remote_factor(0.8, 4, 0.1, 0.0) > theory.walltime_factor(0.8, 4, 0.1)
    for wrong in ({"delay": -1.0}, {"ready": 1.5}, {"delay": math.inf}, {"single": -1.0}):
        with pytest.raises(ValueError, match="not possible"):
            theory.remote_round_cost(**{"gamma": 3, "c": 0.1, "delay": 1.0, "ready": 0.5, **wrong})


def test_the_longest_delay_is_where_the_gain_ends() -> None:
    assert theory.longest_delay(lambda delay: 3 / (1 + delay)) == pytest.approx(2)
    assert theory.longest_delay(lambda delay: 0.9) == 0
    found = theory.longest_delay(lambda delay: theory.remote_factor(0.8, 4, 0.1, delay))
    assert theory.remote_factor(0.8, 4, 0.1, 0.99 * found) > 1 > theory.remote_factor(0.8, 4, 0.1, 1.01 * found)
