"""Predictions from known figures: alpha and costs -> gamma, tokens per target call, speed. Needs no model, no torch."""

from collections.abc import Sequence
from dataclasses import dataclass

import slipstream.theory as theory

AROUND = 4  # the number of lines shown on each side of the best gamma


@dataclass(frozen=True)
class GammaFigures:
    """The figures of one gamma: Equation 1, Theorem 3.8 and Theorem 3.11."""

    gamma: int
    tokens_per_call: float
    walltime_factor: float
    operations_factor: float


@dataclass(frozen=True)
class Figures:
    """The figures that follow from alpha, c and c_hat; `best` is that of gamma 0 if plain decoding is fastest.

    `guaranteed` is the factor of Corollary 3.9, and `oracle` that of drafting only tokens that will be accepted
    (section 3.5); both take the verify cost to be flat. For a draft on another machine, `delay` (there and back)
    away, `longest_delay` is the one at which it stops being a gain; both in target steps.
    """

    alpha: float
    c: float
    c_hat: float
    lines: tuple[GammaFigures, ...]
    best: GammaFigures
    guaranteed: float
    oracle: float
    delay: float | None = None
    longest_delay: float | None = None


def promise(
    alpha: float,
    c: float,
    c_hat: float | None = None,
    gammas: Sequence[int] = (),
    curve: Sequence[float] = (),
    delay: float | None = None,
) -> Figures:
    """Return the figures for `gammas`, or for those around the best one.

    `c` is the time of a draft step over that of a target step, `c_hat` the same for operations (without: c), `curve`
    holds T(1)/T(1), T(2)/T(1), ... as measured; beyond its end it grows as between its last two entries. `delay`, in
    target steps there and back, is for a draft on another machine. Raises ValueError for alpha outside [0, 1], negative
    costs, and a curve that does not begin with 1.
    """
    c_hat = c if c_hat is None else c_hat
    verify = as_curve(curve) if curve else theory.flat

    def factor(gamma: int, away: float | None = delay) -> float:
        if away is None:
            return theory.walltime_factor(alpha, gamma, c, verify)
        return theory.remote_factor(alpha, gamma, c, away, verify)

    def line(gamma: int) -> GammaFigures:
        return GammaFigures(
            gamma, theory.tokens_per_round(alpha, gamma), factor(gamma), theory.operations_factor(alpha, gamma, c_hat)
        )

    best = theory.best_gamma(alpha, c, verify=verify) if delay is None else max(range(theory.LIMIT + 1), key=factor)
    every, shown = range(1, theory.LIMIT + 1), gammas or range(max(1, best - AROUND), max(1, best) + AROUND + 1)
    longest = None if delay is None else theory.longest_delay(lambda away: max(factor(g, away) for g in every))
    lines = tuple(line(gamma) for gamma in shown)
    bounds = (theory.guaranteed_factor(alpha, c), theory.oracle_factor(alpha, c))
    return Figures(alpha, c, c_hat, lines, line(best), *bounds, delay, longest)


def as_curve(points: Sequence[float]) -> theory.Curve:
    """Return the function rows -> T(rows)/T(1) of the points T(1)/T(1), T(2)/T(1), ..."""
    if not points or abs(points[0] - 1) > 1e-9 or min(points) <= 0:
        raise ValueError(f"the curve {list(points)} is not possible: it begins with 1 and has positive entries.")
    slope = max(0.0, points[-1] - points[-2]) if len(points) > 1 else 0.0

    def verify(rows: int) -> float:
        beyond = max(0, rows - len(points))
        return points[min(rows, len(points)) - 1] + beyond * slope

    return verify
