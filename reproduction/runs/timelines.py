"""Single texts in detail: the source of each token (Figure 1), and the times of the models' calls (Figure 5)."""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.console import Console

from reproduction.published import FIGURE_5_GAMMAS
from reproduction.runs.subjects import Subject
from slipstream.core.request import Request
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.generate import rounds
from slipstream.engine.explain import Explanation
from slipstream.measure.environment import environment
from slipstream.measure.timing import beats, prompt_seconds

WIDTH = 110  # columns of the text of Figure 1


def story(subject: Subject, draft: str, gamma: int, temperature: float, seed: int = 0) -> dict[str, Any]:
    """Decode one text round by round -> a JSON object with counts and the text marked by token source, also as HTML."""
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
    """One decoding of a text: models' calls as (start, end, kind) in milliseconds, and the number of tokens."""

    calls: tuple[tuple[float, float, str], ...]
    tokens: int

    @property
    def end(self) -> float:
        return self.calls[-1][1]


def timeline(subject: Subject, draft: str, repetitions: int, say: Callable[[str], object]) -> dict[str, Any]:
    """Record the calls of greedy decoding with gamma 7, 3 and none, in turns -> a JSON object.

    Of each decoder, the run nearest to the median time is kept. The text is the one with the most tokens among the
    answers to the first 20 sources.
    """
    some = subject.requests(0.0, range(min(20, len(subject.sources))))
    # A round of plain decoding makes one token, so the rounds count the tokens.
    request = max(some, key=lambda request: sum(1 for _ in rounds(subject.plain, [request])))
    decoders = {f"gamma {gamma}": subject.drafted(draft, gamma) for gamma in FIGURE_5_GAMMAS}
    decoders["plain"] = subject.plain
    runs: dict[str, list[Run]] = {name: [] for name in decoders}
    for number in range(repetitions + 1):  # the first is a warm-up
        say(f"timeline: run {number} of {repetitions}")
        for name, decoder in decoders.items():
            runs[name].append(_run(decoder, request))
    lanes = {name: _middle(repeated[1:]) for name, repeated in runs.items()}
    return {
        "subject": subject.name,
        **subject.models,
        "draft": draft,
        "lanes": {name: {"calls": run.calls, "tokens": run.tokens} for name, run in lanes.items()},
        "environment": environment(subject.engine),
    }


def _middle(runs: Sequence[Run]) -> Run:
    middle = median(run.end for run in runs)
    return min(runs, key=lambda run: abs(run.end - middle))


def _run(decoder: Decoder, request: Request) -> Run:
    """Decode a text and return its calls in order, of the kinds once (reading the source), draft, target and rest."""
    calls, now, tokens = list[tuple[float, float, str]](), 0.0, 0
    for round, beat in beats(decoder, [request]):
        before = prompt_seconds(round, 0) if beat.new else 0.0
        parts = (("once", before), ("draft", beat.draft), ("target", beat.target), ("rest", beat.rest))
        for kind, seconds in parts:
            if seconds > 0:
                calls.append((round_ms(now), round_ms(now + seconds), kind))
                now += seconds
        tokens += len(round.tokens[0])
    return Run(tuple(calls), tokens)


def round_ms(seconds: float) -> float:
    return round(1000 * seconds, 3)
