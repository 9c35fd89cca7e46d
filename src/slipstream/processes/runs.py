"""Runs of many independent chains, each advancing at its own pace, and the statistics of their rounds."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.core.stats import Stats
from slipstream.core.values import whole_number
from slipstream.processes.laws import Laws
from slipstream.processes.rounds import Chains, Kernel, ProcessRound, play_round

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
            cuts = self._cut(round)
            rows, ahead = (torch.arange(round.path.shape[1]) < cuts.abs()[:, None]).nonzero(as_tuple=True)
            states = round.path[rows, ahead]
            if states.is_floating_point() and not bool(states.isfinite().all()):
                raise FloatingPointError("a state is not finite: the target diverged (a smaller step may help).")
            trajectories[chains.names[rows], chains.times[rows] + ahead + 1] = states
            made[names] += cuts.abs()
            goal[names[cuts < 0]] = made[names[cuts < 0]]
            stats += _count(round, cuts.abs())
            if watch:
                watch(round)
        places = torch.minimum(torch.arange(steps + 1), made[:, None])  # chains that ended early keep their last state
        return Run(trajectories[torch.arange(len(made))[:, None], places], made, stats)

    def _cut(self, round: ProcessRound) -> Tensor:
        """Return how many states of the path each chain takes (rows,), negative if the last of them ends it."""
        new = round.accepted + 1
        if self.ended is None:
            return new
        rows, width = round.path.shape[:2]
        over = self.ended(round.path.flatten(0, 1)).reshape(rows, width) & (torch.arange(width) < new[:, None])
        return torch.where(over.any(1), -(over.long().argmax(1) + 1), new)


def simulate(
    target: Kernel, starts: Tensor, steps: int, seed: int = 0, ended: Callable[[Tensor], Tensor] | None = None
) -> Run:
    """Run chains without a draft, with one call of f per step. Arguments and errors as of `Speculation.run`."""
    return Speculation(target, target, 0, ended).run(starts, steps, seed)


def _count(round: ProcessRound, taken: Tensor) -> Stats:
    """Count a round of which chains took this many states (rows,); states that were cut do not count."""
    accepted, width = torch.minimum(round.accepted, taken), round.betas.shape[1]
    tested = torch.minimum(torch.minimum(round.accepted + 1, round.lengths), taken)
    places = torch.arange(width)
    return Stats(
        emitted=int(taken.sum()),
        accepted=int(accepted.sum()),
        drafted=int(round.lengths.sum()),
        tested=int(tested.sum()),
        beta=float(round.betas[places < tested[:, None]].sum()),
        target_calls=len(taken),
        drafted_by_position=[int((round.lengths > place).sum()) for place in range(width)],
        accepted_by_position=[int((accepted > place).sum()) for place in range(width)],
    )


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
