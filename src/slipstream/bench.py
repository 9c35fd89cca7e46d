"""Prompts x settings -> rows: speculative decoding against its baselines, measured like a sceptic.

A *contender* continues the prompts it is given. All get the same token ids, limit and end of text, run one after the
other in one process, and are timed from outside by the same code: emitted tokens / wall time of the whole call, prefill
included. A repetition runs every contender once, in an order that rotates; ratios are taken within a repetition, and
the median over the repetitions is reported.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import distributions
from operator import eq
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from slipstream.controllers import Fixed
from slipstream.decoding import Decoder, NoDraft, rounds
from slipstream.drafters.model import ModelDrafter
from slipstream.engine import Engine, Prompt
from slipstream.models import CausalScorer, padded
from slipstream.records import Request, Row, Scorer
from slipstream.sampling import Sampling, request_key
from slipstream.stats import Stats

PLAIN, SPECULATIVE = "slipstream plain", "slipstream speculative"
GENERATE, ASSISTED = "transformers generate", "transformers assisted"
PACKAGES = ("slipstream", "torch", "transformers")

PROMPTS = (
    'def moving_average(values, window):\n    """Return the mean of every run of `window` consecutive values."""\n',
    'def is_palindrome(text):\n    """Return True if the text reads the same backwards, ignoring case and spaces."""\n',
    'def merge(left, right):\n    """Merge two sorted lists.\n\n    >>> merge([1, 4], [2])\n    [1, 2, 4]\n    """\n',
    'def count_words(path):\n    """Read a file and return a dictionary from each word to how often it occurs."""\n',
    'import math\n\n\ndef is_prime(number):\n    """Return whether a positive integer is prime."""\n',
    'class Stack:\n    """Items with push, pop, peek and a length."""\n\n    def __init__(self):\n',
    'def binary_search(items, wanted):\n    """Return the index of `wanted` in a sorted list, or -1."""\n    low = 0\n',
    'from collections import deque\n\n\ndef breadth_first(graph, start):\n    """Yield the nodes by distance."""\n',
)
"""Beginnings of Python programs, for a benchmark without a file; the quick one takes the first four."""


@dataclass(frozen=True)
class Settings:
    """What to measure. Every pair of batch and temperature is a race of its own.

    `ignore_eos` gives all exactly the same work; without it outputs end after EOS. ValueError for what is impossible.
    """

    gammas: tuple[int, ...] = (3, 5, 8)
    batches: tuple[int, ...] = (1, 4, 8)
    temperatures: tuple[float, ...] = (0.0, 1.0)
    max_new_tokens: int = 128
    repetitions: int = 5
    ignore_eos: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"gammas": 1, "batches": 1, "temperatures": 0, "max_new_tokens": 1, "repetitions": 1}
        for name, allowed in least.items():
            given = getattr(self, name)
            if min(given if isinstance(given, tuple) else (given,), default=-1) < allowed:
                raise ValueError(f"{name}={given} cannot be measured: use {allowed} or more.")


FULL, QUICK = Settings(), Settings(gammas=(5,), batches=(1,), max_new_tokens=48, repetitions=3)
"""The default, and what takes a minute or two with the embedded pair on two cores."""


@dataclass(frozen=True)
class Task:
    """What one run asks of a contender: continue `prompts` (token ids), `batch` at a time."""

    prompts: tuple[tuple[int, ...], ...]
    batch: int
    temperature: float
    max_new_tokens: int
    eos: frozenset[int]
    seed: int


@dataclass(frozen=True)
class Output:
    """The new tokens of every prompt; `stats` and `rounds` if the contender keeps them; `seconds` if it was timed."""

    tokens: list[list[int]]
    stats: Stats = field(default_factory=Stats)
    rounds: int = 0
    seconds: float = 0.0

    @property
    def speed(self) -> float:
        """Tokens per second of the whole call."""
        return sum(map(len, self.tokens)) / self.seconds


@dataclass(frozen=True)
class Contender:
    """Somebody who continues prompts, at most `largest_batch` at a time."""

    name: str
    run: Callable[[Task], Output]
    gamma: int | None = None
    largest_batch: int = sys.maxsize


@dataclass(frozen=True)
class Result:
    """A row of the report: one contender at one batch and temperature; what it cannot tell is None.

    `tokens` are those of all repetitions, `speeds` the tokens per second of each; speed and ratios are given as median,
    min and max. `matches_*` count prompts with the same greedy tokens in every repetition. `milliseconds` are per
    round: `round` is wall time without the target's prefill, `rest` what is not draft, target or accept, and `overhead`
    is round / (draft + target) - 1.
    """

    contender: str
    batch: int
    temperature: float
    gamma: int | None
    prompts: int
    tokens: int
    speeds: list[float]
    tokens_per_second: dict[str, float]
    ratio_to_plain: dict[str, float] | None
    ratio_to_transformers: dict[str, float] | None
    matches_plain: int | None
    matches_transformers: int | None
    alpha: float | None = None
    mean_acceptance_length: float | None = None
    draft_acceptance_rate: float | None = None
    milliseconds: dict[str, float] | None = None
    overhead: float | None = None


@dataclass
class Report:
    """What was measured, how, and on what."""

    environment: dict[str, Any]
    settings: Settings
    rows: list[Result] = field(default_factory=list)
    interrupted: bool = False

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON knows it, without tuples."""
        return json.loads(json.dumps(asdict(self)))


