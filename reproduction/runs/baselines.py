"""The runs behind the plane of baselines: speed and distance from the target's law of all methods, in turns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from reproduction.runs.audit import Laws
from reproduction.runs.methods import GAMMA, Method
from reproduction.runs.quality import quality
from reproduction.runs.subjects import Subject
from slipstream.bench.contenders import ours
from slipstream.bench.race import Repetition, result, timed
from slipstream.bench.records import PLAIN, BenchTask, Contender, Output
from slipstream.core.stats import Stats
from slipstream.measure.environment import environment
from slipstream.measure.timing import race


@dataclass(frozen=True)
class Course:
    """The amount to measure: the first `texts` sources, `repetitions` times, at one temperature."""

    texts: int
    repetitions: int
    temperature: float


def measure(subject: Subject, methods: Sequence[Method], course: Course, say: Callable[[str], Any]) -> dict[str, Any]:
    """Measure all methods in turns, text by text -> a JSON object."""
    contenders = [ours(PLAIN, subject.plain), *(ours(each.name, each.decoder, each.gamma) for each in methods)]
    prompts = tuple(map(subject.engine.encode, subject.sources[: course.texts]))
    eos, frame = subject.engine.eos, subject.engine.frame
    task = BenchTask(prompts, 1, course.temperature, subject.length, eos, 0, frame)
    repeated = _race(subject, contenders, task, course, say)
    plain = _row(subject, contenders[0], task, repeated)
    rows = [
        {**_row(subject, contender, task, repeated), **_about(subject, method, task)}
        for contender, method in zip(contenders[1:], methods, strict=True)
    ]
    return {
        "subject": subject.name,
        "draft": next(iter(subject.drafts)),
        "temperature": course.temperature,
        "gamma": GAMMA,
        "texts": len(prompts),
        "repetitions": course.repetitions,
        "references": bool(subject.references),
        "rows": [{"method": PLAIN, "setting": "", **plain}, *rows],
        **subject.models,
        "environment": environment(subject.engine),
    }


def _race(
    subject: Subject, contenders: Sequence[Contender], task: BenchTask, course: Course, say: Callable[[str], Any]
) -> list[Repetition]:
    """Warm up, then run all methods in turns, text by text -> the outputs of every repetition."""

    def run(contender: Contender, one: BenchTask) -> Output:
        say(f"{subject.name} at temperature {task.temperature:g}: {contender.name}")
        return timed(contender, one)

    for contender in contenders:
        run(contender, replace(task, prompts=task.prompts[:1]))
    numbers, texts = range(course.repetitions), len(task.prompts)
    laps = [replace(task, prompts=(prompt,), seed=seed) for seed in numbers for prompt in task.prompts]
    lap_outputs, repeated = list(race(contenders, laps, run)), list[Repetition]()
    for start in range(0, len(laps), texts):
        turns = zip(contenders, zip(*lap_outputs[start : start + texts], strict=True), strict=True)
        repeated.append({contender: _pooled(outputs) for contender, outputs in turns})
    return repeated


def _pooled(outputs: Sequence[Output]) -> Output:
    """Return the outputs of a contender's texts in one repetition, pooled to one."""
    tokens, stats = [text for output in outputs for text in output.tokens], (output.stats for output in outputs)
    calls, seconds = sum(output.calls for output in outputs), sum(output.seconds for output in outputs)
    return Output(tokens, sum(stats, Stats()), calls, seconds)


def _row(subject: Subject, contender: Contender, task: BenchTask, repeated: Sequence[Repetition]) -> dict[str, Any]:
    """Return the figures of one method over all repetitions, with the text quality of the first."""
    figures, runs = result(contender, task, repeated), [outputs[contender] for outputs in repeated]
    plain = next(output for one, output in repeated[0].items() if one.name == PLAIN)
    stats = sum((run.stats for run in runs), Stats())
    row = {
        "over_plain": figures.ratio_to_plain,
        "tokens_per_call": stats.mean_acceptance_length,
        "distance": stats.distance / stats.emitted,
        "same": figures.matches_plain,
        "of": figures.prompts,
    }
    if subject.references or not task.temperature:
        references = subject.references[: len(task.prompts)] or _texts(subject, plain)
        row |= quality(_texts(subject, runs[0]), references)
    return row


def _texts(subject: Subject, output: Output) -> list[str]:
    eos = subject.engine.eos
    return [subject.engine.decode([token for token in some if token not in eos]) for some in output.tokens]


def _about(subject: Subject, method: Method, task: BenchTask) -> dict[str, Any]:
    """Return the method's name and setting; for one with its own model, also figures of a second, untimed run."""
    about: dict[str, Any] = {"method": method.method, "setting": method.setting}
    if method.other:
        laws, exits = Laws(), method.exits
        passes, layers = (exits.passes, exits.layers_run) if exits else (0, 0)
        contender = ours(method.name, method.decoder, method.gamma, laws.play)
        for prompt in task.prompts:
            contender.run(replace(task, prompts=(prompt,)))
        about["distance"] = float(laws.distances(subject, task.temperature).mean())
        if exits:
            about["layers"] = (exits.layers_run - layers) / (exits.passes - passes)
    return about
