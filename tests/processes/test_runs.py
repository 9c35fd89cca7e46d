"""Speculative execution: the law of whole trajectories, by enumeration on tables and by two samples of 10^5 chains."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.core.draws import Purpose
from slipstream.processes import (
    Costs,
    Discrete,
    Gaussian,
    Laws,
    Mixture,
    Numbers,
    Pooled,
    Run,
    Speculation,
    measure,
    simulate,
)
from slipstream.processes.runs import Chains, play_round
from toys import rare

CHAINS, STEPS = 100_000, 12
KS = math.sqrt(-math.log(5e-7) / CHAINS)
"""Largest distance of two samples of `CHAINS` (Kolmogorov-Smirnov); a false alarm has odds 1e-6."""

P = torch.tensor([[1 / 4, 1 / 4, 1 / 2], [1 / 2, 1 / 4, 1 / 4], [1 / 4, 1 / 4, 1 / 2]], dtype=torch.float64)
Q = torch.tensor([[1 / 2, 1 / 4, 1 / 4], [1, 0, 0], [3 / 4, 1 / 4, 0]], dtype=torch.float64)
GRID = 12
"""Every chance that occurs in a round on these tables is a multiple of 1/12, so that a grid of 12 numbers gives it."""


@dataclass(frozen=True)
class Grid:
    """Numbers that are given."""

    numbers: Tensor

    def uniforms(self, count: int) -> Tensor:
        """The numbers, as draws of one number each."""
        assert count == 1
        return self.numbers[:, None]


class Enumerated(Chains):
    """Chains whose draws take every combination of numbers on the grid: two drafts, two coins, one next state."""

    def numbers(self, purpose: Purpose, rows: Tensor, ahead: Tensor | int) -> Any:
        """The digits of a row's name in base `GRID`."""
        place = {Purpose.DRAFT: 0, Purpose.ACCEPT: 2, Purpose.NEXT: 4}[purpose]
        step = torch.zeros_like(rows) if purpose == Purpose.NEXT else torch.as_tensor(ahead).expand(len(rows))
        return Grid((self.names[rows] // GRID ** (place + step) % GRID + 0.5).double() / GRID)


def law_of_three_steps(target: Callable[[Tensor, Tensor], Laws]) -> Tensor:
    """The probability (3, 3, 3) of the first three states from 0 on, by every outcome of one round of gamma 2; where a
    round gives fewer, P goes on."""
    rows = torch.arange(GRID**5)
    chains = Enumerated(0, rows, torch.zeros_like(rows), torch.zeros_like(rows))
    round = play_round(target, lambda x, t: Discrete(Q[x]), chains, torch.full_like(rows, 2))
    found = torch.zeros(3, 3, 3, dtype=torch.float64)
    outcomes = torch.cat([round.path, round.accepted[:, None]], 1).unique(dim=0, return_counts=True)
    for (*path, accepted), count in zip(outcomes[0].tolist(), outcomes[1].tolist(), strict=True):
        for states in itertools.product(range(3), repeat=3):
            if list(states[: accepted + 1]) == path[: accepted + 1]:
                rest = math.prod(float(P[states[i], states[i + 1]]) for i in range(accepted, 2))
                found[states] += count * rest / GRID**5
    return found


def table(x: Tensor, t: Tensor) -> Discrete:
    return Discrete(P[x])


@dataclass(frozen=True)
class Wrong:
    """Laws of a target with a mistake: it takes every draft, or draws afresh where one was refused."""

    law: Any
    everything: bool

    def select(self, rows: Tensor) -> Wrong:
        return Wrong(self.law.select(rows), self.everything)

    def sample(self, numbers: Numbers) -> Tensor:
        return self.law.sample(numbers)

    def log_density(self, states: Tensor) -> Tensor:
        return torch.full((len(states),), math.inf) if self.everything else self.law.log_density(states)

    def residual(self, q: Any, refused: Tensor, numbers: Numbers) -> Tensor:
        return self.law.sample(numbers)


def wrong(target: Any, everything: bool) -> Any:
    return lambda x, t: Wrong(target(x, t), everything)


@pytest.mark.slow
def test_a_round_on_tables_has_the_law_of_the_target() -> None:
    expected = P[0][:, None, None] * P[:, :, None] * P[None, :, :]
    assert torch.allclose(law_of_three_steps(table), expected, atol=1e-12)
    for everything in (True, False):
        assert float((law_of_three_steps(wrong(table, everything)) - expected).abs().sum()) > 0.1


Kernel = Callable[[Tensor, Tensor], Laws]


def well(force: float) -> Kernel:
    """A step in a double well whose depth moves with time."""

    def kernel(x: Tensor, t: Tensor) -> Gaussian:
        return Gaussian(x - 0.2 * force * (x**3 - x) + 0.02 * t[:, None], 0.4)

    return kernel


def switching(shift: float) -> Kernel:
    """A step that goes either way, by a mixture."""

    def kernel(x: Tensor, t: Tensor) -> Mixture:
        up = torch.sigmoid(2 * x + shift)
        means = torch.stack([x + 0.5, x * 0.8 - 0.5], 1)
        return Mixture(torch.cat([up, 1 - up], 1), means, torch.full_like(means, 0.3 + 0.1 * shift))

    return kernel


def walk(shift: float) -> Kernel:
    """A walk on ten states."""

    def kernel(x: Tensor, t: Tensor) -> Discrete:
        return Discrete(torch.softmax(-(torch.arange(10.0) - 0.9 * x[:, None] - shift).square() / 4, -1))

    return kernel


PROCESSES = {
    "gaussian": (well(1.0), well(0.0), torch.full((CHAINS, 1), -1.0, dtype=torch.float64)),
    "mixture": (switching(0.0), switching(0.8), torch.zeros(CHAINS, 1, dtype=torch.float64)),
    "discrete": (walk(0.0), walk(0.8), torch.full((CHAINS,), 4)),
}


def views(run: Run) -> list[Tensor]:
    """Figures of trajectories: states early and late, the highest, the mean, how steps hang together, and crossings."""
    x = run.trajectories.double().reshape(CHAINS, -1)
    middle = x - x[:, :1]
    crossings = (middle[:, 2:].sign() != middle[:, 1:-1].sign()).sum(1)
    return [x[:, 1], x[:, 5], x[:, -1], x.amax(1), x.mean(1), (x[:, 1:] * x[:, :-1]).mean(1), crossings.double()]


def distances(one: Run, other: Run) -> list[float]:
    """The largest differences of the cumulative laws of all figures."""
    found = []
    for left, right in zip(views(one), views(other), strict=True):
        places = torch.cat([left, right])
        shares = [torch.searchsorted(each.sort().values, places, right=True) / CHAINS for each in (left, right)]
        found.append(float((shares[0] - shares[1]).abs().max()))
    return found


@pytest.mark.parametrize("kind", ["gaussian", *rare("discrete", "mixture")])
def test_trajectories_have_the_law_of_the_target(kind: str) -> None:
    """Seven figures of 10^5 trajectories against direct simulation: a false alarm has odds 7e-6. Controls fail."""
    target, draft, starts = PROCESSES[kind]
    direct = simulate(target, starts, STEPS, seed=1)
    drafted = Speculation(target, draft, 3).run(starts, STEPS, seed=2)
    assert max(distances(drafted, direct)) < KS
    assert 0.3 < (drafted.stats.alpha or 0) < 0.99
    for everything in (True, False):
        mistaken = Speculation(wrong(target, everything), draft, 3).run(starts, STEPS, seed=2)
        assert max(distances(mistaken, direct)) > 1.5 * KS


def test_a_chain_does_not_depend_on_its_batch() -> None:
    target, draft, starts = PROCESSES["gaussian"]
    some = Speculation(target, draft, 4).run(starts[:50], STEPS, seed=5)
    more = Speculation(target, draft, 4).run(starts[:80], STEPS, seed=5)
    assert torch.equal(some.trajectories, more.trajectories[:50])
    other = Speculation(target, draft, 4).run(starts[:50], STEPS, seed=6)
    assert not torch.equal(some.trajectories, other.trajectories)


def test_a_perfect_draft_is_always_kept() -> None:
    target, _, starts = PROCESSES["gaussian"]
    stats = Speculation(target, target, 3).run(starts[:20], STEPS).stats
    assert (stats.emitted, stats.target_calls, stats.alpha) == (20 * STEPS, 20 * STEPS // 4, 1.0)
    assert stats.acceptance_by_position == [1.0, 1.0, 1.0]


def test_f_is_asked_once_per_round_and_never_beyond_the_end() -> None:
    target, draft, starts = PROCESSES["gaussian"]
    asked, times = list[int](), list[int]()

    def counted(x: Tensor, t: Tensor) -> Laws:
        asked.append(len(x))
        times.append(int(t.max()))
        return target(x, t)

    run = Speculation(counted, draft, 3).run(starts[:1], 30)
    assert len(asked) == run.stats.target_calls < 30
    assert max(asked) == 4 and max(times) == 29
    assert sum(asked) == run.stats.drafted + run.stats.target_calls


def test_statistics_agree_with_the_closed_form() -> None:
    """Alpha of two walks a fixed distance apart: within 5 deviations (odds 6e-7), a wrong one is not."""
    delta = 0.7
    step: Callable[[float], Kernel] = lambda drift: lambda x, t: Gaussian(x + drift, 1.0)  # noqa: E731
    stats = Speculation(step(delta), step(0.0), 2).run(torch.zeros(CHAINS, 1, dtype=torch.float64), 6).stats
    beta = float(Gaussian(torch.zeros(1, 1), 1.0).beta(Gaussian(torch.full((1, 1), delta), 1.0)))
    bound = 5 * 0.5 / math.sqrt(stats.tested)
    assert stats.alpha == pytest.approx(beta, abs=bound)
    assert stats.acceptance_by_position[0] == pytest.approx(beta, abs=5 * 0.5 / math.sqrt(CHAINS))
    assert stats.alpha != pytest.approx(beta + 0.02, abs=bound)


def test_a_chain_ends_at_its_first_state_that_ends_it() -> None:
    """The law of the time of ending is that of plain simulation (odds 1e-6), and nothing comes after it."""

    def above(x: Tensor) -> Tensor:
        return x[:, 0] > 0.5

    target, draft, starts = PROCESSES["gaussian"]
    direct = simulate(target, starts, STEPS, 1, above)
    drafted = Speculation(target, draft, 3, above).run(starts, STEPS, 2)
    shares = [torch.bincount(run.steps, minlength=STEPS + 1).cumsum(0) / CHAINS for run in (direct, drafted)]
    assert float((shares[0] - shares[1]).abs().max()) < KS
    assert int(drafted.steps.min()) < STEPS == int(drafted.steps.max())
    over = above(drafted.trajectories.flatten(0, 1)).reshape(CHAINS, -1)
    first = torch.where(over.any(1), over.long().argmax(1), STEPS)
    assert torch.equal(first, drafted.steps)
    assert drafted.stats.emitted == int(drafted.steps.sum())


def test_parts_of_a_pool_are_put_together_in_order() -> None:
    target, draft, starts = PROCESSES["mixture"]
    with ThreadPoolExecutor(3) as pool:
        pooled = Speculation(Pooled(target, pool, 3), draft, 3).run(starts[:40], STEPS)
    assert torch.equal(pooled.trajectories, Speculation(target, draft, 3).run(starts[:40], STEPS).trajectories)


def test_rounds_are_shown() -> None:
    target, draft, starts = PROCESSES["discrete"]
    seen = list[int]()
    run = Speculation(target, draft, 2).run(starts[:3], 5, watch=lambda round: seen.append(len(round.lengths)))
    assert sum(seen) == run.stats.target_calls


def test_costs_choose_gamma_by_the_paper_s_model() -> None:
    target, draft, starts = PROCESSES["gaussian"]
    stats = Speculation(target, draft, 6).run(starts[:2000], 40).stats
    kept = stats.acceptance_by_position
    free = Costs(1.0, 0.0, (1.0,) * 7)
    assert free.best_gamma(stats) == 6
    assert free.factor(stats, 2) == pytest.approx(1 + kept[0] + kept[1])
    assert Costs(1.0, 1.5, (1.0,) * 7).best_gamma(stats) == 0
    with pytest.raises(ValueError, match="not measured"):
        Costs(1.0, 0.0, (1.0,) * 3).factor(stats, 3)
    with pytest.raises(ValueError, match="not tried"):
        Costs(1.0, 0.0, (1.0,) * 9).factor(stats, 7)
    costs = measure(target, draft, starts[:4], 3, repeats=1)
    assert costs.curve[0] == 1.0 and len(costs.curve) == 4 and costs.c > 0


def test_the_page_s_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "processes.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    exec(code, {})
    assert capsys.readouterr().out.startswith("torch.Size([1000, 101, 1]) 0.9")


def test_the_page_names_what_is_public() -> None:
    import slipstream.processes as processes

    page = (Path(__file__).parents[2] / "docs" / "processes.md").read_text(encoding="utf-8")
    named = {"Kernel", "Numbers", "ProcessRound", "Run"}  # types that users are given
    assert {name for name in processes.__all__ if name not in page} <= named


FAULTS: Sequence[tuple[Callable[[], object], str]] = [
    (lambda: Speculation(table, table, -1), "gamma"),
    (lambda: simulate(table, torch.zeros(2, dtype=torch.long), 0), "steps"),
    (lambda: simulate(table, torch.zeros(0, dtype=torch.long), 3), "starts"),
    (lambda: measure(table, table, torch.zeros(2, dtype=torch.long), 2), "too few"),
    (lambda: Pooled(table, ThreadPoolExecutor(1), 0), "workers"),
]


@pytest.mark.parametrize(("make", "words"), FAULTS)
def test_what_cannot_be_run_is_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize("gamma", [0, 2])
def test_a_process_that_diverges_is_told(gamma: int) -> None:
    def away(x: Tensor, t: Tensor) -> Gaussian:
        return Gaussian(x**5 * 10, 1.0)

    with pytest.raises(FloatingPointError, match="diverged"):
        Speculation(away, away, gamma).run(torch.full((2, 1), 3.0), 30)
