"""The whole of planning: measure, predict, choose, verify the choice against plain decoding, and report."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

from torch import Tensor

from slipstream.core.model_options import ModelOptions
from slipstream.core.options import SAMPLING
from slipstream.core.protocols import Drafter
from slipstream.decoding.controllers import Fixed
from slipstream.decoding.decoder import Decoder, NoDraft
from slipstream.decoding.sampling import Sampling
from slipstream.engine.engine import Engine
from slipstream.engine.plan_file import Plan
from slipstream.engine.requests import Prompt, read_prompts
from slipstream.measure.environment import environment
from slipstream.plan.measure import PlanTask, speeds, sweep, using
from slipstream.plan.predict import Outlook, SpeedPrediction, predict
from slipstream.text.jsontext import json_text

TOLERANCE = 0.1
"""The relative difference between measured and predicted speed-up above which a prediction counts as off."""

Progress = Callable[[int, int, str], None]
"""Called before every run with the number of finished runs, the number of all, and the name of the one that begins."""


@dataclass(frozen=True)
class PlanSettings:
    """The settings of a plan: `most` is the greatest gamma tried, or `gammas` are the only ones.

    `batches` are numbers of rows that run together. With `network_ms`, there and back, the draft is to run on another
    machine: it is measured here, and what is planned is not run. Raises ValueError for what is impossible.
    """

    most: int = 10
    gammas: tuple[int, ...] = ()
    batches: tuple[int, ...] = (1,)
    max_new_tokens: int = 128
    repetitions: int = 3
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    network_ms: float | None = None

    def __post_init__(self) -> None:
        if self.network_ms is not None and not 0 <= self.network_ms < math.inf:
            raise ValueError(f"network_ms={self.network_ms} is not possible: it is 0 or more milliseconds, and finite.")
        least = {"most": 1, "gammas": 1, "batches": 1, "max_new_tokens": 2, "repetitions": 1}
        for name, allowed in least.items():
            value = getattr(self, name)
            if min(value if isinstance(value, tuple) else (value,), default=allowed) < allowed:
                raise ValueError(f"{name}={value} cannot be planned for: use {allowed} or more.")
        if self.gammas:
            object.__setattr__(self, "most", max(self.gammas))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The lengths of chains that a compiled draft makes in one graph: only a few, since compiling takes time."""
        return self.gammas or tuple(sorted({-(-self.most // part) for part in (1, 2, 4)}))

    @property
    def delay(self) -> float | None:
        """Seconds to the draft on another machine and back; None for a draft on this machine."""
        return None if self.network_ms is None else self.network_ms / 1000


@dataclass(frozen=True)
class MeasuredComparison:
    """The measured comparison of the choice with plain decoding: medians over repetitions of ratios within one.

    `factor` is speed over plain speed, `tokens_per_call` and `round` (seconds of a round over those of a plain step)
    are its two parts; each as predicted and as measured.
    """

    rows: int
    draft: str
    gamma: int
    predicted: SpeedPrediction
    factors: tuple[float, ...]
    tokens_per_call: float
    round: float

    @property
    def factor(self) -> float:
        return median(self.factors)

    @property
    def difference(self) -> float:
        return self.factor / self.predicted.factor - 1

    @property
    def off(self) -> bool:
        return abs(self.difference) > TOLERANCE

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "factor": self.factor, "difference": self.difference, "off": self.off}


@dataclass
class PlanReport:
    """The report of a plan: measurements, predictions and verifications. `outlooks` has one per rows and draft."""

    environment: dict[str, Any]
    settings: PlanSettings
    texts: str
    outlooks: dict[int, dict[str, Outlook]] = field(default_factory=dict)
    verifications: list[MeasuredComparison] = field(default_factory=list)
    interrupted: bool = False

    @property
    def draft(self) -> str:
        """The draft with the largest factor, multiplied over all numbers of rows; 1 where plain decoding is chosen."""

        def factors(name: str) -> tuple[float, float]:
            outlooks = [drafts[name] for drafts in self.outlooks.values()]
            gain = math.prod(each.best.factor if each.worth else 1.0 for each in outlooks)
            return gain, math.prod(each.best.factor for each in outlooks)

        return max(next(iter(self.outlooks.values())), key=factors)

    @property
    def gammas(self) -> dict[int, int]:
        """The number of rows -> gamma of the chosen draft; 0: do not speculate."""
        return {rows: drafts[self.draft].gamma for rows, drafts in self.outlooks.items()}

    def plan(self, models: ModelOptions, vocab: int) -> Plan:
        draft = self.draft if any(self.gammas.values()) else None
        models = replace(models, draft=draft, verify=self.environment["rule"], gamma=None)
        return Plan(models, self.gammas, vocab, self.settings.sampling.temperature, self.environment, self.figures())

    def figures(self) -> dict[str, Any]:
        settings = {**vars(self.settings), "sampling": {"temperature": self.settings.sampling.temperature}}
        outlooks = {rows: {name: one.as_dict() for name, one in some.items()} for rows, some in self.outlooks.items()}
        verifications = [each.as_dict() for each in self.verifications]
        found = {"settings": settings, "texts": self.texts, "draft": self.draft, "gammas": self.gammas}
        checked = {"outlooks": outlooks, "verifications": verifications, "interrupted": self.interrupted}
        return json.loads(json_text({**found, **checked}))


def make(
    engine: Engine,
    drafters: Mapping[str, Drafter],
    prompts: Sequence[Prompt],
    settings: PlanSettings,
    on_step: Progress | None = None,
    **options: Any,
) -> PlanReport:
    """Plan for an engine's target and rule with the named drafters.

    Prompts are continued as by `Engine.generate`, with further `options` of a call; EOS is ignored, unless these say
    otherwise. Ctrl-C during the verification ends it early: the report says `interrupted` and keeps the
    predictions. Raises ValueError if prompts, models and settings disagree, or if there is nothing to draft with.
    """
    if not drafters:
        raise ValueError("there is nothing to plan without a draft: give --draft.")
    if len(prompts) < (least := max(2, *settings.batches)):
        raise ValueError(f"a plan needs {least} prompts or more here, but there are {len(prompts)}.")
    how = {name: getattr(settings.sampling, name) for name in (*SAMPLING, "processors", "grammar")}
    how |= {"max_new_tokens": settings.max_new_tokens, "seed": settings.seed, "ignore_eos": True, **options}
    job = engine.prepare(read_prompts(prompts), how)
    texts, decoder, target = tuple(each.request for each in job.generations), job.decoder, engine.decoder.target
    longest = max(len(text.prompt) + text.max_new_tokens for text in texts)
    if target.context and longest > target.context:
        raise ValueError(f"prompt and new tokens are up to {longest}, but {target.name} holds {target.context}.")
    sizes = [text.prompt_tokens for text in texts]
    about = f"prompts of {min(sizes)} to {max(sizes)} tokens + {settings.max_new_tokens} new"
    about = f"{len(texts)} windows of sound" if isinstance(texts[0].source, Tensor) else about
    report = PlanReport(environment(engine), settings, about)
    tasks = [PlanTask(texts, rows) for rows in settings.batches]
    wanted = settings.gammas or range(1, settings.most + 1)
    repetitions = settings.repetitions if settings.network_ms is None else 0
    count = sum((1 + len(drafters)) * (1 + len(task.parts())) + repetitions for task in tasks)
    done = iter(range(count))

    def step(name: str) -> None:
        if on_step:
            on_step(next(done), count, name)

    for task in tasks:
        plain, records = sweep(decoder, list(drafters.values()), task, settings.most, step)
        report.outlooks[task.rows] = {
            name: predict(
                record.tallies,
                replace(record.costs(plain), delay=settings.delay),
                wanted,
                record.tokens / len(texts),
                settings.seed,
            )
            for name, record in zip(drafters, records, strict=True)
        }
    try:
        for task in tasks if settings.network_ms is None else ():
            report.verifications.append(verify(decoder, drafters[report.draft], task, report, step))
    except KeyboardInterrupt:
        report.interrupted = True
    return report


def verify(
    decoder: Decoder, drafter: Drafter, task: PlanTask, report: PlanReport, step: Callable[[str], None]
) -> MeasuredComparison:
    """Run the best gamma of the chosen draft and plain decoding in turn, also where the plan is not to speculate."""
    best = report.outlooks[task.rows][report.draft].best
    decoders = [using(decoder, NoDraft(), Fixed(0), task.rows), using(decoder, drafter, Fixed(best.gamma), task.rows)]
    pairs = []
    for number in range(report.settings.repetitions):
        step(f"plain and gamma {best.gamma}")
        pairs.append(speeds(decoders, task, 1 + number))
    return MeasuredComparison(
        task.rows,
        report.draft,
        best.gamma,
        best,
        tuple(ours.per_second / plain.per_second for plain, ours in pairs),
        sum(ours.tokens for _, ours in pairs) / sum(ours.rounds for _, ours in pairs) / task.rows,
        median(ours.per_round / plain.per_round for plain, ours in pairs),
    )
