"""The sheets that follow from the paper's formulas alone: Table 1 and Figures 2 to 4, computed again."""

import math
from collections.abc import Sequence
from dataclasses import replace

from reproduction.pages.sheet import Cell, Column, Curve, Sheet, ratio
from reproduction.published import TABLE_1
from slipstream.theory import best_gamma, operations_factor, tokens_per_round, walltime_factor

ALPHAS = tuple(step / 50 for step in range(50))  # up to 0.98
ALPHA = "alpha"


def table1() -> Sheet:
    """Return Table 1: operations and speed for c = c-hat = 0."""
    rows = []
    for entry in TABLE_1:
        operations, speed = operations_factor(entry.alpha, entry.gamma, 0), walltime_factor(entry.alpha, entry.gamma, 0)
        ratios = (ratio(operations, entry.operations), ratio(speed, entry.speed))
        rows.append((entry.alpha, entry.gamma, entry.operations, operations, ratios[0], entry.speed, speed, ratios[1]))
    heads = ("operations, paper", "ours", "ours / paper", "speed, paper", "ours", "ours / paper")
    columns = (Column("alpha", 1), Column("gamma", 0), *(Column(name) for name in heads))
    notes = ("Operations by Theorem 3.11 and speed by Theorem 3.8, both for a draft that costs nothing.",)
    return Sheet("table1", "Table 1: operations and speed for several alpha and gamma", columns, tuple(rows), notes)


def figure2() -> Sheet:
    """Return Figure 2: expected tokens per round."""
    curves = [_curve(f"gamma {gamma}", [tokens_per_round(alpha, gamma) for alpha in ALPHAS]) for gamma in GAMMAS]
    notes = ("Equation 1; the uppermost curve is 1 / (1 - alpha), what a free draft of any length would reach.",)
    return _figure("figure2", "Figure 2: expected tokens per round", "E(tokens)", notes, curves)


def figure3() -> Sheet:
    """Return Figure 3: the best gamma."""
    curves = [_curve(f"c = {c:g}", [float(best_gamma(alpha, c)) for alpha in ALPHAS]) for c in COSTS]
    notes = (
        "The gamma with the largest factor of Theorem 3.8, every one tried. The paper's text does not name the c of "
        "its figure; these are ours.",
    )
    return _figure("figure3", "Figure 3: the best gamma", "best gamma", notes, curves)


def figure4() -> Sheet:
    """Return Figure 4: speed and operations for c = c-hat = 0."""
    curves = []
    for gamma in map(int, GAMMAS[:-1]):
        curves.append(_curve(f"speed, gamma {gamma}", [walltime_factor(alpha, gamma, 0) for alpha in ALPHAS]))
        operations = [operations_factor(alpha, gamma, 0) for alpha in ALPHAS]
        curves.append(replace(_curve(f"operations, gamma {gamma}", operations), dashed=True))
    notes = ("Theorems 3.8 (solid) and 3.11 (dashed), for c = c-hat = 0.",)
    return _figure("figure4", "Figure 4: speed and operations", "factor", notes, curves)


GAMMAS = (1, 3, 5, 7, 10, math.inf)
COSTS = (0.01, 0.02, 0.05, 0.1, 0.2)

SHOWN = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9)
"""The alphas that are columns of the table printed with a plot."""


def _curve(label: str, values: Sequence[float]) -> Curve:
    return Curve(label.replace("inf", "without limit"), ALPHAS, tuple(values))


def _figure(name: str, title: str, what: str, notes: tuple[str, ...], curves: Sequence[Curve]) -> Sheet:
    places = [ALPHAS.index(alpha) for alpha in SHOWN]
    rows: tuple[tuple[Cell, ...], ...] = tuple((curve.label, *(curve.y[place] for place in places)) for curve in curves)
    digits = 0 if name == "figure3" else 2
    columns = (Column(what), *(Column(f"alpha {alpha:g}", digits) for alpha in SHOWN))
    return Sheet(name, title, columns, rows, notes, axes=(ALPHA, what), curves=tuple(curves))
