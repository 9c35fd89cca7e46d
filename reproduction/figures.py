"""Figures 1 and 5, the gamma of section 3.5, and the test of the i.i.d. assumption, from the lab's measurements."""

from collections.abc import Iterator
from typing import Any

from reproduction.lab import Lab
from reproduction.pages.sheet import Cell, Column, Curve, Lane, Sheet
from reproduction.published import FIGURE_1, WRITING
from reproduction.runs import expected_rounds as walks
from reproduction.tables import TEMPERATURES, about
from slipstream.theory import best_gamma, oracle_gain, tokens_per_round, walltime_factor

COSTS = (0.02, 0.05, 0.1)
GAMMA = 5
TABLES = ("unigram", "bigram")


def figure1(lab: Lab) -> Sheet:
    found = lab.story()
    tokens, runs = found["tokens"], found["runs"]
    rows = (("paper", *FIGURE_1, FIGURE_1[0] / FIGURE_1[1]), ("ours", tokens, runs, tokens / runs))
    columns = (Column(""), Column("tokens"), Column("serial runs of the target"), Column("tokens per run"))
    notes = (
        f"A sample of the embedded target at temperature {found['temperature']:g} with its draft and gamma "
        f"{found['gamma']}; the paper's was made by a 97M model with a 6M draft on lm1b. Accepted tokens stand "
        "unmarked.",
    )
    return Sheet(
        "figure1", "Figure 1: a text, round by round", columns, rows, notes, found["text"], **about(lab, [found])
    )


def figure5(lab: Lab) -> Sheet:
    found = lab.timeline()
    lanes = tuple(Lane(name, tuple(map(tuple, lane["calls"]))) for name, lane in found["lanes"].items())
    rows = []
    for name, lane in found["lanes"].items():
        spent = {
            who: sum(b - a for a, b, kind in lane["calls"] if kind == who)
            for who in ("once", "draft", "target", "rest")
        }
        runs = sum(kind == "target" for _, _, kind in lane["calls"])
        rows.append((name, lane["tokens"], runs, *spent.values(), lane["calls"][-1][1]))
    heads = ("decoding", "tokens", "target runs", "once, ms", "draft, ms", "target, ms", "rest, ms", "all, ms")
    notes = (
        f"The same greedy text of the {found['subject']} target with draft {found['draft']}, one call after the "
        "other, as measured; of several runs the one with the median time. `once`: the target's encoder (or prompt).",
    )
    title = "Figure 5: calls over time with gamma 7, 3 and plain"
    columns = tuple(Column(head, 1) for head in heads)
    return Sheet("figure5", title, columns, tuple(rows), notes, axes=("ms", ""), lanes=lanes, **about(lab, [found]))


def gamma(lab: Lab) -> Sheet:
    """Return a sheet for section 3.5: the best fixed gamma, and what an oracle would gain."""
    rows, curves, measured = list[tuple[Cell, ...]](), list[Curve](), list[dict[str, Any]]()
    for task, temperature, name, figures, found in _drafts(lab):
        measured.append(found)
        alpha, per_round = figures["alpha"]["value"], _by_gamma(figures["endless_tokens_per_round"])
        runs, drafted = figures["oracle"]
        for c in COSTS:
            theory = best_gamma(alpha, c)
            real, factor = walks.best(per_round, c)
            gain = 1 / (runs + c * drafted) / factor - 1
            ideal = walltime_factor(alpha, theory, c)
            rows.append((task, name, temperature, alpha, c, theory, ideal, real, factor, oracle_gain(alpha, c), gain))
        speeds = tuple(tokens / (1 + gamma * COSTS[1]) for gamma, tokens in per_round.items())
        curves.append(Curve(f"{name}, T={temperature}", tuple(map(float, per_round)), speeds, group=task))
    heads = ("task", "draft", "T", "alpha", "c", "gamma, Thm 3.8", "factor", "gamma, real texts", "factor")
    more = ("oracle's gain, i.i.d.", "oracle's gain, real texts")
    notes = (
        "Of real texts: acceptance where it really falls along what the target wrote, every gamma from 1 to 16 and "
        "the oracle that drafts just what will be kept computed exactly from the chances (footnote 4: the target "
        "still runs). Verify cost flat, as in the paper. The paper says that an oracle may gain up to about 60 %; "
        "that is the extreme.",
    )
    columns = tuple(Column(head) for head in (*heads, *more))
    title = "Section 3.5: the best gamma and the oracle's gain on real texts"
    axes = ("gamma", f"factor at c = {COSTS[1]:g}")
    return Sheet("gamma", title, columns, tuple(rows), notes, axes=axes, curves=tuple(curves), **about(lab, measured))


def iid(lab: Lab) -> Sheet:
    """Return a sheet on how far betas are i.i.d., and what that changes in the expected tokens per round."""
    rows, curves, measured = list[tuple[Cell, ...]](), list[Curve](), list[dict[str, Any]]()
    for task, temperature, name, figures, found in _drafts(lab):
        measured.append(found)
        alpha, after = figures["alpha"]["value"], figures["after"]
        real = _by_gamma(figures["endless_tokens_per_round"])[GAMMA]
        ideal = tokens_per_round(alpha, GAMMA)
        rows.append(
            (task, name, temperature, alpha, *after[:4], *figures["autocorrelation"][:3], ideal, real, real / ideal - 1)
        )
        known = [value for value in after if value is not None]
        curves.append(Curve(f"{name}, T={temperature}", tuple(range(len(known))), tuple(known), group=task))
    heads = ("task", "draft", "T", "alpha", "after 0 kept", "after 1", "after 2", "after 3", "lag 1", "lag 2", "lag 3")
    more = (f"Eq. (1), gamma {GAMMA}", "real texts", "difference")
    notes = (
        "`after n kept`: chance that a token is kept after a refusal and exactly n kept tokens; `lag k`: "
        "correlation of acceptance at positions k apart. With i.i.d. betas the first would all be alpha and the "
        "others 0. Tokens per round by Equation 1 and on the real texts laid end to end: what the difference does "
        "to the prediction.",
    )
    columns = tuple(Column(head) for head in (*heads, *more))
    title, axes = "Section 3.1: how far acceptance is i.i.d.", ("tokens kept before", "chance that the next is kept")
    return Sheet("iid", title, columns, tuple(rows), notes, axes=axes, curves=tuple(curves), **about(lab, measured))


def _drafts(lab: Lab) -> Iterator[tuple[str, int, str, dict[str, Any], dict[str, Any]]]:
    """Yield task, temperature, draft, its figures and the whole record, of all drafts that are models."""
    for task in (*(() if lab.inputs.target else (WRITING,)), *lab.tasks):
        for temperature in TEMPERATURES:
            found = lab.alphas(task, temperature)
            for name, figures in found["drafts"].items():
                if name not in TABLES:
                    yield task, temperature, name, figures, found


def _by_gamma(figures: dict[str, float]) -> dict[int, float]:
    return {int(gamma): tokens for gamma, tokens in figures.items()}
