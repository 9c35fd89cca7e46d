"""The plan as a picture: predicted speed by gamma with its interval, and the cost of a pass by its number of tokens."""

from pathlib import Path

from slipstream.files import atomic_write
from slipstream.plan.planner import PlanReport


def draw(report: PlanReport, file: str) -> None:
    """Write a PNG, SVG or PDF file, checked before by `check_plot`. Raises OSError if it cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    speed, curve = figure.subplots(1, 2)
    for rows, by_draft in report.outlooks.items():
        for name, outlook in by_draft.items():
            label = f"{name}, {rows} {'rows' if rows > 1 else 'row'}"
            gammas = [each.gamma for each in outlook.predictions]
            (line,) = speed.plot(gammas, [each.factor for each in outlook.predictions], "o-", label=label)
            bounds = zip(*((each.low, each.high) for each in outlook.predictions), strict=True)
            speed.fill_between(gammas, *bounds, color=line.get_color(), alpha=0.15)
            curve.plot([gamma + 1 for gamma in gammas], [each.curve for each in outlook.predictions], "o-", label=label)
    for each in report.verifications:
        speed.plot(each.gamma, each.factor, "k*", label=f"measured, {each.rows} rows" if each.rows > 1 else "measured")
    speed.axhline(1, color="grey", linewidth=0.8)
    speed.set(xlabel="gamma", ylabel="speed over plain decoding", title="predicted, with 95 % interval")
    curve.axhline(1, color="grey", linewidth=0.8)
    curve.set(xlabel="tokens per row in one pass", ylabel="T(n) / T(1)", title="cost of verification")
    speed.legend()
    with atomic_write(file) as part:
        figure.savefig(part, format=Path(file).suffix[1:].lower())
