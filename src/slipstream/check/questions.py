"""The two halves of a check, and what they check: greedy decoding, token by token; sampling, by laws and statistics."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slipstream.check.compare import Comparison, Endings, compare, endings
from slipstream.check.controls import broken
from slipstream.check.enumeration import distances, wide_pairs
from slipstream.check.record import Observations, watch
from slipstream.check.report import CheckHalf, Control, Difference, Finding
from slipstream.check.samples import FALSE_ALARM, POWER, Samples, take
from slipstream.core.request import Request, Sampler
from slipstream.core.source import SourceFrame
from slipstream.core.values import check_least
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.rules import Rule
from slipstream.decoding.sampling import Sampling
from slipstream.measure.replay import request_for

Listener = Callable[[str, int, int], None]  # a function that receives the progress of a check: (stage, done, total)
BATCH = 32  # the number of short texts that run together, unless the engine runs more
MOST_SAMPLES = 1_000_000  # the greatest number of samples, which are all held in memory


@dataclass(frozen=True)
class CheckSettings:
    """The settings of a check besides the settings of `Sampling`.

    `gamma` and `verify` default to the engine's. `max_new_tokens` is the length of the texts that are compared token
    by token, `samples` the number of short texts of the statistical test. `gap` is the largest near-tie of greedy
    decoding in logits; None measures the rounding of the model. Raises ValueError for values that are not possible.
    """

    gamma: int | None = None
    verify: str | Rule | None = None
    max_new_tokens: int = 64
    samples: int = 1500
    seed: int = 0
    gap: float | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        check_least(self, max_new_tokens=1, samples=1, gamma=1, gap=0)
        if self.samples > MOST_SAMPLES:
            raise ValueError(f"samples={self.samples} cannot be checked: use {MOST_SAMPLES} or fewer.")


@dataclass(frozen=True)
class Case:
    """The decoder, rule, prompts and settings that both halves of a check use."""

    decoder: Decoder
    rule: Rule
    prompts: tuple[tuple[int, ...], ...]
    settings: CheckSettings
    eos: frozenset[int]
    decode: Callable[[Sequence[int]], str]
    listener: Listener
    batch: int = BATCH
    frame: SourceFrame | None = None

    @property
    def gamma(self) -> int:
        return self.decoder.controller.most

    def requests(self, sampler: Sampler, count: int | None = None, tokens: int | None = None) -> list[Request]:
        limit, seed, prompts = tokens or self.settings.max_new_tokens, self.settings.seed, self.prompts
        return [
            request_for(prompts[i % len(prompts)], sampler, limit, copy=i, eos=self.eos, seed=seed, frame=self.frame)
            for i in range(count or len(prompts))
        ]

    def under(self, rule: Rule) -> Decoder:
        return replace(self.decoder, verifier=rule.verify, rng=rule.rng)

    def at(self, what: str) -> Callable[[int, int], None]:
        return lambda done, total: self.listener(what, done, total)


SAME = 1e-6  # the greatest total variation between laws that should be equal
LACKING = 1e-3  # the least chance of tokens that a draft does not know which makes it a draft of a part of the tokens

CONTROL_PROMPTS, CONTROL_TOKENS = 4, 32
"""The number of prompts and of tokens for a control: a broken rule is noticed soon."""


def greedy(case: Case, sampler: Sampling) -> CheckHalf:
    case.listener("greedy: decoding", 0, 1)
    observed = watch(case.decoder, case.requests(sampler))
    comparison = compare(case.decoder.target, observed.texts, on_text=case.at("greedy: following the texts"))
    tests = (
        about_choices("tokens", case, comparison),
        about_scores(comparison),
        about_wiring(observed),
        about_endings(endings(case.decoder, observed.texts)),
    )
    controls = []
    for rule in broken(case.rule, greedy=True):
        texts = watch(case.under(rule), _control_requests(case, sampler)).texts
        wrong = compare(case.decoder.target, texts, on_text=case.at(f"greedy control: {rule.name}"))
        controls.append(Control(rule.name, () if about_choices("tokens", case, wrong).passed else ("tokens",)))
    return CheckHalf("greedy, temperature 0", tests, tuple(controls), named(case, comparison), needed=("tokens",))


def sampling(case: Case, sampler: Sampling) -> CheckHalf:
    case.listener("sampling: decoding", 0, 1)
    observed = watch(case.decoder, case.requests(sampler))
    coupled = case.rule.rng.coupled
    rng = case.rule.rng if coupled else None
    comparison = compare(case.decoder.target, observed.texts, rng, case.at("sampling: following the texts"))
    moved = comparison.moved / max(1, comparison.tokens)
    tests = [about_rule(case.rule, observed), about_samples(_samples(case, sampler, case.rule, moved))]
    tests += [about_choices("same seed", case, comparison)] if coupled else []
    tests += [about_scores(comparison), about_wiring(observed), about_endings(endings(case.decoder, observed.texts))]
    sampled = any(not pair.copied for pair in observed.pairs)
    cut = any(pair.lacking > LACKING and not pair.copied for pair in wide_pairs(observed.pairs, observed.form))
    wrong = broken(case.rule, greedy=False, sampled=sampled, cut=cut)
    controls = list[Control]()
    for rule in wrong:
        refuted = [about_rule(rule, observed), about_samples(_samples(case, sampler, rule, 0.0, control=True))]
        if coupled:
            texts = watch(case.under(rule), _control_requests(case, sampler)).texts
            refuted.append(about_choices("same seed", case, compare(case.decoder.target, texts, case.rule.rng)))
        controls.append(Control(rule.name, tuple(test.name for test in refuted if not test.passed)))
    needed = ("rule", "samples", "same seed") if coupled else ("rule", "samples")
    name = f"sampling, temperature {sampler.temperature:g}"
    enough = max(CheckSettings.samples, 4 * case.settings.samples)
    return CheckHalf(name, tuple(tests), tuple(controls), named(case, comparison), needed, enough)


def about_rule(rule: Rule, observed: Observations) -> Finding:
    measured = distances(rule.verify, observed.pairs, observed.form) if observed.pairs else []
    farthest = max((distance.joint for distance in measured), default=0.0)
    mean = sum(distance.token for distance in measured) / max(1, len(measured))
    says = f"its exact distribution is at most {farthest:.2g} (total variation) from the target's on {len(measured)} "
    says += "processes made of distributions met in these texts"
    if farthest > SAME:
        says += f", {mean:.2g} for one token on average; {SAME:g} is the limit"
    figures = {"processes": len(measured), "farthest": farthest, "mean_per_token": mean, "limit": SAME}
    return Finding("rule", farthest <= SAME, says, figures)


def about_samples(samples: Samples) -> Finding:
    (statistic, freedom), p_value, sees = samples.statistic, samples.p_value, samples.detectable
    says = f"{samples.tokens} tokens of {samples.texts} texts: chi-squared {statistic:.1f} with {freedom} degrees of "
    says += f"freedom, {samples.rare} rare tokens for {samples.rare_expected:.1f} expected, p = {p_value:.2g} "
    says += f"(fails below {FALSE_ALARM:g})"
    if sees is not None:
        says += f"; a mean bias of {sees:.2g} (total variation) would have been seen with {POWER:.0%} chance"
    figures: dict[str, Any] = {
        name: getattr(samples, name) for name in ("texts", "tokens", "rare", "rare_expected", "learned")
    }
    figures |= {"statistic": statistic, "freedom": freedom, "p_value": p_value, "false_alarm": FALSE_ALARM}
    says += " (the draft learns from the texts, so that the cells are by p alone)" if samples.learned else ""
    return Finding("samples", p_value >= FALSE_ALARM, says, {**figures, "detectable": sees, "power": POWER})


def _samples(case: Case, sampler: Sampling, rule: Rule, moved: float, control: bool = False) -> Samples:
    """Draw texts a little longer than a round; for a control only until the test fails."""
    decoder = replace(case.under(rule), batch_size=case.batch)
    requests = case.requests(sampler, case.settings.samples, case.gamma + 2)
    progress = case.at(f"sampling control: {rule.name}" if control else "sampling: drawing texts")

    def on_texts(samples: Samples) -> bool:
        progress(samples.texts, len(requests))
        return control and samples.p_value < FALSE_ALARM

    return take(decoder, requests, moved, on_texts)


def _control_requests(case: Case, sampler: Sampling) -> list[Request]:
    count, tokens = min(CONTROL_PROMPTS, len(case.prompts)), min(CONTROL_TOKENS, case.settings.max_new_tokens)
    return case.requests(sampler, count, tokens)


def allowed_gap(case: Case, found: Comparison) -> float:
    return found.rounding.allowed if case.settings.gap is None else case.settings.gap


def about_choices(name: str, case: Case, found: Comparison) -> Finding:
    """Answer whether every token is the one that plain decoding chooses, or a near-tie."""
    allowed, gaps = allowed_gap(case, found), [difference.gap for difference in found.differences]
    wrong, largest = max(found.unforced, sum(gap > allowed for gap in gaps)), max(gaps, default=0.0)
    says = f"{found.tokens} tokens, each the one that plain decoding chooses"
    if gaps:
        kind = f"{wrong} of them by more than rounding explains" if wrong else "all of them near-ties"
        says = f"{len(gaps)} of {found.tokens} tokens differ from plain decoding, {kind}: "
        says += f"the largest gap is {largest:.2g} logits, {allowed:.2g} are allowed"
    if found.unforced:
        says += f"; {found.unforced} are not the choice under the scores of their own round"
    figures = {"tokens": found.tokens, "different": len(gaps), "wrong": wrong}
    return Finding(name, not wrong, says, {**figures, "largest_gap": largest, "allowed_gap": allowed})


def about_scores(found: Comparison) -> Finding:
    rounding = found.rounding
    says = f"logits of rounds and of plain steps differ by at most {rounding.noise:.2g}"
    if rounding.whole is not None:
        says += f", those of plain steps and of one pass without a cache by {rounding.whole:.2g}"
    passed = max(rounding.noise, rounding.whole or 0.0) <= rounding.limit
    figures = {"noise": rounding.noise, "whole": rounding.whole, "limit": rounding.limit}
    figures["law_moved"] = found.moved / max(1, found.tokens)
    return Finding("scores", passed, f"{says} ({rounding.limit:.2g} is the limit of rounding)", figures)


def about_wiring(observed: Observations) -> Finding:
    faults = []
    if not observed.p <= SAME:
        faults.append(f"the verifier got distributions up to {observed.p:.2g} away from those of plain processing")
    if observed.q is not None and not observed.q <= SAME:
        faults.append(f"draft tokens were drawn from distributions up to {observed.q:.2g} away from those reported")
    if not observed.next <= SAME:
        faults.append(
            f"the last token of a round was drawn from a distribution up to {observed.next:.2g} away from the verdict's"
        )
    if observed.astray:
        faults.append(f"{observed.astray} emitted tokens were neither accepted nor drawn")
    says = f"{observed.drafted} drafted tokens, their distributions and the verifier's are what they should be"
    if observed.q is None and observed.drafted:
        says += " (the drafter's draws cannot be seen: the samples judge them)"
    figures = {name: getattr(observed, name) for name in ("p", "q", "next", "astray", "drafted")}
    return Finding("wiring", not faults, "; ".join(faults) or says, figures)


def about_endings(found: Endings) -> Finding:
    says = f"texts end at their end token or limit; {found.inside} were ended inside an accepted draft to see it"
    figures = {"faults": len(found.faults), "inside": found.inside}
    return Finding("endings", not found.faults, "; ".join(found.faults[:3]) or says, figures)


def named(case: Case, found: Comparison) -> tuple[Difference, ...]:
    """Return the first difference of every text, with its tokens as text."""
    allowed, read = allowed_gap(case, found), case.decode
    return tuple(
        replace(it, plain_text=read([it.plain]), emitted_text=read([it.emitted]), allowed=allowed)
        for it in found.first()
    )
