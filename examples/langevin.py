"""Langevin dynamics of a Lennard-Jones cluster: all pairs are the expensive force, nearest neighbours the cheap one.

python examples/langevin.py --plot build/langevin.png
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor

from slipstream.processes import Gaussian, Kernel, Run, Speculation, simulate

STEP, TEMPERATURE = 5e-4, 0.3
CUTOFF = 1.6  # in diameters of an atom: beyond, the cheap force is none
START = torch.tensor([[0, 0], [1.1, 0], [0.55, 0.95], [-0.55, 0.95], [-1.1, 0], [-0.55, -0.95], [0.55, -0.95]]).double()


def forces(atoms: Tensor, cutoff: float) -> Tensor:
    """Forces of the potential 4 (r^-12 - r^-6) between atoms (rows, atoms, 2), with no pair beyond the cutoff."""
    between = atoms.unsqueeze(2) - atoms.unsqueeze(1)
    squared = between.square().sum(-1) + torch.eye(atoms.shape[1]) * 1e6  # no atom acts on itself
    strength = (48 * squared**-7 - 24 * squared**-4) * (squared < cutoff**2)
    return (strength.unsqueeze(-1) * between).sum(2)


def steps(cutoff: float) -> Kernel:
    """x + h F(x) and noise: one law per cluster."""
    return lambda atoms, times: Gaussian(atoms + STEP * forces(atoms, cutoff), (2 * STEP * TEMPERATURE) ** 0.5)


def run(chains: int, length: int, gamma: int, seed: int = 0) -> Run:
    """Clusters from the same start; gamma 0 simulates them directly."""
    starts, exact = START.expand(chains, *START.shape), steps(float("inf"))
    if not gamma:
        return simulate(exact, starts, length, seed)
    return Speculation(exact, steps(CUTOFF), gamma).run(starts, length, seed)


def radius(trajectories: Tensor) -> Tensor:
    """The radius of gyration along trajectories (chains, steps + 1, atoms, 2)."""
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
        for label, found in {"drafted": drafted, "direct": run(200, 400, gamma=0, seed=1)}.items():
            axes.plot(radius(found.trajectories).mean(0), label=label)
        axes.set(xlabel="step", ylabel="mean radius of gyration")
        axes.legend()
        figure.savefig(args.plot)