def measure(
    engine: Engine,
    prompts: Sequence[Prompt],
    settings: Settings = FULL,
    contenders: Sequence[Contender] = (),
    on_run: Callable[[int, int, str], None] | None = None,
) -> Report:
    """Measure the contenders (default: `line_up`) at every batch and temperature of the settings -> Report.

    Ctrl-C ends it early: the report holds the repetitions that were completed and says `interrupted`.
    `on_run(done, all, name)` is called before every run. Raises ValueError if prompts, models and settings disagree.
    """
    everyone = contenders or line_up(engine, settings)
    texts = tuple(engine.encode(prompt) for prompt in prompts)
    _check(engine.decoder, texts, settings)
    eos = frozenset() if settings.ignore_eos else engine.eos
    races = [(batch, temperature) for batch in settings.batches for temperature in settings.temperatures]
    able = {batch: [each for each in everyone if batch <= each.largest_batch] for batch in settings.batches}
    count = sum(len(able[batch]) for batch, _ in races) * (1 + settings.repetitions)
    steps, report = iter(range(count)), Report(environment(engine), settings)
    try:
        for batch, temperature in races:
            task = Task(texts, batch, temperature, settings.max_new_tokens, eos, settings.seed)
            _race(report, task, able[batch], lambda name: on_run(next(steps), count, name) if on_run else None)
    except KeyboardInterrupt:
        report.interrupted = True
    return report


def _race(report: Report, task: Task, contenders: Sequence[Contender], step: Callable[[str], None]) -> None:
    """Warm up, then repeat. Whole repetitions are reported even if a later one breaks off."""
    repetitions: list[dict[Contender, Output]] = []
    try:
        for contender in contenders:
            step(contender.name)
            timed(contender, replace(task, prompts=task.prompts[: task.batch]))
        for number in range(report.settings.repetitions):
            runs = {}
            for contender in rotated(contenders, number):
                step(contender.name)
                runs[contender] = timed(contender, replace(task, seed=task.seed + number))
            repetitions.append(runs)
    finally:
        if repetitions:
            report.rows += [_result(contender, task, repetitions) for contender in contenders]


def rotated(contenders: Sequence[Contender], number: int) -> list[Contender]:
    """The order of a repetition: everybody is first, second, ... in turn, so that a drift favours nobody."""
    first = number % max(1, len(contenders))
    return [*contenders[first:], *contenders[:first]]


def timed(contender: Contender, task: Task) -> Output:
    """Run, time and count. Raises ValueError if the contender did less or more than the others have to do."""
    gc.collect()  # nobody pays for the garbage of another
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
    """The tokens that count: up to the first EOS token, and that one. What follows is padding."""
    return list(tokens[: min((tokens.index(end) + 1 for end in eos if end in tokens), default=len(tokens))])


