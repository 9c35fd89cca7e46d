"""Compares the measured speed-up of speculative execution of a Markov chain with the paper's model of it.

python benchmarks/processes.py [--wide 8000] [--steps 200] [--gammas 1 2 4 8] [--workers 1] [--json FILE]

f, the target, is a step of a chain in 8 dimensions whose force is a wide random network; f', the draft, uses a share of
its hidden units. There is one chain, so that f is bound by reading its weights, and gamma + 1 states cost little more
than one (--workers: a pool of threads divides the states). Costs are measured on states of the chain itself; acceptance
is counted in the run that is timed. Plain and drafted runs take turns, and medians are compared.
"""

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from slipstream.core.stats import Stats
from slipstream.processes import Costs, Gaussian, Kernel, Pooled, Run, Speculation, measure, simulate
from slipstream.text.jsontext import json_text

DIMENSIONS, STEP = 8, 0.05


def network(wide: int, share: float) -> Kernel:
    """Return a step by a random network of two hidden layers of `wide` units, of which the first `share` is used."""
    generator, used = torch.Generator().manual_seed(0), max(1, int(wide * share))
    into, between, out = (
        torch.randn(*shape, generator=generator) / shape[0] ** 0.5
        for shape in ((DIMENSIONS, wide), (wide, wide), (wide, DIMENSIONS))
    )
    # The weights grow, to make up for sums over fewer units.
    into, between, out = into[:, :used], between[:used, :used].contiguous() / share**0.5, out[:used] / share**0.5

    def step(x: Tensor, t: Tensor) -> Gaussian:
        force = torch.tanh(torch.tanh(x.float() @ into) @ between) @ out
        return Gaussian(x - STEP * (x + 0.5 * force.double()), (2 * STEP) ** 0.5)

    return step


def timed(run: Callable[[], Run]) -> tuple[float, Run]:
    """Do a run -> its seconds and its result."""
    start = time.perf_counter()
    result = run()
    return time.perf_counter() - start, result


def compare(kernels: tuple[Kernel, Kernel], gammas: list[int], steps: int, repeats: int) -> dict[str, object]:
    """Return the measured and the expected speed-up for each gamma, and the costs behind the latter."""
    target, draft = kernels
    start = torch.zeros(1, DIMENSIONS, dtype=torch.float64)
    states = simulate(target, start, max(gammas) + 1).trajectories[0, 1:]
    costs, seconds = measure(target, draft, states, max(gammas), 15), dict[int, list[float]]()
    stats = dict[int, Stats]()
    for seed in range(repeats):
        for gamma in (0, *gammas):
            spent, run = timed(lambda gamma=gamma, seed=seed: Speculation(target, draft, gamma).run(start, steps, seed))
            seconds.setdefault(gamma, []).append(spent)
            stats[gamma] = stats.get(gamma, Stats()) + run.stats
    rows = [row(gamma, seconds, stats[gamma], costs) for gamma in gammas]
    return {"seconds_of_f": costs.seconds, "c": costs.c, "curve": costs.curve, "rows": rows}


def row(gamma: int, seconds: dict[int, list[float]], stats: Stats, costs: Costs) -> dict[str, float | None]:
    """Return the figures of one gamma: acceptance, the measured speed-up, and the one by the paper's model."""
    measured = statistics.median(seconds[0]) / statistics.median(seconds[gamma])
    expected = costs.factor(stats, gamma)
    return {
        "gamma": gamma,
        "alpha": stats.alpha,
        "mean_acceptance_length": stats.mean_acceptance_length,
        "speed_up": measured,
        "expected": expected,
        "measured_over_expected": measured / expected,
    }


def machine() -> dict[str, object]:
    """Return the facts of the machine that the figures depend on."""
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wide", type=int, default=8000, help="hidden units of f")
    parser.add_argument("--share", type=float, default=0.1, help="the share of the hidden units that f' uses")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--gammas", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--workers", type=int, default=1, help="threads among which the states of f are divided")
    parser.add_argument("--json", type=Path, help="where the figures go")
    args = parser.parse_args()
    with ThreadPoolExecutor(args.workers) as pool:
        target = network(args.wide, 1.0)
        kernels = (Pooled(target, pool, args.workers) if args.workers > 1 else target, network(args.wide, args.share))
        report = compare(kernels, args.gammas, args.steps, args.repeats)
    print(f"f: {report['seconds_of_f'] * 1e3:.2f} ms, c {report['c']:.3f}")
    for each in report["rows"]:
        print("   ".join(f"{name} {value:.3f}" for name, value in each.items()))
    if args.json:
        settings = {name: value for name, value in vars(args).items() if name != "json"}
        args.json.write_text(json_text({"machine": machine(), "settings": settings, **report}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
