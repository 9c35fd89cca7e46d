"""`Decoder`, the target, drafter, verifier and controller of decoding, and `NoDraft`, the drafter of plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from slipstream.cache.prefixes import Recalling, recalling
from slipstream.core.draft import Draft, Verifier
from slipstream.core.draws import Rng, draw
from slipstream.core.protocols import Controller, Drafter, Scorer, scorers_among, secret_among
from slipstream.core.round import Context, Round
from slipstream.core.values import whole_number
from slipstream.decoding.controllers import Fixed
from slipstream.decoding.rules import TOKEN


class NoDraft:
    """Drafts nothing: every round is a plain decoding step."""

    by_text = True

    def propose(self, context: Context, gammas: Sequence[int]) -> Draft:
        """Return an empty draft."""
        return Draft.empty(len(context.rows), torch.device("cpu"))

    def observe(self, round: Round) -> None:
        """Do nothing: there is no draft that could learn from a round."""


@dataclass(frozen=True)
class Decoder:
    """The parts with which requests are decoded. Target, drafter and their caches serve one `Scheduler` at a time."""

    target: Scorer
    drafter: Drafter = field(default_factory=NoDraft)
    verifier: Verifier = TOKEN.verify
    controller: Controller = field(default_factory=lambda: Fixed(5))
    batch_size: int = 8
    rng: Rng = draw
    inside: bool = False  # it decodes a draft: where no law can be made, an arbitrary one serves, and the text goes on

    def __post_init__(self) -> None:
        whole_number("batch_size", self.batch_size, 1)

    @cached_property
    def scorers(self) -> tuple[Scorer, ...]:
        """The Scorers of the models that hold the rows' texts: the target, and those that draft."""
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
