"""Benchmark speculative decoding against its baselines, for prompts and settings.

A *contender* continues the prompts it is given. All get the same token ids, limit and end of text, run one after the
other in one process, and are timed from outside by the same code: emitted tokens / wall time of the whole call, prefill
included. A repetition runs every contender once, in a rotating order; ratios are taken within a repetition, and
the median over the repetitions is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from slipstream.bench.contenders import Side, line_up, ours
from slipstream.bench.race import run_race
from slipstream.bench.records import (
    COMPILED,
    EAGER,
    FULL,
    PLAIN,
    PROMPTS,
    QUICK,
    SPECULATIVE,
    BenchReport,
    BenchSettings,
    BenchTask,
    Contender,
    Output,
    Result,
)
from slipstream.engine.engine import Engine
from slipstream.engine.requests import Prompt
from slipstream.measure.environment import environment, scorers

__all__ = [
    "COMPILED",
    "EAGER",
    "FULL",
    "PLAIN",
    "PROMPTS",
    "QUICK",
    "SPECULATIVE",
    "BenchReport",
    "BenchSettings",
    "BenchTask",
    "Contender",
    "Output",
    "Result",
    "Side",
    "environment",
    "line_up",
    "measure",
    "ours",
]


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
    texts = tuple(engine.encode(prompt) for prompt in prompts)
    _check(engine, texts, settings)
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


def _check(engine: Engine, texts: Sequence[Sequence[int]], settings: BenchSettings) -> None:
    """Raise ValueError unless there are prompts for whole batches, and texts fit every model's context."""
    if len(texts) < (batch := max(settings.batches)):
        raise ValueError(f"a batch of {batch} needs as many prompts, but there are {len(texts)}.")
    begin = len(engine.frame.begin) if engine.frame else max(map(len, texts))
    longest = begin + settings.max_new_tokens
    for name, context in ((scorer.name, scorer.context) for scorer in scorers(engine.decoder)):
        if context and longest > context:
            raise ValueError(f"prompt and new tokens are up to {longest}, but {name} holds {context}.")
