"""`Gaussian`: normal laws with a common covariance, whose residual is drawn by reflection."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.processes.numbers import Numbers


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
        """Return these laws, then those of others. Raises ValueError if scales differ."""
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
        """Convert noise (rows, d) to states (rows, *state)."""
        factor = isinstance(self.scale, Tensor) and self.scale.ndim == 2
        return self.mean + (noise @ self.scale.T if factor else noise * self.scale).reshape(self.mean.shape)  # type: ignore[union-attr]


def _check_same(p: Gaussian, q: Gaussian) -> None:
    if p.scale is not q.scale and not torch.equal(torch.as_tensor(p.scale), torch.as_tensor(q.scale)):
        raise ValueError(
            f"Gaussians of scale {p.scale} and {q.scale} cannot be reflected into each other: give target and draft "
            "the same scale, or make both Mixtures of one component."
        )
