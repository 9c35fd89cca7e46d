"""The plane of baselines: speed over plain decoding against the distance from the target's law, by turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slipstream.bench import PLAIN, BenchTask, Contender
from slipstream.bench.contenders import ours
from slipstream.bench.race import Repetition, result, timed
from slipstream.bench.records import Output
from slipstream.core.draft import Verifier
from slipstream.core.stats import Stats
from slipstream.decoding import acceptance
from slipstream.decoding.controllers import Fixed
from slipstream.decoding.decoder import Decoder
from slipstream.drafters.following import Follower
from slipstream.measure.environment import environment
from slipstream.measure.racing import race
from slipstream.paper.baselines.drafting import ScoredDrafter
from slipstream.paper.baselines.rules import cascade, committee, typical
from slipstream.paper.runs.subjects import Subject

GAMMA = 5


@dataclass(frozen=True)
class Baseline:
    """A method at one setting: its verifier, and how sure its draft has to be to go on (0: always)."""

    method: str
    setting: str
    verify: Verifier
    sure: float = 0.0

    @property
    def name(self) -> str:
        """Method and setting."""
        return f"{self.method}, {self.setting}" if self.setting else self.method


EXACT = "exact"
BASELINES = (
    Baseline(EXACT, "token verification", acceptance.token),
    Baseline(EXACT, "block verification", acceptance.block),
    *(Baseline("lenience", f"l = {v:g}", acceptance.lenient(v)) for v in (0.5, 0.3, 0.1)),
    *(Baseline("typical acceptance", f"epsilon = {e:g}", typical(e)) for e in (0.3, 0.09, 0.01)),
    *(Baseline("speculative cascade", f"alpha = {a:g}", cascade(a)) for a in (0.0, 0.3, 1.0)),
    *(Baseline("committee", f"tau = {t:g}", committee, t) for t in (0.9, 0.7, 0.5)),
)
"""Every method over its own setting, so that none stands or falls with one choice of it."""


def measure(
    subject: Subject, draft: str, temperature: float, course: tuple[int, int], say: Callable[[str], Any]
) -> dict[str, Any]:
    """All baselines with one draft, by turns, text by text -> a JSON object. `course`: texts, and how often."""
    follower = Follower(subject.lend(draft))
    contenders = [ours(PLAIN, subject.plain), *(_contender(subject, follower, each) for each in BASELINES)]
    texts, repetitions = min(course[0], len(subject.sources)), course[1]
    prompts = tuple(subject.engine.encode(source) for source in subject.sources[:texts])
    eos, frame = subject.engine.eos, subject.engine.frame
    task = BenchTask(prompts, 1, temperature, subject.length, eos, 0, frame)
    repeated: list[Repetition] = []

    def run(contender: Contender, one: BenchTask) -> Any:
        say(f"{subject.name} at temperature {temperature:g}: {contender.name}")
        return timed(contender, one)

    for contender in contenders:
        run(contender, replace(task, prompts=prompts[:1]))
    laps = [replace(task, prompts=(prompt,), seed=seed) for seed in range(repetitions) for prompt in prompts]
    found = list(race(contenders, laps, run))
    for start in range(0, len(laps), texts):
        turns = zip(contenders, zip(*found[start : start + texts], strict=True), strict=True)
        repeated.append({contender: _pooled(outputs) for contender, outputs in turns})
    follower.follow(())
    rows = [_row(subject, contender, task, repeated) for contender in contenders]
    return {
        "subject": subject.name,
        "draft": draft,
        "temperature": temperature,
        "gamma": GAMMA,
        "texts": texts,
        "repetitions": repetitions,
        "references": bool(subject.references),
        "rows": rows,
        **subject.models,
        "environment": environment(subject.engine),
    }


def decoder(subject: Subject, follower: Follower, baseline: Baseline) -> Decoder:
    """The target with a method's rule and draft."""
    drafter = ScoredDrafter(follower, subject.engine.decoder.target.vocab, baseline.sure)
    return replace(subject.plain, drafter=drafter, controller=Fixed(GAMMA), verifier=baseline.verify)


def _contender(subject: Subject, follower: Follower, baseline: Baseline) -> Contender:
    return ours(baseline.name, decoder(subject, follower, baseline), GAMMA)


def _pooled(outputs: Sequence[Output]) -> Output:
    """One repetition of a contender: its texts together."""
    tokens, stats = [text for output in outputs for text in output.tokens], (output.stats for output in outputs)
    calls, seconds = sum(output.calls for output in outputs), sum(output.seconds for output in outputs)
    return Output(tokens, sum(stats, Stats()), calls, seconds)


def _row(subject: Subject, contender: Contender, task: BenchTask, repeated: Sequence[Repetition]) -> dict[str, Any]:
    """What one method did in all repetitions."""
    found, runs = result(contender, task, repeated), [outputs[contender] for outputs in repeated]
    plain = [next(output for one, output in outputs.items() if one.name == PLAIN) for outputs in repeated]
    stats = sum((run.stats for run in runs), Stats())
    method = next((each for each in BASELINES if each.name == contender.name), None)
    return {
        "method": method.method if method else PLAIN,
        "setting": method.setting if method else "",
        "over_plain": found.ratio_to_plain,
        "tokens_per_call": stats.mean_acceptance_length,
        "distance": stats.distance / stats.emitted,
        "same": found.matches_plain,
        "of": found.prompts,
        **(_quality(subject, runs[0].tokens, plain[0].tokens) if subject.references or not task.temperature else {}),
    }


def _quality(subject: Subject, tokens: Sequence[Sequence[int]], plain: Sequence[Sequence[int]]) -> dict[str, float]:
    """BLEU and chrF of one repetition's texts: to the references if there are any, else to plain decoding's texts."""
    try:
        import sacrebleu
    except ImportError:
        raise ValueError("the quality of texts needs sacrebleu: pip install 'slipstream[paper]'.") from None

    def texts(all_tokens: Sequence[Sequence[int]]) -> list[str]:
        eos = subject.engine.eos
        return [subject.engine.decode([token for token in some if token not in eos]) for some in all_tokens]

    references = list(subject.references[: len(tokens)]) or texts(plain)
    said = texts(tokens)
    scores = {"bleu": sacrebleu.BLEU(), "chrf": sacrebleu.CHRF()}
    return {name: metric.corpus_score(said, [references]).score for name, metric in scores.items()}
