"""A round of speculative execution: Algorithm 1 of arXiv 2211.17192 for any law of the next state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.core.draws import Purpose
from slipstream.processes.laws import Laws
from slipstream.processes.numbers import Numbers

Kernel = Callable[[Tensor, Tensor], Laws]
"""f or f': (states (rows, *state), times (rows,)) -> the law of each row's next state, rows independent."""


@dataclass(frozen=True, slots=True)
class Chains:
    """Chains at their present steps: `names` (rows,), `states` (rows, *state) and `times` (rows,), the steps made."""

    seed: int
    names: Tensor
    states: Tensor
    times: Tensor

    def numbers(self, purpose: Purpose, rows: Tensor, ahead: Tensor | int) -> Numbers:
        """Return the numbers of these rows at `ahead` steps from here, in the round that begins here."""
        origins = self.times[rows]
        return Numbers.of(self.seed, purpose, self.names[rows], origins, origins + ahead)


@dataclass(frozen=True, slots=True)
class ProcessRound:
    """The outcome of a round: chain r takes the states path[r, : accepted[r] + 1].

    `path` (rows, gamma + 1, *state) holds the accepted drafts, then the correction or bonus. `lengths` (rows,) is the
    number of drafted states. `betas` (rows, gamma) is min(1, p/q) at each drafted state; its mean given the state
    before it is beta.
    """

    path: Tensor
    accepted: Tensor
    lengths: Tensor
    betas: Tensor


def play_round(target: Kernel, draft: Kernel, chains: Chains, lengths: Tensor) -> ProcessRound:
    """Draft `lengths` (rows,) steps with f', evaluate f at all states at once, keep a prefix, add correction or bonus.

    f is called once, with sum(lengths) + rows states. Raises FloatingPointError if a law is not a number.
    """
    states, q, drafted = _draft(draft, chains, lengths)
    asked = _Places.of(torch.arange(states.shape[1] - 1) <= lengths[:, None])
    p = target(states[asked.rows, asked.ahead], chains.times[asked.rows] + asked.ahead)
    betas, passed = torch.zeros(drafted.shape, dtype=torch.float64), torch.zeros(drafted.shape, dtype=torch.bool)
    if q is not None:
        ratio = _ratio(p.select(asked.index[drafted.rows, drafted.ahead]), q, states[drafted.rows, drafted.ahead + 1])
        coins = chains.numbers(Purpose.ACCEPT, drafted.rows, drafted.ahead).uniforms(1)[:, 0]
        betas[drafted.rows, drafted.ahead] = ratio.clamp(max=0).exp()
        passed[drafted.rows, drafted.ahead] = coins.log() < ratio
    accepted = passed.cumprod(1).sum(1)
    everyone = torch.arange(len(lengths))
    here = p.select(asked.index[everyone, accepted])
    last = here.sample(chains.numbers(Purpose.NEXT, everyone, accepted))
    refused = (accepted < lengths).nonzero()[:, 0]
    if q is not None and len(refused):
        at = accepted[refused]
        numbers = chains.numbers(Purpose.NEXT, refused, at)
        q_refused = q.select(drafted.index[refused, at])
        last[refused] = here.select(refused).residual(q_refused, states[refused, at + 1], numbers)
    states[everyone, accepted + 1] = last
    return ProcessRound(states[:, 1:], accepted, lengths, betas)


@dataclass(frozen=True, slots=True)
class _Places:
    """The (row, steps ahead) of each entry of a flat batch; `index` (rows, width) holds the entry of each pair."""

    rows: Tensor
    ahead: Tensor
    index: Tensor

    @staticmethod
    def of(mask: Tensor) -> _Places:
        ahead, rows = mask.T.nonzero(as_tuple=True)
        index = torch.zeros(mask.shape, dtype=torch.long)
        index[rows, ahead] = torch.arange(len(rows))
        return _Places(rows, ahead, index)

    @property
    def shape(self) -> torch.Size:
        return self.index.shape


def _draft(draft: Kernel, chains: Chains, lengths: Tensor) -> tuple[Tensor, Laws | None, _Places]:
    """Draft states -> (rows, gamma + 2, *state), from the present one on, with room for one more; laws, places."""
    drafted = _Places.of(torch.arange(int(lengths.max())) < lengths[:, None])
    width = drafted.shape[1]
    states = chains.states.unsqueeze(1).repeat_interleave(width + 2, 1)
    laws = list[Laws]()
    for step in range(width):
        rows = (lengths > step).nonzero()[:, 0]
        laws.append(draft(states[rows, step], chains.times[rows] + step))
        states[rows, step + 1] = laws[-1].sample(chains.numbers(Purpose.DRAFT, rows, step))
    return states, (laws[0].join(laws[1:]) if laws else None), drafted


def _ratio(p: Laws, q: Laws, states: Tensor) -> Tensor:
    """Return log p/q at states that were drawn from q, (rows,), float64."""
    ratio = (p.log_density(states) - q.log_density(states)).double().cpu()
    if bool(ratio.isnan().any()):
        raise FloatingPointError(
            "the distribution of a next state is not a number: target or draft diverged (a smaller step may help)."
        )
    return ratio
