"""Speed compared with our plain decoding and transformers, and the speed that Theorem 3.8 and all costs predict."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

from reproduction.published import GAMMAS
from reproduction.runs.subjects import Subject
from slipstream.bench.contenders import ours, untouched
from slipstream.bench.peers import generate
from slipstream.bench.race import run_race
from slipstream.bench.records import PLAIN, SPECULATIVE, BenchReport, BenchSettings, BenchTask, Contender
from slipstream.core.protocols import HasModel
from slipstream.core.request import Request
from slipstream.core.round import Round
from slipstream.decoding.decoder import Decoder
from slipstream.measure import timing
from slipstream.measure.environment import environment
from slipstream.measure.timing import Beat, beats, prompt_seconds
from slipstream.theory import tokens_per_round, walltime_factor


@dataclass(frozen=True)
class Course:
    """The amount to run: texts of the pilot, which measures costs, and texts and repetitions of the race after it."""

    pilot: int = 8
    texts: int = 96
    repetitions: int = 3


@dataclass
class Log:
    """The timed rounds of one contender, and the seconds in which the target read each prompt before them."""

    beats: list[Beat] = field(default_factory=list)
    prefills: list[float] = field(default_factory=list)

    def play(self, decoder: Decoder, requests: Sequence[Request]) -> Iterator[Round]:
        for round, beat in beats(decoder, requests):
            self.beats.append(beat)
            self.prefills += [prompt_seconds(round, place) for place in range(len(round.rows))] * bool(beat.new)
            yield round

    def costs(self, gamma: int) -> SpeedCosts:
        """Return medians of the recorded times; the first round, in which the draft reads the source, is separate."""
        later = [beat for beat in self.beats if not beat.new] or self.beats
        first = [beat for beat in self.beats if beat.new]
        draft = median(beat.draft for beat in later)
        return SpeedCosts(
            median(beat.target for beat in later),
            draft / gamma if gamma else 0.0,
            median(beat.rest for beat in later),
            median(self.prefills),
            max(0.0, median(beat.draft for beat in first) - draft),
        )


@dataclass(frozen=True)
class SpeedCosts:
    """The seconds of a target run, of a draft run, and of the rest of a round, and the seconds spent once per text.

    The target's time once per text is that of its encoder, or of reading the prompt.
    """

    target: float
    draft: float
    rest: float
    target_once: float
    draft_once: float

    def per_text(self, gamma: int, rounds: float) -> float:
        """Return the seconds of a text that takes `rounds` rounds."""
        return self.target_once + self.draft_once + rounds * (self.target + gamma * self.draft + self.rest)


def race(
    subject: Subject,
    temperature: float,
    alphas: Mapping[str, Any],
    raced: Mapping[str, Any],
    course: Course,
    say: Callable[[str], Any],
) -> dict[str, Any]:
    """Measure the speed of every draft at the gamma that should be fastest -> a JSON object.

    `alphas` are the figures of `acceptance` at this temperature by draft, `raced` those of the sources that run here. A
    pilot measures the costs of gamma 3, 5 and 7; the gamma with the least expected time runs. All contenders run in
    turns, text by text; ratios are taken within a repetition, and their median is reported.
    """
    pilot = _pilot(subject, temperature, course.pilot, say)
    gammas = {name: chosen(alphas[name], pilot[name]) for name in subject.drafts}
    logs = {PLAIN: Log(), **{name: Log() for name in gammas}}
    contenders = [ours(PLAIN, subject.plain, play=logs[PLAIN].play)]
    for name, gamma in gammas.items():
        made = ours(SPECULATIVE, subject.drafted(name, gamma), gamma, play=logs[name].play)
        contenders.append(replace(made, draft=name))
    target = subject.engine.decoder.target
    assert isinstance(target, HasModel)
    contenders.append(generate(untouched(target), subject.begin))
    report = _run(subject, temperature, course, contenders, say)
    costs = {name: log.costs(gammas.get(name, 0)) for name, log in logs.items()}
    rows = {row.draft: row for row in report.rows if row.contender == SPECULATIVE}
    whole = {
        name: _row(rows[name], gamma, alphas[name], raced[name], (costs[name], costs[PLAIN]))
        for name, gamma in gammas.items()
    }
    return {
        "subject": subject.name,
        "temperature": temperature,
        "environment": report.environment,
        **subject.models,
        "texts": course.texts,
        "repetitions": course.repetitions,
        "plain": asdict(costs[PLAIN]),
        "drafts": whole,
        "results": [asdict(row) for row in report.rows],
    }


def chosen(alphas: Mapping[str, Any], costs: Mapping[int, SpeedCosts]) -> int:
    rounds = {gamma: alphas["mean_length"] / alphas["tokens_per_round"][str(gamma)] for gamma in costs}
    return min(costs, key=lambda gamma: costs[gamma].per_text(gamma, rounds[gamma]))


def _pilot(
    subject: Subject, temperature: float, texts: int, say: Callable[[str], Any]
) -> dict[str, dict[int, SpeedCosts]]:
    """Measure the costs of every draft and gamma, in turns; the first of several texts is an unrecorded warm-up."""
    logs = {(name, gamma): Log() for name in subject.drafts for gamma in GAMMAS}
    texts = min(texts, len(subject.sources))

    def run(one: tuple[str, int], place: int) -> None:
        log = Log() if place == 0 and texts > 1 else logs[one]
        deque(log.play(subject.drafted(*one), subject.requests(temperature, [place])), maxlen=0)

    def places() -> Iterator[int]:
        for place in range(texts):
            say(f"{subject.name} at temperature {temperature:g}: pilot, text {place + 1} of {texts}")
            yield place

    deque(timing.race(list(logs), places(), run), maxlen=0)
    return {name: {gamma: logs[name, gamma].costs(gamma) for gamma in GAMMAS} for name in subject.drafts}


def _run(
    subject: Subject, temperature: float, course: Course, contenders: Sequence[Contender], say: Callable[[str], Any]
) -> BenchReport:
    settings = BenchSettings((3,), (1,), (temperature,), subject.length, course.repetitions, ignore_eos=False)
    report = BenchReport(environment(subject.engine), settings)
    texts = tuple(subject.engine.encode(source) for source in subject.sources[: course.texts])
    task = BenchTask(texts, 1, temperature, subject.length, subject.engine.eos, 0, subject.engine.frame)
    run_race(report, task, contenders, lambda name: say(f"{subject.name} at temperature {temperature:g}: {name}"))
    return report


def _row(
    result: Any, gamma: int, alphas: Mapping[str, Any], raced: Mapping[str, Any], spent: tuple[SpeedCosts, SpeedCosts]
) -> dict[str, Any]:
    """Return the figures of one draft: the speed expected as more and more costs are counted, and the measured one.

    `spent` are its own costs and those of plain decoding.
    """
    costs, plain = spent
    alpha, c, verify = alphas["alpha"]["value"], costs.draft / plain.target, costs.target / plain.target

    def expected(length: float, tokens_per_round: float) -> float:
        return plain.per_text(0, length) / costs.per_text(gamma, length / tokens_per_round)

    def walked(figures: Mapping[str, Any]) -> float:
        return expected(figures["mean_length"], figures["tokens_per_round"][str(gamma)])

    return {
        "gamma": gamma,
        "alpha": alpha,
        "c": c,
        "verify": verify,
        "once_share": plain.target_once / plain.per_text(0, raced["mean_length"]),
        "costs": asdict(costs),
        "theorem": walltime_factor(alpha, gamma, c),
        "theorem_verify": walltime_factor(alpha, gamma, c, lambda rows: verify),
        "all_costs": expected(alphas["mean_length"], tokens_per_round(alpha, gamma)),
        "real_texts": walked(alphas),
        "raced_texts": walked(raced),
        "over_plain": result.ratio_to_plain,
        "over_generate": result.ratio_to_transformers,
        "tokens_per_call": result.mean_acceptance_length,
        "tokens_per_call_equation_1": tokens_per_round(alpha, gamma),
        "tokens_per_call_walk": alphas["tokens_per_round"][str(gamma)],
        "tokens_per_call_raced": raced["tokens_per_round"][str(gamma)],
        "alpha_in_rounds": result.alpha,
        "matches_plain": result.matches_plain,
        "prompts": result.prompts,
    }
