"""The report of a check: answers, controls and a verdict, as text or JSON."""

import json
from dataclasses import asdict, dataclass, field
from textwrap import fill
from typing import Any

from slipstream.text.jsontext import json_text

PASS, FAIL, UNSURE = "pass", "fail", "cannot judge"
WIDTH = 100
HEADLINES = {
    PASS: "the output follows the target's distribution",
    FAIL: "the output does NOT follow the target's distribution",
    UNSURE: "no fault was found, but a broken rule would not have been noticed either",
}

ELSE = "longer texts (--max-new-tokens), other prompts or a weaker draft"
"""The advice if not every broken rule was noticed."""


@dataclass(frozen=True)
class Finding:
    """The answer to a question of the certificate, in a sentence and in figures."""

    name: str
    passed: bool
    says: str
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Control:
    """A deliberately broken rule, and the names of the tests that noticed it."""

    name: str
    caught_by: tuple[str, ...]


@dataclass(frozen=True)
class Difference:
    """A token that differs from the one that plain decoding chooses after the same text.

    `gap` is the lead of the chosen token's score, in logits; up to `allowed` rounding explains it. `round` counts
    from 1, `position` from 0 in the output. `source` is draft, correction, bonus or target.
    """

    prompt: int
    position: int
    plain: int
    emitted: int
    plain_score: float
    emitted_score: float
    gap: float
    round: int
    source: str
    plain_text: str = ""
    emitted_text: str = ""
    allowed: float = 0.0

    @property
    def near_tie(self) -> bool:
        return self.gap <= self.allowed


@dataclass(frozen=True)
class CheckHalf:
    """The greedy or the sampling half of a check. The `needed` tests have to notice a control, or nothing is proved.
    `differences` holds the first of each text. `enough` is the number of samples to give if there were too few."""

    name: str
    tests: tuple[Finding, ...]
    controls: tuple[Control, ...]
    differences: tuple[Difference, ...] = ()
    needed: tuple[str, ...] = ()
    enough: int = 0

    @property
    def verdict(self) -> str:
        if not all(test.passed for test in self.tests):
            return FAIL
        return UNSURE if self.blind else PASS

    @property
    def blind(self) -> list[str]:
        noticed = self._noticed
        if not noticed:
            return ["no broken rule was noticed: the draft agrees with the target, or drafts too little, to judge here"]
        missed = [f"'{control.name}' was not noticed" for control in self.controls if not control.caught_by]
        return missed + [f"no broken rule was noticed by '{name}'" for name in self.needed if name not in noticed]

    @property
    def remedies(self) -> list[str]:
        few = "samples" in self.needed and "samples" not in self._noticed
        if few and self._noticed and len(self.blind) == 1:
            return [f"--samples {self.enough}"]
        return [f"--samples {self.enough}"] * few + [ELSE] * bool(self.blind)

    @property
    def _noticed(self) -> set[str]:
        return {name for control in self.controls for name in control.caught_by}

    def as_dict(self) -> dict[str, Any]:
        differences = [{**asdict(each), "near_tie": each.near_tie} for each in self.differences]
        return {**asdict(self), "verdict": self.verdict, "blind": self.blind, "differences": differences}

    def text(self) -> list[str]:
        lines = [f"{self.name}: {self.verdict.upper()}"]
        lines += [f"  {'ok  ' if test.passed else 'FAIL'} {test.name}: {test.says}" for test in self.tests]
        noticed = [control.name for control in self.controls if control.caught_by]
        if noticed:
            lines.append(f"  ok   controls: noticed, as they must be: {', '.join(noticed)}")
        lines += [f"  ???  controls: {reason}" for reason in self.blind]
        for it in self.differences:
            kind = "near-tie" if it.near_tie else "DIFFERENCE"
            lines.append(
                f"       {kind}: prompt {it.prompt + 1}, token {it.position + 1} (round {it.round}, {it.source}): "
                f"{it.emitted_text!r} ({it.emitted}) at {it.emitted_score:.6g} instead of "
                f"{it.plain_text!r} ({it.plain}) at {it.plain_score:.6g}, a gap of {it.gap:.2g}"
            )
        return lines


@dataclass(frozen=True)
class CheckReport:
    """The verdict on a target, a draft, a rule and settings. `text()` returns it as text, `as_dict()` for JSON."""

    greedy: CheckHalf | None
    sampling: CheckHalf | None
    environment: dict[str, Any]
    seconds: float = 0.0

    @property
    def parts(self) -> list[CheckHalf]:
        return [part for part in (self.greedy, self.sampling) if part]

    @property
    def verdict(self) -> str:
        verdicts = [part.verdict for part in self.parts]
        return next((verdict for verdict in (FAIL, UNSURE) if verdict in verdicts), PASS)

    @property
    def remedy(self) -> str | None:
        """A sentence about what to do if the check cannot judge; None otherwise."""
        remedies = sorted({remedy for part in self.parts for remedy in part.remedies})  # --samples come first
        return f"To judge, give {' and '.join(remedies)}." if self.verdict == UNSURE else None

    @property
    def controls(self) -> list[Control]:
        return [control for part in self.parts for control in part.controls]

    def as_dict(self) -> dict[str, Any]:
        record = {
            "verdict": self.verdict,
            "remedy": self.remedy,
            "greedy": self.greedy and self.greedy.as_dict(),
            "sampling": self.sampling and self.sampling.as_dict(),
            "controls": [asdict(control) for control in self.controls],
            "environment": self.environment,
            "seconds": self.seconds,
        }
        return json.loads(json_text(record))

    def text(self) -> str:
        about = ", ".join(f"{name} {value}" for name, value in self.environment.items())
        lines = [f"{self.verdict.upper()}: {HEADLINES[self.verdict]}", f"  {about}; {self.seconds:.0f} seconds"]
        for part in self.parts:
            lines += ["", *part.text()]
        lines += ["", self.remedy] if self.remedy else []
        return "\n".join(fill(line, WIDTH, subsequent_indent="       ", break_on_hyphens=False) for line in lines)
