"""Laws of next states: what replaces a refused draft, acceptance in closed form, and what is no law."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.core.draws import Purpose
from slipstream.processes import Discrete, Gaussian, Mixture, Numbers, reject_until
from toys import rare

ROWS = 100_000
KS = math.sqrt(-math.log(5e-7) / ROWS)
"""Largest distance of two samples of `ROWS` (Kolmogorov-Smirnov); a false alarm has odds 1e-6."""


def numbers(rows: int, purpose: Purpose = Purpose.DRAFT, seed: int = 1) -> Numbers:
    """Numbers of so many chains at their first step."""
    return Numbers.of(seed, purpose, torch.arange(rows), torch.zeros(rows), torch.zeros(rows))


def distance(left: Tensor, right: Tensor) -> float:
    """The largest difference of two empirical cumulative laws."""
    places = torch.cat([left, right]).sort().values
    shares = (torch.searchsorted(each.sort().values, places, right=True) / len(each) for each in (left, right))
    one, other = shares
    return float((one - other).abs().max())


def coupled(p: Any, q: Any, everything: bool = False, redrawn: bool = False) -> Tensor:
    """A state of p made of one of q by the rule of a round; with one of two mistakes, if told so."""
    drafts = q.sample(numbers(ROWS))
    coins = numbers(ROWS, Purpose.ACCEPT).uniforms(1)[:, 0]
    refused = (coins.log() >= p.log_density(drafts) - q.log_density(drafts)).nonzero()[:, 0]
    if everything:
        return drafts
    here, again = p.select(refused), numbers(ROWS, Purpose.NEXT).select(refused)
    drafts[refused] = here.sample(again) if redrawn else here.residual(q.select(refused), drafts[refused], again)
    return drafts


MEANS = torch.tensor([[0.3, -0.2], [1.0, 0.4]], dtype=torch.float64)
FACTOR = torch.tensor([[0.7, 0.0], [0.5, 1.1]], dtype=torch.float64)


def gaussians(scale: float | Tensor) -> tuple[Gaussian, Gaussian]:
    p, q = (Gaussian(mean.expand(ROWS, 2), scale) for mean in MEANS)
    return p, q


def mixture(weights: list[float], means: list[float], scales: list[float]) -> Mixture:
    rows = (torch.tensor(each, dtype=torch.float64).expand(ROWS, -1) for each in (weights, means, scales))
    one, two, three = rows
    return Mixture(one, two.unsqueeze(-1), three.unsqueeze(-1))


PAIRS = {
    "number": gaussians(0.8),
    "diagonal": gaussians(torch.tensor([0.5, 1.5], dtype=torch.float64)),
    "factor": gaussians(FACTOR),
    "mixture": (mixture([0.3, 0.7], [-1.0, 1.0], [0.5, 0.3]), mixture([1.0], [0.2], [1.2])),
}


FEW = ("factor", "mixture")  # in the fast tests


@pytest.mark.parametrize("kind", [*FEW, *rare(*(kind for kind in PAIRS if kind not in FEW))])
def test_refused_drafts_are_replaced_exactly(kind: str) -> None:
    """Each coordinate and their sum are distributed as draws of p; the mistakes are not."""
    p, q = PAIRS[kind]
    direct = p.sample(numbers(ROWS, seed=2))
    views = [lambda x: x[:, 0], lambda x: x[:, -1], lambda x: x.sum(-1), lambda x: (x * x).sum(-1)]
    assert max(distance(view(coupled(p, q)), view(direct)) for view in views) < KS
    for mistake in ({"everything": True}, {"redrawn": True}):
        assert max(distance(view(coupled(p, q, **mistake)), view(direct)) for view in views) > 2 * KS


def test_discrete_laws_are_put_right_exactly() -> None:
    """Counts against p by chi-squared with 2 degrees of freedom, beyond 27.6 with odds 1e-6."""
    p, q = (Discrete(torch.tensor([row]).double().expand(ROWS, 3)) for row in ([0.2, 0.3, 0.5], [0.6, 0.3, 0.1]))

    def chi_squared(states: Tensor) -> float:
        expected = p.probs[0] * ROWS
        return float(((states.bincount(minlength=3) - expected).square() / expected).sum())

    assert chi_squared(coupled(p, q)) < 27.6
    assert chi_squared(coupled(p, q, everything=True)) > 100
    assert chi_squared(coupled(p, q, redrawn=True)) > 100
    assert p.beta(q)[0].item() == pytest.approx(0.6)


@pytest.mark.parametrize("kind", ["number", "diagonal", "factor"])
def test_acceptance_of_gaussians_in_closed_form(kind: str) -> None:
    """The mean of min(1, p/q) over q within 5 of its deviations (odds 6e-7); that of a farther pair is outside."""
    p, q = PAIRS[kind]
    drafts = q.sample(numbers(ROWS))
    shares = (p.log_density(drafts) - q.log_density(drafts)).clamp(max=0).exp()
    bound = 5 * float(shares.std()) / math.sqrt(ROWS)
    assert abs(float(shares.mean() - p.beta(q)[0])) < bound
    assert abs(float(shares.mean() - Gaussian(p.mean + 0.1, p.scale).beta(q)[0])) > bound
    assert p.beta(p)[0].item() == 1.0


def test_reflection_does_not_depend_on_coordinates() -> None:
    """States of any shape are mirrored as their flat form is."""
    p, q = PAIRS["number"]
    refused, none = q.sample(numbers(ROWS)), numbers(ROWS, Purpose.NEXT)
    flat = p.residual(q, refused, none)
    shaped = Gaussian(p.mean.reshape(-1, 1, 2), 0.8).residual(
        Gaussian(q.mean.reshape(-1, 1, 2), 0.8), refused.reshape(-1, 1, 2), none
    )
    assert torch.equal(shaped[:, 0], flat)


def test_numbers_are_those_of_their_chain_and_step() -> None:
    everyone = numbers(1000)
    some = torch.tensor([7, 3, 7])
    assert torch.equal(everyone.select(some).uniforms(4), everyone.uniforms(4)[some])
    assert torch.equal(everyone.uniforms(5)[:, :4], everyone.uniforms(4))
    others = [numbers(1000, Purpose.NEXT), numbers(1000, seed=2), everyone.again(torch.zeros(1000))]
    everything = torch.cat([each.uniforms(4).flatten() for each in (everyone, *others)])
    assert len(everything.unique()) == len(everything)
    assert float(everything.min()) >= 0 and float(everything.max()) < 1


def test_a_density_that_is_not_its_sampler_s_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """q above p everywhere: such densities are not both normalized, and there is no residual."""
    p, q = mixture([1.0], [0.0], [1.0]).select(torch.arange(2)), mixture([1.0], [0.0], [1.0]).select(torch.arange(2))
    monkeypatch.setattr("slipstream.processes.laws.ATTEMPTS", 1000)
    with pytest.raises(FloatingPointError, match="must be normalized"):
        reject_until(p, q, numbers(2))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Discrete(torch.tensor([[0.5, 0.6]])), "sum to 1"),
        (lambda: Discrete(torch.tensor([[1.5, -0.5]])), ">= 0"),
        (lambda: Discrete(torch.tensor([1.0])), "rows, states"),
        (lambda: Discrete(torch.tensor([[1]])), "float32"),
        (lambda: Gaussian(torch.zeros(2), 1.0), "rows, \\*state"),
        (lambda: Gaussian(torch.zeros(2, 2), 0.0), "positive"),
        (lambda: Gaussian(torch.zeros(2, 2), torch.ones(3)), "shape \\(3,\\)"),
        (lambda: Gaussian(torch.zeros(2, 2), torch.ones(2, 2)), "lower triangular"),
        (lambda: Gaussian(torch.zeros(2, 2), 1.0).join([Gaussian(torch.zeros(2, 2), 2.0)]), "same scale"),
        (lambda: Gaussian(torch.zeros(2, 2), 1.0).beta(Gaussian(torch.zeros(2, 2), 2.0)), "same scale"),
        (lambda: Mixture(torch.ones(2, 1), torch.zeros(2, 1, 1), torch.zeros(2, 1, 1)), "positive"),
        (lambda: Mixture(torch.ones(2, 2), torch.zeros(2, 2, 1), torch.ones(2, 2, 1)), "sum to 1"),
        (lambda: Mixture(torch.ones(2, 2), torch.zeros(2, 1, 1), torch.ones(2, 1, 1)), "shapes"),
    ],
)
def test_what_is_no_law_is_refused(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()
