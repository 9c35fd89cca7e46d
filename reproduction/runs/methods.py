"""The methods in the plane of baselines, each at several settings, as decoders to compare with plain decoding."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from reproduction.baselines.drafting import ScoredDrafter
from reproduction.baselines.exits import ExitClock, ExitRule, Exits, saturation, softmax_gap
from reproduction.baselines.heads import HeadsDrafter, ParallelHeads
from reproduction.baselines.rules import cascade, committee, typical
from reproduction.baselines.sources import Source, SourceDrafter
from reproduction.runs.subjects import Subject
from slipstream.core.draft import Verifier
from slipstream.core.protocols import Drafter
from slipstream.decoding import acceptance
from slipstream.decoding.controllers import Fixed
from slipstream.decoding.decoder import Decoder
from slipstream.drafters.following import Follower
from slipstream.engine.engine import Engine

GAMMA = 5
EXACT, BLOCKWISE, EXITS = "exact", "Blockwise Parallel Decoding", "CALM"
SOURCES = "Shallow Aggressive Decoding"


@dataclass(frozen=True)
class Method:
    """A method at one setting.

    `other`: whether it has a model of its own, so that the distance of its law must be measured by scoring its texts
    with the target. `exits`: the model with early exits, if any, which counts the layers that ran.
    """

    method: str
    setting: str
    decoder: Decoder
    gamma: int = 0
    other: bool = False
    exits: Exits | None = None

    @property
    def name(self) -> str:
        """The name of the method with its setting."""
        return f"{self.method}, {self.setting}" if self.setting else self.method


# ---- with a draft model --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Baseline:
    """A rule for the tokens of a draft model, at one setting: its verifier, and the confidence that the draft model
    needs to go on drafting (0: always)."""

    method: str
    setting: str
    verify: Verifier
    sure: float = 0.0


BASELINES = (
    Baseline(EXACT, "token verification", acceptance.token),
    Baseline(EXACT, "block verification", acceptance.block),
    *(Baseline("lenience", f"l = {v:g}", acceptance.lenient(v)) for v in (0.5, 0.3, 0.1)),
    *(Baseline("typical acceptance", f"epsilon = {e:g}", typical(e)) for e in (0.3, 0.09, 0.01)),
    *(Baseline("speculative cascade", f"alpha = {a:g}", cascade(a)) for a in (0.0, 0.3, 1.0)),
    *(Baseline("committee", f"tau = {t:g}", committee, t) for t in (0.9, 0.7, 0.5)),
)
"""Every rule at several values of its setting, so that no result depends on a single choice."""


def drafted(subject: Subject, draft: str) -> list[Method]:
    """Return all rules with one draft model, whose cache they use in turns."""
    follower, vocab = Follower(subject.lend(draft)), subject.engine.decoder.target.vocab

    def decoder(baseline: Baseline) -> Decoder:
        drafter = ScoredDrafter(follower, vocab, baseline.sure)
        return _drafting(subject.plain, drafter, GAMMA, baseline.verify)

    return [Method(each.method, each.setting, decoder(each), GAMMA) for each in BASELINES]


def _drafting(plain: Decoder, drafter: Drafter, gamma: int, verify: Verifier = acceptance.token) -> Decoder:
    return replace(plain, drafter=drafter, controller=Fixed(gamma), verifier=verify)


# ---- Blockwise Parallel Decoding -----------------------------------------------------------------------------------

BLOCKS = (2, 4, 6)
"""The numbers of tokens in a block (k of Stern et al.): the base's own and those of the parallel heads."""


def blockwise(subject: Subject, frozen: ParallelHeads, tuned: tuple[Engine, ParallelHeads]) -> list[Method]:
    """Return Blockwise Parallel Decoding at several block sizes, on the frozen target and on a fine-tuned copy.

    The base checks a block by its most probable tokens, so this is for greedy decoding.
    """
    bases = {"frozen base": (subject.engine, frozen), "fine-tuned base": tuned}
    methods = []
    for name, (engine, heads) in bases.items():
        drafter = HeadsDrafter(engine.decoder.target, heads)  # type: ignore[arg-type]
        alone = replace(subject.plain, target=engine.decoder.target)
        for block in BLOCKS:
            decoder = _drafting(alone, drafter, block - 1)
            methods.append(Method(BLOCKWISE, f"k = {block}, {name}", decoder, block - 1, engine is not subject.engine))
    return methods


# ---- CALM ----------------------------------------------------------------------------------------------------------

CONFIDENCES = {"softmax gap": softmax_gap, "state saturation": saturation}


def early_exits(subject: Subject, exits: Exits, thresholds: Sequence[dict[str, Any]]) -> list[Method]:
    """Return CALM at calibrated thresholds, and the copy with exits running all of its layers."""
    rules: dict[str, ExitRule | None] = {"no exits": None}
    for each in thresholds:
        setting = f"{each['confidence']}, risk {each['risk']:g}"
        if each["threshold"] is not None:
            confidence = CONFIDENCES[each["confidence"]]
            rules[f"{setting}: {each['threshold']:g}"] = ExitRule(confidence, each["threshold"], subject.length)
    return [Method(EXITS, setting, exiting(subject, exits, rule), 0, True, exits) for setting, rule in rules.items()]


def exiting(subject: Subject, exits: Exits, rule: ExitRule | None) -> Decoder:
    return replace(subject.plain, target=exits.target, drafter=ExitClock(exits, rule))


# ---- Shallow Aggressive Decoding -----------------------------------------------------------------------------------

PIECES = {"all of the source": 512, "pieces of 16": 16}
"""The name of a setting -> the most tokens that are copied per round."""


def from_sources(subject: Subject, source: Source) -> list[Method]:
    """Return Shallow Aggressive Decoding, drafting the whole rest of the source, as in the paper, or pieces of it."""
    plain, drafter = subject.plain, SourceDrafter(source)
    return [Method(SOURCES, name, _drafting(plain, drafter, most), most) for name, most in PIECES.items()]