def _check(decoder: Decoder, texts: Sequence[Sequence[int]], settings: Settings) -> None:
    """All must be able to do the same work: whole batches, and texts within every context."""
    if len(texts) < (batch := max(settings.batches)):
        raise ValueError(f"a batch of {batch} needs as many prompts, but there are {len(texts)}.")
    longest = max(map(len, texts)) + settings.max_new_tokens
    for name, context in ((scorer.name, scorer.context) for scorer in _scorers(decoder)):
        if context and longest > context:
            raise ValueError(f"prompt and new tokens are up to {longest}, but {_name(name)} holds {context}.")


def line_up(engine: Engine, settings: Settings) -> list[Contender]:
    """Ours, plain and speculative, and those of transformers that can run with the engine's models."""
    decoder, gammas = replace(engine.decoder, verifier=engine.rule.verify, seam=engine.rule.seam), settings.gammas
    contenders = [ours(PLAIN, replace(decoder, drafter=NoDraft(), controller=Fixed(0)))]
    if not isinstance(decoder.drafter, NoDraft):
        contenders += [ours(SPECULATIVE, replace(decoder, controller=Fixed(gamma)), gamma) for gamma in gammas]
    scorers = _scorers(decoder)
    models = [scorer.model for scorer in scorers if isinstance(scorer, CausalScorer)]
    if len(models) == len(scorers):
        contenders.append(Contender(GENERATE, lambda task: _generate(models[0], task)))
    if len({model.config.get_text_config().vocab_size for model in models}) == 1 < len(models):
        contenders += [assisted(models[0], models[1], gamma) for gamma in gammas]
    return contenders


def ours(name: str, decoder: Decoder, gamma: int | None = None) -> Contender:
    """A decoder of ours, with whatever drafter, verifier and controller it has."""

    def run(task: Task) -> Output:
        sampler, rows, count = Sampling(temperature=task.temperature), dict[int, Row](), 0
        requests = [
            Request(prompt, sampler, task.max_new_tokens, task.eos, task.seed, request_key(prompt, index))
            for index, prompt in enumerate(task.prompts)
        ]
        for round in rounds(replace(decoder, batch_size=task.batch), requests):
            rows |= {row.index: row for row in round.rows}
            count += 1
        done = [rows[index] for index in range(len(requests))]
        return Output([row.output for row in done], sum((row.stats for row in done), Stats()), count)

    return Contender(name, run, gamma)


def assisted(target: PreTrainedModel, draft: PreTrainedModel, gamma: int) -> Contender:
    """transformers' assisted generation, always with gamma drafted tokens; it takes one row at a time."""
    schedule = {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}

    def run(task: Task) -> Output:
        # Read from the assistant's own configuration: arguments of `generate` do not reach it.
        with _configured(draft, num_assistant_tokens=gamma, **schedule):
            return _generate(target, task, assistant_model=draft)

    return Contender(ASSISTED, run, gamma, largest_batch=1)


def _generate(model: PreTrainedModel, task: Task, **assistant: Any) -> Output:
    """transformers' `generate`, batches padded on the left."""
    eos, tokens = sorted(task.eos), list[list[int]]()
    limits = {"max_new_tokens": task.max_new_tokens, "eos_token_id": eos or None, "pad_token_id": (eos or [0])[0]}
    sampling = {"do_sample": True, "temperature": task.temperature, "top_k": 0, "top_p": 1.0}
    with _configured(model, **limits, **(sampling if task.temperature else {"do_sample": False})):
        for start in range(0, len(task.prompts), task.batch):
            texts = task.prompts[start : start + task.batch]
            ids = padded([text[::-1] for text in texts], model.device).flip(1)
            mask = padded([[1] * len(text) for text in texts], model.device).flip(1)
            out = model.generate(input_ids=ids, attention_mask=mask, **assistant)
            tokens += out[:, ids.shape[1] :].tolist()
    return Output(tokens)


