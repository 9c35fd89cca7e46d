"""Chi-squared tests of tokens, without scipy: tails, detectable bias, and counts in cells that depend on the text."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

LEAST = 25.0  # the least variance of a direction that is tested: below it the normal limit does not hold


def tail(x: float, freedom: int, shift: float = 0.0) -> float:
    """Return P(X > x) for chi-squared with `freedom` degrees, noncentral by `shift`: a Poisson mixture."""
    centre = shift / 2
    reach = int(12 * math.sqrt(centre)) + 30
    counts = torch.arange(max(0, int(centre) - reach), int(centre) + reach if shift else 1, dtype=torch.float64)
    weights = (torch.xlogy(counts, torch.tensor(centre)) - centre - torch.lgamma(counts + 1)).exp()
    half = torch.tensor(max(x, 0.0) / 2, dtype=torch.float64)
    return float((weights * torch.special.gammaincc(freedom / 2 + counts, half)).sum())


def critical(false_alarm: float, freedom: int, shift: float = 0.0) -> float:
    return _solve(lambda x: tail(x, freedom, shift) < false_alarm)


def detectable(count: int, freedom: int, false_alarm: float, power: float, shift: float = 0.0) -> float:
    """Return the least bias that a test of `count` tokens detects with chance `power`, in total variation of cells.

    A mean bias of total variation d shifts the statistic by at least 4 count d^2, in any direction.
    """
    bar = critical(false_alarm, freedom, shift)
    return min(1.0, math.sqrt(_solve(lambda more: tail(bar, freedom, more) > power) / (4 * count)))


def _solve(reached: Callable[[float], bool]) -> float:
    """Return the smallest positive number for which a monotone condition holds."""
    high = 1.0
    while not reached(high):
        high *= 2
    low = 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high


class CellCounts:
    """Counts of tokens in cells, compared with the chances that the target's laws give.

    The cells of a token may depend on the text before it, and so may their chances. Observed minus expected is then a
    martingale whose covariance is the sum of those of the single tokens; along its eigenvectors the counts are
    independent, and the sum of their squares over their variances is chi-squared.
    """

    def __init__(self, cells: int) -> None:
        self.count = 0
        self.excess = torch.zeros(cells, dtype=torch.float64)
        self.covariance = torch.zeros(cells, cells, dtype=torch.float64)

    def add(self, chances: Tensor, hits: Tensor) -> None:
        """Add n tokens: the chances (n, cells) of their cells, which sum to one, and `hits` (n,), the actual cells."""
        chances = chances.double().cpu()
        seen = torch.nn.functional.one_hot(hits.cpu(), chances.shape[1]).double()
        self.count += chances.shape[0]
        self.excess += (seen - chances).sum(0)
        self.covariance += chances.sum(0).diag() - chances.T @ chances

    def test(self) -> tuple[float, int]:
        variances, directions = torch.linalg.eigh(self.covariance)
        use = variances >= LEAST
        squares = (self.excess @ directions[:, use]).square() / variances[use]
        return float(squares.sum()), int(use.sum())
