"""Langevin dynamics of a Lennard-Jones cluster: the force of near neighbours drafts for the force of all pairs.

python examples/langevin.py --plot build/langevin.png
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor

from slipstream.processes import Gaussian, Kernel, Run, Speculation, simulate

STEP, TEMPERATURE = 5e-4, 0.3
CUTOFF = 1.6  # the distance, in diameters of an atom, beyond which the cheap force is zero
START = torch.tensor([[0, 0], [1.1, 0], [0.55, 0.95], [-0.55, 0.95], [-1.1, 0], [-0.55, -0.95], [0.55, -0.95]]).double()


def forces(atoms: Tensor, cutoff: float) -> Tensor:
    """Return the forces on atoms (rows, atoms, 2) by the potential 4 (r^-12 - r^-6) of pairs within the cutoff."""
    between = atoms.unsqueeze(2) - atoms.unsqueeze(1)
    squared = between.square().sum(-1) + torch.eye(atoms.shape[1]) * 1e6  # no atom acts on itself
    strength = (48 * squared**-7 - 24 * squared**-4) * (squared < cutoff**2)
    return (strength.unsqueeze(-1) * between).sum(2)


def steps(cutoff: float) -> Kernel:
    """Return the step of the dynamics with forces up to a cutoff: x + h F(x) and Gaussian noise."""
    return lambda atoms, times: Gaussian(atoms + STEP * forces(atoms, cutoff), (2 * STEP * TEMPERATURE) ** 0.5)


def run(chains: int, length: int, gamma: int, seed: int = 0) -> Run:
    """Simulate clusters from the same start; gamma 0 uses no draft."""
    starts, exact = START.expand(chains, *START.shape), steps(float("inf"))
    if not gamma:
        return simulate(exact, starts, length, seed)
    return Speculation(exact, steps(CUTOFF), gamma).run(starts, length, seed)


def radius(trajectories: Tensor) -> Tensor:
    """Return the radius of gyration along trajectories (chains, steps + 1, atoms, 2) -> (chains, steps + 1)."""
    return (trajectories - trajectories.mean(-2, keepdim=True)).square().sum(-1).mean(-1).sqrt()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    drafted = run(200, 400, gamma=8)
    print(f"alpha {drafted.stats.alpha:.3f}, {drafted.stats.mean_acceptance_length:.2f} steps per call of the force")
    if args.plot:
        from matplotlib.figure import Figure

        axes = (figure := Figure(layout="constrained")).subplots()
        for label, clusters in {"drafted": drafted, "direct": run(200, 400, gamma=0, seed=1)}.items():
            axes.plot(radius(clusters.trajectories).mean(0), label=label)
        axes.set(xlabel="step", ylabel="mean radius of gyration")
        axes.legend()
        figure.savefig(args.plot)
