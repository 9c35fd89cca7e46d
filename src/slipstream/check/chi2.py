"""Chi-squared for tokens, without scipy: tails, what a test can see, and counts in cells that follow the text."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

LEAST = 25.0
"""Directions in which the counts vary by less (variance) are left out: the normal limit would not hold there."""


def tail(x: float, freedom: int, shift: float = 0.0) -> float:
    """P(X > x) for chi-squared with `freedom` degrees, noncentral by `shift`: a Poisson mixture of central ones."""
    centre = shift / 2
    reach = int(12 * math.sqrt(centre)) + 30
    counts = torch.arange(max(0, int(centre) - reach), int(centre) + reach if shift else 1, dtype=torch.float64)
    weights = (torch.xlogy(counts, torch.tensor(centre)) - centre - torch.lgamma(counts + 1)).exp()
    half = torch.tensor(max(x, 0.0) / 2, dtype=torch.float64)
    return float((weights * torch.special.gammaincc(freedom / 2 + counts, half)).sum())


def critical(false_alarm: float, freedom: int, shift: float = 0.0) -> float:
    """The x with P(X > x) = `false_alarm`."""
    return _solve(lambda x: tail(x, freedom, shift) < false_alarm)


def detectable(count: int, freedom: int, false_alarm: float, power: float, shift: float = 0.0) -> float:
    """The smallest bias that a test of `count` tokens sees with chance `power`, in total variation between the cells.

    A mean bias of total variation d shifts the statistic by at least 4 count d^2, whatever its direction.
    """
    bar = critical(false_alarm, freedom, shift)
    return min(1.0, math.sqrt(_solve(lambda more: tail(bar, freedom, more) > power) / (4 * count)))


def _solve(reached: Callable[[float], bool]) -> float:
    """The smallest positive number for which a monotone condition holds."""
    high = 1.0
    while not reached(high):
        high *= 2
    low = 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high


class Tally:
    """Counts of tokens in cells, against what the target's laws say.

    The cells of a token may depend on the text before it, and so may their chances. Observed minus expected then is
    a martingale whose covariance is the sum of those of the single tokens; in its eigenvectors the counts are
    independent, and the sum of their squares over their variances is chi-squared.
    """

    def __init__(self, cells: int) -> None:
        self.count = 0
        self.excess = torch.zeros(cells, dtype=torch.float64)
        self.covariance = torch.zeros(cells, cells, dtype=torch.float64)

    def add(self, chances: Tensor, hits: Tensor) -> None:
        """`chances` (n, cells) of each token's cells sum to one; `hits` (n,) is the cell it fell into."""
        chances = chances.double().cpu()
        seen = torch.nn.functional.one_hot(hits.cpu(), chances.shape[1]).double()
        self.count += chances.shape[0]
        self.excess += (seen - chances).sum(0)
        self.covariance += chances.sum(0).diag() - chances.T @ chances

    def test(self) -> tuple[float, int]:
        """The statistic and its degrees of freedom."""
        variances, directions = torch.linalg.eigh(self.covariance)
        use = variances >= LEAST
        squares = (self.excess @ directions[:, use]).square() / variances[use]
        return float(squares.sum()), int(use.sum())
