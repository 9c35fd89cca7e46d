"""Runs contenders against each other on one task, timed from outside by the same code."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from operator import eq
from time import perf_counter
from typing import Any

import torch

from slipstream.bench.contenders import line_up
from slipstream.bench.records import (
    FULL,
    GENERATE,
    PLAIN,
    BenchReport,
    BenchSettings,
    BenchTask,
    Contender,
    Output,
    Result,
)
from slipstream.core.stats import Stats
from slipstream.engine.engine import Engine
from slipstream.engine.requests import Prompt
from slipstream.measure.environment import environment, scorers
from slipstream.measure.timing import Spread, race, ratios, spread

Repetition = dict[Contender, Output]


def measure(
    engine: Engine,
    prompts: Sequence[Prompt],
    settings: BenchSettings = FULL,
    contenders: Sequence[Contender] = (),
    on_run: Callable[[int, int, str], None] | None = None,
) -> BenchReport:
    """Measure the contenders (default: `line_up`) at every batch and temperature of the settings -> BenchReport.

    Ctrl-C ends it early: the report then has the completed repetitions, and `interrupted` is True.
    `on_run(done, all, name)` is called before every run. Raises ValueError if prompts, models and settings disagree.
    """
    everyone = contenders or line_up(engine, settings)
    texts = tuple(engine.encode(prompt, whole=True) for prompt in prompts)
    if len(texts) < (most := max(settings.batches)):
        raise ValueError(f"a batch of {most} needs as many prompts, but there are {len(texts)}.")
    longest = (len(engine.frame.begin) if engine.frame else max(map(len, texts))) + settings.max_new_tokens
    for scorer in scorers(engine.decoder):
        if scorer.context and longest > scorer.context:
            raise ValueError(f"prompt and new tokens are up to {longest}, but {scorer.name} holds {scorer.context}.")
    eos = frozenset() if settings.ignore_eos else engine.eos
    races = [(batch, temperature) for batch in settings.batches for temperature in settings.temperatures]
    able = {batch: [each for each in everyone if batch <= each.largest_batch] for batch in settings.batches}
    count = sum(len(able[batch]) for batch, _ in races) * (1 + settings.repetitions)
    steps, report = iter(range(count)), BenchReport(environment(engine), settings)
    try:
        for batch, temperature in races:
            task = BenchTask(texts, batch, temperature, settings.max_new_tokens, eos, settings.seed, engine.frame)
            share = settings.seconds and settings.seconds / len(races)
            run_race(
                report, task, able[batch], lambda name: on_run(next(steps), count, name) if on_run else None, share
            )
    except KeyboardInterrupt:
        report.interrupted = True
    return report


def run_race(
    report: BenchReport,
    task: BenchTask,
    contenders: Sequence[Contender],
    step: Callable[[str], None],
    seconds: float | None = None,
) -> None:
    """Warm up, run the repetitions, and add the results to the report; completed ones count even after an error.

    If `seconds` are given, the warm-up is short, the first repetition has no more prompts and tokens than fit into them
    by it, and none begins after them.
    """
    repetitions: list[Repetition] = []
    start, first = perf_counter(), replace(task, prompts=task.prompts[: task.batch])

    def run(contender: Contender, task: BenchTask) -> Output:
        step(contender.name)
        return timed(contender, task)

    try:
        warm = replace(first, max_new_tokens=min(8, task.max_new_tokens)) if seconds else first
        for contender in contenders:
            run(contender, warm)
        if seconds:
            fitting = int(max(1, seconds / (perf_counter() - start) - 1) * warm.max_new_tokens)  # new tokens of a text
            prompts = task.prompts[: max(1, fitting // task.max_new_tokens) * task.batch]
            task = replace(task, prompts=prompts, max_new_tokens=min(fitting, task.max_new_tokens))
        tasks = [replace(task, seed=task.seed + number) for number in range(report.settings.repetitions)]
        for outputs in race(contenders, tasks, run):
            repetitions.append(dict(zip(contenders, outputs, strict=True)))
            if seconds and perf_counter() - start > seconds:
                break
    finally:
        if repetitions:
            report.rows += [result(contender, task, repetitions) for contender in contenders]


def timed(contender: Contender, task: BenchTask) -> Output:
    """Run and time a contender. Raises ValueError if it made fewer or more tokens than the task asks for."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(task.seed)
        start = perf_counter()
        output = contender.run(task)
        seconds = perf_counter() - start
    tokens = [until_eos(new, task.eos) for new in output.tokens]
    done = [len(new) == task.max_new_tokens or task.eos.intersection(new[-1:]) for new in tokens]
    if len(done) != len(task.prompts) or not all(done):
        wanted = f"{len(task.prompts)} times {task.max_new_tokens}"
        raise ValueError(f"{contender.name} returned {[len(new) for new in tokens]} tokens instead of {wanted}.")
    return replace(output, tokens=tokens, seconds=seconds)