@contextmanager
def _configured(model: PreTrainedModel, **settings: Any) -> Iterator[None]:
    """Lend a model another configuration: what is None in arguments of `generate` would come from its own."""
    kept, model.generation_config = model.generation_config, GenerationConfig(**settings)
    try:
        yield
    finally:
        model.generation_config = kept


def _scorers(decoder: Decoder) -> list[Scorer]:
    """The target and, if a model drafts, the draft."""
    return [decoder.target, *([decoder.drafter.scorer] if isinstance(decoder.drafter, ModelDrafter) else [])]


def _result(contender: Contender, task: Task, repetitions: Sequence[dict[Contender, Output]]) -> Result:
    def runs_of(name: str) -> list[Output]:
        return [run for outputs in repetitions for each, run in outputs.items() if each.name == name]

    runs, plain, generate = [outputs[contender] for outputs in repetitions], runs_of(PLAIN), runs_of(GENERATE)
    return Result(
        *(contender.name, task.batch, task.temperature, contender.gamma, len(task.prompts)),
        tokens=sum(len(new) for run in runs for new in run.tokens),
        speeds=(speeds := [run.speed for run in runs]),
        tokens_per_second=_spread(speeds),
        ratio_to_plain=paired(runs, plain),
        ratio_to_transformers=paired(runs, generate),
        matches_plain=None if task.temperature or not plain else _matches(runs, plain),
        matches_transformers=None if task.temperature or not generate else _matches(runs, generate),
        **_inside(runs),
    )


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": median(values), "min": min(values), "max": max(values)}


def paired(runs: Sequence[Output], baseline: Sequence[Output]) -> dict[str, float] | None:
    """Ratios of speeds, each within one repetition; None without a baseline."""
    return _spread([run.speed / base.speed for run, base in zip(runs, baseline, strict=True)]) if baseline else None


def _matches(runs: Sequence[Output], baseline: Sequence[Output]) -> int:
    same = [map(eq, run.tokens, base.tokens) for run, base in zip(runs, baseline, strict=True)]
    return sum(map(all, zip(*same, strict=True)))


def _inside(runs: Sequence[Output]) -> dict[str, Any]:
    """Figures that only our own contenders know, pooled over the repetitions (sum / sum)."""
    count, stats = sum(run.rounds for run in runs), sum((run.stats for run in runs), Stats())
    if not count:
        return {}
    whole = sum(run.seconds for run in runs) - stats.seconds["prefill"]
    phases = {phase: stats.seconds[phase] for phase in ("draft", "target", "accept")}
    phases |= {"rest": whole - sum(phases.values()), "round": whole}
    return {
        **{name: getattr(stats, name) for name in ("alpha", "mean_acceptance_length", "draft_acceptance_rate")},
        "milliseconds": {phase: 1000 * seconds / count for phase, seconds in phases.items()},
        "overhead": whole / (phases["draft"] + phases["target"]) - 1,
    }


def environment(engine: Engine) -> dict[str, Any]:
    """What the figures depend on: machine, versions, models, and how busy the machine was before."""
    scorers = _scorers(engine.decoder)
    device, info = scorers[0].device, Path("/proc/cpuinfo")
    cpu = info.read_text().partition("model name\t: ")[2].partition("\n")[0] if info.exists() else ""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(map(_name, sys.argv)),
        "device": f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device),
        "cpu": cpu or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": [*os.getloadavg()] if hasattr(os, "getloadavg") else None,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "rule": engine.rule.name,
        **{name: next((d.version for d in distributions(name=name)), None) for name in PACKAGES},
        **{role: _model(scorer) for role, scorer in zip(("target", "draft"), scorers, strict=False)},
    }


def _model(scorer: Scorer) -> dict[str, Any]:
    model = getattr(scorer, "model", None)
    facts = {"parameters": model.num_parameters(), "dtype": str(model.dtype)} if model else {}
    return {"name": _name(scorer.name), "vocab": scorer.vocab, **facts}


def _name(text: str) -> str:
    """The text without the folders of this machine; `--option=/folder/file` becomes `--option=file`."""
    option, equals, value = text.rpartition("=")
    return option + equals + (Path(value).name if Path(value).expanduser().is_absolute() else value)
