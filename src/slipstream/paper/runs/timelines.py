"""Single texts in detail: the source of each token (Figure 1), and the times of the models' calls (Figure 5)."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.console import Console

from slipstream.core.request import Request
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.generate import rounds
from slipstream.measure.environment import environment
from slipstream.measure.timing import beats, prompt_seconds
from slipstream.observers.explain import Explanation
from slipstream.paper.published import FIGURE_5_GAMMAS
from slipstream.paper.runs.subjects import Subject

WIDTH = 110


def story(subject: Subject, draft: str, gamma: int, temperature: float, seed: int = 0) -> dict[str, Any]:
    """Decode one text round by round -> a JSON object with its marked text, the same as coloured HTML, and counts."""
    screens = [Console(file=io.StringIO(), width=WIDTH, record=True, color_system=None, markup=False, highlight=False)]
    screens.append(Console(file=io.StringIO(), width=WIDTH, record=True, force_terminal=True, markup=False))
    (request,) = subject.requests(temperature, [0], seed)
    explanations = [Explanation(subject.engine.decode, screen) for screen in screens]
    for round in rounds(subject.drafted(draft, gamma), [request]):
        for each in explanations:
            each(round)
        (row,) = round.rows
    for each in explanations:
        each.finish()
    return {
        "subject": subject.name,
        **subject.models,
        "draft": draft,
        "gamma": gamma,
        "temperature": temperature,
        "tokens": row.stats.emitted,
        "runs": row.stats.target_calls,
        "alpha": row.stats.alpha,
        "text": screens[0].export_text(),
        "html": screens[1].export_html(inline_styles=True),
        "environment": environment(subject.engine),
    }


@dataclass(frozen=True)
class Run:
    """One decoding of a text: calls as (start, end, kind) in milliseconds, and the number of tokens."""

    calls: tuple[tuple[float, float, str], ...]
    tokens: int

    @property
    def end(self) -> float:
        """The end of the last call, in milliseconds."""
        return self.calls[-1][1]


def timeline(subject: Subject, draft: str, repetitions: int, say: Callable[[str], object]) -> dict[str, Any]:
    """Record calls over time with gamma 7, 3 and plain, greedily, in turns; of each, keep the run with the median time.

    The text is the one with the most tokens among the answers to the first 20 sources.
    """
    some = subject.requests(0.0, range(min(20, len(subject.sources))))
    # A round of plain decoding makes one token.
    request = max(some, key=lambda request: sum(1 for _ in rounds(subject.plain, [request])))
    decoders = {f"gamma {gamma}": subject.drafted(draft, gamma) for gamma in FIGURE_5_GAMMAS}
    decoders["plain"] = subject.plain
    runs: dict[str, list[Run]] = {name: [] for name in decoders}
    for number in range(repetitions + 1):  # the first is a warm-up
        say(f"timeline: run {number} of {repetitions}")
        for name, decoder in decoders.items():
            runs[name].append(_run(decoder, request))
    lanes = {name: _middle(found[1:]) for name, found in runs.items()}
    return {
        "subject": subject.name,
        **subject.models,
        "draft": draft,
        "lanes": {name: {"calls": run.calls, "tokens": run.tokens} for name, run in lanes.items()},
        "environment": environment(subject.engine),
    }


def _middle(runs: Sequence[Run]) -> Run:
    """Return the run nearest to the median time."""
    usual = median(run.end for run in runs)
    return min(runs, key=lambda run: abs(run.end - usual))


def _run(decoder: Decoder, request: Request) -> Run:
    """Return the calls of a text one after the other, by kind: once, draft, target, rest."""
    calls, now, tokens = list[tuple[float, float, str]](), 0.0, 0
    for round, beat in beats(decoder, [request]):
        before = prompt_seconds(round, 0) if beat.new else 0.0
        parts = (("once", before), ("draft", beat.draft), ("target", beat.target), ("rest", beat.rest))
        for who, seconds in parts:
            if seconds > 0:
                calls.append((round_ms(now), round_ms(now + seconds), who))
                now += seconds
        tokens += len(round.tokens[0])
    return Run(tuple(calls), tokens)


def round_ms(seconds: float) -> float:
    """Return milliseconds with three digits."""
    return round(1000 * seconds, 3)
