"""`Decoder`, the target, drafter, verifier and controller of decoding, and `NoDraft`, the drafter of plain decoding."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from slipstream.cache.prefixes import Recalling, recalling
from slipstream.core.draft import Draft, Verifier
from slipstream.core.draws import Rng, RowByRow, Sealed, draw
from slipstream.core.protocols import Controller, Drafter, Scorer, Traits, scorers_among, secret_among
from slipstream.core.request import Row
from slipstream.core.round import Context
from slipstream.core.values import whole_number
from slipstream.decoding.controllers import Fixed
from slipstream.decoding.rules import TOKEN
from slipstream.decoding.verification import Verification, verify_eagerly


class NoDraft(Drafter):
    """Drafts nothing: every round is a plain decoding step."""

    traits = Traits(by_text=True)

    def propose(self, context: Context, gammas: Sequence[int]) -> Draft:
        return Draft.empty(len(context.rows), torch.device("cpu"))


class Experience:
    """Keeps what controllers have learned from one call to the next, so that costs are not measured again in each."""

    def __init__(self) -> None:
        self._states: list[tuple[Controller, Any]] = []

    def begin(self, controller: Any) -> Any:
        """Return the state with which a controller begins: resumed from an earlier call of one that is equal to it."""
        known = next((state for other, state in self._states if other == controller), None)
        return controller.init() if known is None else controller.resume(known)

    def keep(self, controller: Controller, state: Any) -> None:
        if hasattr(controller, "resume"):
            others = [(other, old) for other, old in self._states if other != controller]
            self._states = [*others, (controller, state)]


@dataclass(frozen=True)
class Decoder:
    """The parts with which requests are decoded, by one `Scheduler` at a time; copies share their `experience`."""

    target: Scorer
    drafter: Drafter = field(default_factory=NoDraft)
    verifier: Verifier = TOKEN.verify
    controller: Controller = field(default_factory=lambda: Fixed(5))
    batch_size: int = 8
    rng: Rng = draw
    experience: Experience = field(default_factory=Experience, compare=False)
    verification: Verification = field(default=verify_eagerly, compare=False)
    compiled: bool = False  # passes become graphs, each when it is first needed or by `Engine.warm_up`
    inside: bool = False  # it decodes a draft: a position without a law gets an arbitrary one, and the text goes on

    def __post_init__(self) -> None:
        whole_number("batch_size", self.batch_size, 1)

    @cached_property
    def scorers(self) -> tuple[Scorer, ...]:
        return (self.target, *scorers_among([self.drafter]))

    @cached_property
    def stores(self) -> tuple[Recalling, ...]:
        """The target and the models that draft, as stores that take over texts from the prefix cache."""
        return tuple(map(recalling, self.scorers))

    @cached_property
    def secret(self) -> int | None:
        """The secret that draws are made from besides the seed, so that an untrusted drafter cannot predict them; None
        if every drafter is trusted."""
        return secret_among(self.drafter)

    def rng_of(self, rows: Sequence[Row]) -> Rng:
        """Return the `Rng` of rows, from their requests' rules or else the decoder's; with the `secret`, if any."""
        if not any(row.request.rule for row in rows):
            return self.rng if self.secret is None else self._sealed(self.rng, len(rows))
        rules = [row.request.rule for row in rows]
        ways = [self.rng.select([place]) if rule is None else rule.rng for place, rule in enumerate(rules)]
        if self.secret is not None:
            made = {id(way): self._sealed(way, 1) for way in ways}
            ways = [made[id(way)] for way in ways]
        return RowByRow.of(ways)

    def _sealed(self, rng: Rng, rows: int) -> Rng:
        """Return draws made with the secret; coupled draws, which need none, stay as they are."""
        assert self.secret is not None
        if not rng.coupled:
            return Sealed(rng, self.secret)
        ways = [rng.select([place]) for place in range(rows)]
        if all(way.coupled for way in ways):
            return rng
        return RowByRow(tuple(way if way.coupled else Sealed(way, self.secret) for way in ways))
