"""`Case`, what is checked: a decoder, a rule, prompts and settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from slipstream.core.request import Request, Sampler
from slipstream.core.source import SourceFrame
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.rules import Rule
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
        least = {"max_new_tokens": 1, "samples": 1, "gamma": 1, "gap": 0}
        for name, allowed in least.items():
            value = getattr(self, name)
            if value is not None and value < allowed:
                raise ValueError(f"{name}={value} cannot be checked: use {allowed} or more.")
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
        limit, prompts = tokens or self.settings.max_new_tokens, self.prompts
        return [
            request_for(
                prompts[i % len(prompts)],
                sampler,
                limit,
                copy=i,
                eos=self.eos,
                seed=self.settings.seed,
                frame=self.frame,
            )
            for i in range(count or len(prompts))
        ]

    def under(self, rule: Rule) -> Decoder:
        return replace(self.decoder, verifier=rule.verify, rng=rule.rng)

    def at(self, what: str) -> Callable[[int, int], None]:
        return lambda done, total: self.listener(what, done, total)
