"""`Laws`, the protocol of laws of the next states, and its kinds, with the residual that replaces a refused draft."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor

from slipstream.core.draws import inverse
from slipstream.core.law import Law
from slipstream.decoding import acceptance
from slipstream.processes.numbers import Numbers
from slipstream.theory import SUM_TOLERANCE


@dataclass(frozen=True, slots=True)
class Discrete:
    """A probability per state: `probs` (rows, states), float32 or wider; states are whole numbers from 0 up.
    Raises ValueError if a row is not a law."""

    probs: Tensor

    def __post_init__(self) -> None:
        if self.probs.ndim != 2 or self.probs.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"probs of shape {tuple(self.probs.shape)} and {self.probs.dtype} are not possible: give "
                "(rows, states) in float32 or float64."
            )
        total = self.probs.sum(-1)
        if not bool((self.probs >= 0).all()) or not bool(((total - 1).abs() <= SUM_TOLERANCE).all()):
            raise ValueError("probs are no distributions: every row must be >= 0 and sum to 1.")

    @property
    def rows(self) -> int:
        return self.probs.shape[0]

    def select(self, rows: Tensor) -> Discrete:
        return Discrete(self.probs[rows])

    def join(self, others: Sequence[Discrete]) -> Discrete:
        return Discrete(torch.cat([self.probs, *(law.probs for law in others)]))

    def sample(self, numbers: Numbers) -> Tensor:
        return inverse(self.probs.unsqueeze(1), numbers.uniforms(1).to(self.probs.device))[:, 0]

    def log_density(self, states: Tensor) -> Tensor:
        return self._law.of(states.unsqueeze(1))[:, 0].log()

    def residual(self, q: Discrete, refused: Tensor, numbers: Numbers) -> Tensor:
        """Draw states (rows,) from norm(max(0, p - q)) (section 2.3 of arXiv 2211.17192)."""
        return Discrete(acceptance.residual(self._law, q._law).dense[:, 0]).sample(numbers)

    def beta(self, q: Discrete) -> Tensor:
        """Return the chance that a state drawn from q is kept, sum_x min(p(x), q(x)) (Theorem 3.5) -> (rows,)."""
        return acceptance.beta(self._law, q._law)[:, 0]

    @property
    def _law(self) -> Law:
        return Law(probs=self.probs.unsqueeze(1))


@dataclass(frozen=True, slots=True)
class Gaussian:
    """Normal laws around `mean` (rows, *state), all with one covariance: mean + scale times standard normal noise.

    `scale` is a number, a deviation per coordinate (d,), or a lower triangular factor of the covariance (d, d), d being
    the number of coordinates of a state. Target and draft must have the same. Laws of different covariances are
    `Mixture`s of one component. Raises ValueError for another scale, or one that is not positive.
    """

    mean: Tensor
    scale: float | Tensor

    def __post_init__(self) -> None:
        if self.mean.ndim < 2 or not self.mean.is_floating_point():
            raise ValueError(f"mean of shape {tuple(self.mean.shape)} is not possible: give floats (rows, *state).")
        scale, d = torch.as_tensor(self.scale), self.mean[0].numel() if self.rows else 0
        if self.rows and tuple(scale.shape) not in ((), (d,), (d, d)):
            raise ValueError(f"scale of shape {tuple(scale.shape)} is not possible: (), ({d},) or ({d}, {d}).")
        if not bool(((scale.diagonal() if scale.ndim == 2 else scale) > 0).all()):
            raise ValueError("scale must be positive; of a factor of the covariance, the diagonal must be.")
        if scale.ndim == 2 and bool(scale.triu(1).any()):
            raise ValueError("a scale of two dimensions must be lower triangular (torch.linalg.cholesky gives it).")

    @property
    def rows(self) -> int:
        return self.mean.shape[0]

    def select(self, rows: Tensor) -> Gaussian:
        return Gaussian(self.mean[rows], self.scale)

    def join(self, others: Sequence[Gaussian]) -> Gaussian:
        for law in others:
            _check_same(self, law)
        return Gaussian(torch.cat([self.mean, *(law.mean for law in others)]), self.scale)

    def sample(self, numbers: Numbers) -> Tensor:
        return self._color(numbers.normals(self.mean[0].numel() if self.rows else 1).to(self.mean))

    def log_density(self, states: Tensor) -> Tensor:
        """Return the log density at states (rows,), without the constant of scale and dimension that p and q share."""
        return -self._whiten(states).square().sum(-1) / 2

    def residual(self, q: Gaussian, refused: Tensor, numbers: Numbers) -> Tensor:
        """Return the refused states, mirrored at the plane half-way between the means: reflection coupling, no draw.

        In whitened coordinates the mirror maps q to p and max(0, q - p) to max(0, p - q), so that refused states of q
        are mapped to states of the residual.
        """
        _check_same(self, q)
        noise, e = q._whiten(refused), q._whiten(self.mean)
        e = e / e.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(e.dtype).tiny)
        return self._color(noise - 2 * e * (e * noise).sum(-1, keepdim=True))

    def beta(self, q: Gaussian) -> Tensor:
        """Return the chance that a state drawn from q is kept: 1 - TV = 2 Phi(-|delta| / 2), with delta the distance of
        the means in standard deviations -> (rows,)."""
        _check_same(self, q)
        return torch.erfc(q._whiten(self.mean).norm(dim=-1) / math.sqrt(8))

    def _whiten(self, states: Tensor) -> Tensor:
        """Convert states (rows, *state) to the noise (rows, d) that makes them."""
        rest = (states - self.mean).flatten(1)
        if isinstance(self.scale, Tensor) and self.scale.ndim == 2:
            return torch.linalg.solve_triangular(self.scale, rest.T, upper=False).T
        return rest / self.scale

    def _color(self, noise: Tensor) -> Tensor:
        factor = isinstance(self.scale, Tensor) and self.scale.ndim == 2
        return self.mean + (noise @ self.scale.T if factor else noise * self.scale).reshape(self.mean.shape)  # type: ignore[union-attr]


def _check_same(p: Gaussian, q: Gaussian) -> None:
    if p.scale is not q.scale and not torch.equal(torch.as_tensor(p.scale), torch.as_tensor(q.scale)):
        raise ValueError(
            f"Gaussians of scale {p.scale} and {q.scale} cannot be reflected into each other: give target and draft "
            "the same scale, or make both Mixtures of one component."
        )


L = TypeVar("L", bound="Laws")
ATTEMPTS = 2**22  # the number of attempts at one residual after which `reject_until` gives up
BLOCK = 2**16  # the greatest number of attempts, of all rows together, that are made at once


class Laws(Protocol):
    """A law of the next state for every row. p, the target's, and q, the draft's, are of one class."""

    @property
    def rows(self) -> int:
        """The number of laws."""

    def select(self, rows: Tensor) -> Self:
        """Return the laws of these rows, in this order; a row may come more than once."""

    def join(self, others: Sequence[Self]) -> Self:
        """Return these laws, then those of others."""

    def sample(self, numbers: Numbers) -> Tensor:
        """Draw a state from each law -> (rows, *state)."""

    def log_density(self, states: Tensor) -> Tensor:
        """Return the logarithm of probability or density at `states` (rows, *state) -> (rows,). It must be normalized,
        or lack the same factor in p and q."""

    def residual(self, q: Self, refused: Tensor, numbers: Numbers) -> Tensor:
        """Replace refused states that were drawn from q: draw (rows, *state) from norm(max(0, p - q))."""


def reject_until(p: L, q: L, numbers: Numbers) -> Tensor:
    """Draw states (rows, *state) of norm(max(0, p - q)) by rejection: keep y ~ p with chance max(0, 1 - q(y)/p(y)).

    Exact for any densities. An attempt succeeds with chance 1 - beta, and a draft is refused with the same chance, so a
    tested state costs one attempt on average for any p and q. Raises FloatingPointError after `ATTEMPTS` at
    one state: density and sampler then do not belong together (if they do, its chance is below 1e-7 per tested state).
    """
    left, made, drawn = torch.arange(p.rows), 0, p.sample(numbers)
    size = 1
    while len(left):
        if made >= ATTEMPTS:
            raise FloatingPointError(
                f"no state in {ATTEMPTS} where the target's density is above the draft's, although the draft was "
                "refused: log_density must be normalized and belong to sample, for target and draft."
            )
        size = max(1, min(2 * size, BLOCK // len(left)))
        states, stays = _attempts(p.select(left), q.select(left), numbers.select(left), range(made, made + size))
        some = stays.any(1)
        first = stays.long().argmax(1)
        drawn[left[some]] = states[torch.arange(len(left)), first][some]
        left, made = left[~some], made + size
    return drawn


def _attempts(p: L, q: L, numbers: Numbers, attempts: range) -> tuple[Tensor, Tensor]:
    """Draw states (rows, attempts, *state) from p -> them, and which of them are kept."""
    rows = torch.arange(p.rows).repeat_interleave(len(attempts))
    places, drawn = torch.tensor(attempts).repeat(p.rows), numbers.select(rows)
    wide = p.select(rows)
    states = wide.sample(drawn.again(2 * places))
    ratio = q.select(rows).log_density(states) - wide.log_density(states)
    coins = drawn.again(2 * places + 1).uniforms(1)[:, 0].to(ratio.device)
    stays = (coins < -torch.expm1(ratio)).reshape(p.rows, len(attempts))
    return states.reshape(p.rows, len(attempts), *states.shape[1:]), stays


@dataclass(frozen=True, slots=True)
class Mixture:
    """Mixtures of k normal laws with independent coordinates; target and draft may have different k.

    `weights` (rows, k) sum to one, `means` and `scales` are (rows, k, d). Raises ValueError for other shapes, scales
    that are not positive, or weights that do not sum to one.
    """

    weights: Tensor
    means: Tensor
    scales: Tensor

    def __post_init__(self) -> None:
        if self.means.ndim != 3 or self.scales.shape != self.means.shape or self.weights.shape != self.means.shape[:2]:
            shapes = [tuple(each.shape) for each in (self.weights, self.means, self.scales)]
            raise ValueError(f"shapes {shapes} are not possible: weights (rows, k), means and scales (rows, k, d).")
        if not bool((self.scales > 0).all()):
            raise ValueError("scales must be positive.")
        if not bool((self.weights >= 0).all()) or not bool(((self.weights.sum(-1) - 1).abs() <= 1e-4).all()):
            raise ValueError("weights are no distributions: every row must be >= 0 and sum to 1.")

    @property
    def rows(self) -> int:
        return self.weights.shape[0]

    def select(self, rows: Tensor) -> Mixture:
        return Mixture(self.weights[rows], self.means[rows], self.scales[rows])

    def join(self, others: Sequence[Mixture]) -> Mixture:
        laws = [self, *others]
        most = max(law.weights.shape[1] for law in laws)
        pad, wide = torch.nn.functional.pad, list[Mixture]()
        for law in laws:
            more = most - law.weights.shape[1]
            means, scales = pad(law.means, (0, 0, 0, more)), pad(law.scales, (0, 0, 0, more), value=1.0)
            wide.append(Mixture(pad(law.weights, (0, more)), means, scales))
        return Mixture(*(torch.cat([getattr(law, name) for law in wide]) for name in ("weights", "means", "scales")))

    def sample(self, numbers: Numbers) -> Tensor:
        choice = inverse(self.weights.unsqueeze(1), numbers.uniforms(1).to(self.weights.device))[:, 0]
        rows = torch.arange(self.rows, device=choice.device)
        noise = numbers.again(torch.zeros(self.rows)).normals(self.means.shape[2]).to(self.means)
        return self.means[rows, choice] + self.scales[rows, choice] * noise

    def log_density(self, states: Tensor) -> Tensor:
        away = (states.unsqueeze(1) - self.means) / self.scales
        each = -(away.square() / 2 + self.scales.log() + math.log(2 * math.pi) / 2).sum(-1)
        return torch.logsumexp(each + self.weights.log(), -1)

    def residual(self, q: Mixture, refused: Tensor, numbers: Numbers) -> Tensor:
        """Draw states (rows, d) of the residual by `laws.reject_until`: on average one attempt per tested state."""
        return reject_until(self, q, numbers)
