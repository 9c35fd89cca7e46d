"""Calibrates the thresholds of early exits for given risks, on held-out texts."""

from collections.abc import Callable
from functools import cache
from typing import Any

from reproduction.baselines.calibration import calibrated
from reproduction.baselines.exits import ExitRule, Exits
from reproduction.runs.methods import CONFIDENCES, exiting
from reproduction.runs.quality import unlike
from reproduction.runs.subjects import Subject
from slipstream.decoding.generate import generate, succeeded

RISKS = (0.1, 0.25, 0.5)
"""The risks: allowed mean distances (1 - chrF) from the texts that all layers give."""

FAILURE = 0.05
"""The allowed chance that a threshold exceeds its risk."""

THRESHOLDS = (1.1, 1.07, 1.04, 1.0, 0.9, 0.8, 0.6, 0.4, 0.2, 0.0)
"""The thresholds that are tried, the safest first; along a text, each falls to no less than 0.9 of its value."""


def thresholds(subject: Subject, exits: Exits, first: int, texts: int, say: Callable[[str], Any]) -> dict[str, Any]:
    """Find the lowest threshold of each confidence for each risk, None if no threshold keeps it -> a JSON object.

    The texts are decoded greedily from the sources `first` to `first + texts`, which must not be measured on later.
    """
    requests = subject.requests(0.0, range(first, min(first + texts, len(subject.sources))))

    def write(rule: ExitRule | None) -> list[str]:
        rows = succeeded(generate(exiting(subject, exits, rule), requests))
        return [subject.engine.decode(row.output) for row in rows]

    unshortened, calibrations = write(None), list[dict[str, Any]]()
    for name, confidence in CONFIDENCES.items():

        @cache
        def losses(threshold: float, name: str = name, confidence: Any = confidence) -> tuple[float, ...]:
            shortened = write(ExitRule(confidence, threshold, subject.length))
            distances = tuple(map(unlike, shortened, unshortened))
            mean = sum(distances) / len(distances)
            say(f"CALM, {name}: at {threshold:g} the texts are {mean:.3f} from those of all layers")
            return distances

        for risk in RISKS:
            chosen = calibrated(THRESHOLDS, losses, risk, FAILURE)
            calibrations.append({"confidence": name, "risk": risk, "threshold": chosen})
    return {"texts": len(requests), "length": subject.length, "failure": FAILURE, "thresholds": calibrations}
