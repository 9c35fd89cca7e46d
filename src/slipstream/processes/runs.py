"""Rounds of speculative execution, Algorithm 1 of arXiv 2211.17192 for any law of the next state, and runs of them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.core.draws import Purpose
from slipstream.core.stats import Stats
from slipstream.core.values import whole_number
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
    f is called once, with sum(lengths) + rows states. Raises FloatingPointError if a law is not a number."""
    states, q, drafted = _draft(draft, chains, lengths)
    asked = _Places.of(torch.arange(states.shape[1] - 1) <= lengths[:, None])
    p = target(states[asked.rows, asked.ahead], chains.times[asked.rows] + asked.ahead)
    betas, passed = torch.zeros(drafted.shape, dtype=torch.float64), torch.zeros(drafted.shape, dtype=torch.bool)
    if q is not None:
        p_drafted, new = p.select(asked.index[drafted.rows, drafted.ahead]), states[drafted.rows, drafted.ahead + 1]
        ratio = (p_drafted.log_density(new) - q.log_density(new)).double().cpu()
        if bool(ratio.isnan().any()):
            raise FloatingPointError(
                "the distribution of a next state is not a number: target or draft diverged (a smaller step may help)."
            )
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


Watch = Callable[[ProcessRound], object]  # a function that receives every round of a run


@dataclass(frozen=True, slots=True)
class Run:
    """The trajectories (chains, steps + 1, *state) from the starts on, the steps of each (chains,), and the statistics.

    A chain that ended early keeps its last state. In `stats` a state counts as a token, and a call of f once for each
    chain that it serves.
    """

    trajectories: Tensor
    steps: Tensor
    stats: Stats


@dataclass(frozen=True, slots=True)
class Speculation:
    """Speculative execution of x_{t+1} ~ f(x_t): the law of trajectories is that of f, for any draft f'.

    `target` is f and `draft` f' (see `Kernel`); `gamma` steps are drafted per round. `ended` returns for states
    (rows, *state) which of them end a chain, (rows,) bool. Raises ValueError unless gamma is a whole number from 0 up.
    """

    target: Kernel
    draft: Kernel
    gamma: int
    ended: Callable[[Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        whole_number("gamma", self.gamma, 0)

    def run(self, starts: Tensor, steps: int, seed: int = 0, watch: Watch | None = None) -> Run:
        """Run chains of `steps` steps from `starts` (chains, *state); equal seeds give equal runs, chain by chain.

        A chain does not depend on the other chains of the run, as long as f and f' do not. Raises ValueError for no
        chains or steps below 1, FloatingPointError if a law or a state is not a number.
        """
        whole_number("steps", steps, 1)
        if starts.ndim < 1 or len(starts) == 0:
            raise ValueError(f"starts of shape {tuple(starts.shape)} are not possible: give (chains, *state).")
        made = torch.zeros(len(starts), dtype=torch.long)
        goal = torch.full_like(made, steps)
        trajectories = starts.unsqueeze(1).repeat_interleave(steps + 1, 1)
        stats = Stats()
        while len(names := (made < goal).nonzero()[:, 0]):
            chains = Chains(seed, names, trajectories[names, made[names]], made[names])
            lengths = (goal[names] - made[names] - 1).clamp(max=self.gamma)
            round = play_round(self.target, self.draft, chains, lengths)
            cuts = round.accepted + 1  # the states of the path that each chain takes, negative if the last ends it
            if self.ended is not None:
                over = self.ended(round.path.flatten(0, 1)).reshape(round.path.shape[:2])
                over &= torch.arange(round.path.shape[1]) < cuts[:, None]
                cuts = torch.where(over.any(1), -(over.long().argmax(1) + 1), cuts)
            rows, ahead = (torch.arange(round.path.shape[1]) < cuts.abs()[:, None]).nonzero(as_tuple=True)
            states = round.path[rows, ahead]
            if states.is_floating_point() and not bool(states.isfinite().all()):
                raise FloatingPointError("a state is not finite: the target diverged (a smaller step may help).")
            trajectories[chains.names[rows], chains.times[rows] + ahead + 1] = states
            made[names] += cuts.abs()
            goal[names[cuts < 0]] = made[names[cuts < 0]]
            # States that were cut do not count.
            taken, width = cuts.abs(), round.betas.shape[1]
            accepted, steps_ahead = torch.minimum(round.accepted, taken), torch.arange(width)
            tested = torch.minimum(torch.minimum(round.accepted + 1, round.lengths), taken)
            stats += Stats(
                emitted=int(taken.sum()),
                accepted=int(accepted.sum()),
                drafted=int(round.lengths.sum()),
                tested=int(tested.sum()),
                beta=float(round.betas[steps_ahead < tested[:, None]].sum()),
                target_calls=len(taken),
                drafted_by_position=[int((round.lengths > place).sum()) for place in range(width)],
                accepted_by_position=[int((accepted > place).sum()) for place in range(width)],
            )
            if watch:
                watch(round)
        places = torch.minimum(torch.arange(steps + 1), made[:, None])  # chains that ended early keep their last state
        return Run(trajectories[torch.arange(len(made))[:, None], places], made, stats)


def simulate(
    target: Kernel, starts: Tensor, steps: int, seed: int = 0, ended: Callable[[Tensor], Tensor] | None = None
) -> Run:
    """Run chains without a draft, with one call of f per step. Arguments and errors as of `Speculation.run`."""
    return Speculation(target, target, 0, ended).run(starts, steps, seed)


@dataclass(frozen=True, slots=True)
class Pooled:
    """A kernel that calls f for parts of the states in the workers of a pool of threads or processes.

    Threads help if f waits or releases Python's lock (torch, numpy, a simulator that is another program); for processes
    f must be picklable. The caller closes the pool. Raises ValueError for workers below 1.
    """

    kernel: Kernel
    pool: Executor
    workers: int

    def __post_init__(self) -> None:
        whole_number("workers", self.workers, 1)

    def __call__(self, states: Tensor, times: Tensor) -> Laws:
        parts = min(self.workers, len(states))
        laws = list(self.pool.map(self.kernel, states.tensor_split(parts), times.tensor_split(parts)))
        return laws[0].join(laws[1:])
