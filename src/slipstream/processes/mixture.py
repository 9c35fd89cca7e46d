"""`Mixture`: mixtures of normal laws, whose residual is drawn by rejection."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.core.draws import inverse
from slipstream.processes.laws import reject_until
from slipstream.processes.numbers import Numbers


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
            raise ValueError("weights are no laws: every row must be >= 0 and sum to 1.")

    @property
    def rows(self) -> int:
        return self.weights.shape[0]

    def select(self, rows: Tensor) -> Mixture:
        return Mixture(self.weights[rows], self.means[rows], self.scales[rows])

    def join(self, others: Sequence[Mixture]) -> Mixture:
        """Return these laws, then those of others; laws with fewer components get more of weight zero."""
        laws = [self, *others]
        most = max(law.weights.shape[1] for law in laws)
        pad, wide = torch.nn.functional.pad, list[Mixture]()
        for law in laws:
            more = most - law.weights.shape[1]
            means, scales = pad(law.means, (0, 0, 0, more)), pad(law.scales, (0, 0, 0, more), value=1.0)
            wide.append(Mixture(pad(law.weights, (0, more)), means, scales))
        return Mixture(*(torch.cat([getattr(law, name) for law in wide]) for name in ("weights", "means", "scales")))

    def sample(self, numbers: Numbers) -> Tensor:
        """Draw states (rows, d): the component by inversion, then its noise."""
        choice = inverse(self.weights.unsqueeze(1), numbers.uniforms(1).to(self.weights.device))[:, 0]
        rows = torch.arange(self.rows, device=choice.device)
        noise = numbers.again(torch.zeros(self.rows)).normals(self.means.shape[2]).to(self.means)
        return self.means[rows, choice] + self.scales[rows, choice] * noise

    def log_density(self, states: Tensor) -> Tensor:
        """Return the log density at states (rows, d) -> (rows,)."""
        away = (states.unsqueeze(1) - self.means) / self.scales
        each = -(away.square() / 2 + self.scales.log() + math.log(2 * math.pi) / 2).sum(-1)
        return torch.logsumexp(each + self.weights.log(), -1)

    def residual(self, q: Mixture, refused: Tensor, numbers: Numbers) -> Tensor:
        """Draw states (rows, d) of the residual by `laws.reject_until`: on average one attempt per tested state."""
        return reject_until(self, q, numbers)