def until_eos(tokens: Sequence[int], eos: Collection[int]) -> list[int]:
    """Return the tokens up to and including the first EOS token; the rest is padding."""
    return list(tokens[: min((tokens.index(end) + 1 for end in eos if end in tokens), default=len(tokens))])


def result(contender: Contender, task: BenchTask, repetitions: Sequence[Repetition]) -> Result:
    """Return the row of a contender, with ratios to the first plain contenders, Slipstream's and transformers'."""

    def runs_of(name: str) -> list[Output]:
        contender = next((each for each in repetitions[0] if each.name == name), None)
        return [outputs[contender] for outputs in repetitions] if contender else []

    runs, plain, generate = [outputs[contender] for outputs in repetitions], runs_of(PLAIN), runs_of(GENERATE)
    calls = dict[str, Any]()
    if all(run.calls for run in runs):
        calls["milliseconds_per_call"] = spread([1000 * run.seconds / run.calls for run in runs])
        if task.batch == 1:  # in a larger batch a call serves rows that end at different times
            calls["mean_acceptance_length"] = sum(run.emitted for run in runs) / sum(run.calls for run in runs)
    return Result(
        *(contender.name, task.batch, task.temperature, contender.gamma),
        *(contender.draft, contender.rule, contender.execution, len(task.prompts)),
        tokens=sum(run.emitted for run in runs),
        speeds=(speeds := [run.speed for run in runs]),
        tokens_per_second=spread(speeds),
        ratio_to_plain=_over(runs, plain),
        ratio_to_transformers=_over(runs, generate),
        matches_plain=None if task.temperature or not plain else _matches(runs, plain),
        matches_transformers=None if task.temperature or not generate else _matches(runs, generate),
        **calls | inside(runs),
    )


def _over(runs: Sequence[Output], baseline: Sequence[Output]) -> Spread | None:
    return spread(ratios([run.speed for run in runs], [run.speed for run in baseline])) if baseline else None


def _matches(runs: Sequence[Output], baseline: Sequence[Output]) -> int:
    same = [map(eq, run.tokens, base.tokens) for run, base in zip(runs, baseline, strict=True)]
    return sum(map(all, zip(*same, strict=True)))


def inside(runs: Sequence[Output]) -> dict[str, Any]:
    """Return figures that only Slipstream's contenders have, pooled over the repetitions (sum / sum)."""
    count, stats = sum(run.calls for run in runs), sum((run.stats for run in runs), Stats())
    if not stats.target_calls:
        return {}
    whole = sum(run.seconds for run in runs) - stats.seconds["prefill"]
    phases = {phase: stats.seconds[phase] for phase in ("draft", "target", "accept")}
    phases |= {"rest": whole - sum(phases.values()), "round": whole}
    return {
        **{name: getattr(stats, name) for name in ("alpha", "mean_acceptance_length", "draft_acceptance_rate")},
        "milliseconds": {phase: 1000 * seconds / count for phase, seconds in phases.items()},
        "overhead": whole / (phases["draft"] + phases["target"]) - 1,
    }
