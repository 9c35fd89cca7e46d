"""Rollouts of a random policy in gymnasium's cart-pole with wind: a learned, linear simulator drafts for the real one.

python examples/cartpole.py --plot build/cartpole.png
"""

import argparse
from pathlib import Path

import gymnasium
import numpy as np
import torch
from torch import Tensor

from slipstream.processes import Kernel, Mixture, Run, Speculation, simulate

# Standard deviations of position, velocity, angle and angular velocity.
WIND = torch.tensor([2e-3, 2e-2, 2e-3, 2e-2], dtype=torch.float64)
BOUNDS = torch.tensor([2.4, float("inf"), 0.2095, float("inf")])  # where gymnasium ends an episode
environment = gymnasium.make("CartPole-v1").unwrapped


def simulator(states: Tensor, action: int) -> Tensor:
    """Return the environment's next states (rows, 4), computed one after the other: the slow simulator."""
    next_states = []
    for state in states.tolist():
        environment.reset()
        environment.state = tuple(state)
        environment.step(action)
        next_states.append(environment.state)
    return torch.from_numpy(np.array(next_states, dtype=np.float64))


def learned(seed: int = 0, count: int = 500):
    """Fit a linear model of the simulator, by least squares on transitions from random states."""
    numbers = torch.rand(count, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    states = (numbers - 0.5) * torch.tensor([4, 4, 0.4, 4])
    ones = torch.ones(count, 1, dtype=torch.float64)
    fits = [torch.linalg.lstsq(torch.cat([states, ones], 1), simulator(states, a)).solution for a in (0, 1)]
    return lambda x, action: x @ fits[action][:4] + fits[action][4]


def rollout(model) -> Kernel:
    """Return a step of a rollout: a mixture over both actions, with wind after each.

    The policy is random, and more likely to push to the side to which the pole falls.
    """

    def law(states: Tensor, times: Tensor) -> Mixture:
        right = torch.sigmoid(8 * states[:, 2] + states[:, 3])
        means = torch.stack([model(states, 0), model(states, 1)], 1)
        return Mixture(torch.stack([1 - right, right], 1), means, WIND.expand_as(means))

    return law


def fallen(states: Tensor) -> Tensor:
    """Return which states (rows, 4) end an episode, (rows,)."""
    return (states.abs() > BOUNDS).any(-1)


def episodes(count: int, length: int, gamma: int, seed: int = 0) -> Run:
    """Run episodes that start at rest; gamma 0 uses no draft."""
    starts, real = torch.zeros(count, 4, dtype=torch.float64), rollout(simulator)
    if not gamma:
        return simulate(real, starts, length, seed, fallen)
    return Speculation(real, rollout(learned()), gamma, fallen).run(starts, length, seed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    drafted = episodes(100, 200, gamma=6)
    stats = drafted.stats
    print(f"alpha {stats.alpha:.3f}, {stats.mean_acceptance_length:.2f} steps per call of the simulator")
    print(f"mean return {drafted.steps.double().mean():.1f}")
    if args.plot:
        from matplotlib.figure import Figure

        axes = (figure := Figure(layout="constrained")).subplots()
        axes.plot(drafted.trajectories[:20, :, 2].T, linewidth=0.7)
        axes.set(xlabel="step", ylabel="angle of the pole")
        figure.savefig(args.plot)
