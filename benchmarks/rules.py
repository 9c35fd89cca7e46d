"""Compares how many tokens acceptance rules keep, measured on prompts or computed exactly on random distributions.

python benchmarks/rules.py PROMPTS.jsonl[.gz] [--target DIR --draft DIR] [--temperature 1.0] [--gamma 5] [--json]
python benchmarks/rules.py PROMPTS.jsonl[.gz] --nodes 12     several paths and trees, 12 scored nodes each
python benchmarks/rules.py --tables 200                      the same with 6 nodes, by enumeration

Figures are differences from the first rule, paired by prompt (or table), with a 95 % bootstrap interval.
"""

import argparse
import json
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Any

import torch

import slipstream
from slipstream.check.enumeration import Processes, after, drafts, outcomes
from slipstream.core.draft import Draft, ancestors
from slipstream.core.law import Law
from slipstream.core.stats import Stats
from slipstream.decoding.rules import rule
from slipstream.drafters.tree import tree_parents
from slipstream.engine.engine import Engine
from slipstream.text.prompts import gather

RULES = ("token", "block", "match", "coupled")
TABLE_NODES, TABLE_VOCAB = 6, 4
LIKE_TARGET = 0.25  # the weight of p in the draft's q on random tables


@dataclass(frozen=True)
class Side:
    """A rule and the shape of the drafts that it verifies: the candidates per level of a tree.

    For a rule on several paths, the first number is that of the paths, which are drawn independently.
    """

    verify: str
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        """The rule's name, with the tree if there is one."""
        tree = max(self.shape) > 1 and not rule(self.verify).paths
        return f"{self.verify}, tree {','.join(map(str, self.shape))}" if tree else f"{self.verify}, gamma {self.depth}"

    @property
    def depth(self) -> int:
        """The number of tokens of one path."""
        return len(self.shape)

    @property
    def how(self) -> dict[str, Any]:
        """The arguments for `slipstream.load`."""
        chain = max(self.shape) == 1 or rule(self.verify).paths
        return {"verify": self.verify, **({"gamma": self.depth} if chain else {"tree": self.shape})}


def sides(nodes: int) -> list[Side]:
    """Return a chain and then several paths and trees, all with this number of nodes."""
    compared = [Side("block", (1,) * nodes)]
    for width in (2, 3, 4):
        if nodes % width == 0:
            shape = (width, *(1,) * (nodes // width - 1))
            compared += [Side("token", shape), Side("block", shape), Side(f"gbv:{width}", shape)]
    bushes = [shape for shape in ((2, 2), (3, 3), (4, 2), (3, 2, 1)) if sum(accumulate(shape, mul)) == nodes]
    return compared + [Side("block", shape) for shape in bushes]


def main() -> None:
    args = arguments()
    if args.tables:
        report = {"tables": args.tables, "nodes": TABLE_NODES, "rows": exactly(args.tables)}
    elif not args.prompts:
        raise SystemExit("give a file of prompts, or --tables N to compute on random tables.")
    else:
        report = measured(args)
    if args.json:
        print(json.dumps({**vars(args), **report}))
        return
    for line in report["rows"]:
        low, high = line["interval"]
        rest = f"   alpha {line['alpha']:.3f}" if "alpha" in line else ""
        print(
            f"{line['rule']:28} mean acceptance length {line['mean_acceptance_length']:.3f}   "
            f"against the first {line['difference']:+.3f} [{low:+.3f}, {high:+.3f}]{rest}"
        )


# ---- measured ---------------------------------------------------------------------------------------------------


def measured(args: argparse.Namespace) -> dict[str, Any]:
    """Measure every rule on the prompts, and compare it with the first."""
    prompts = [item.prompt for item in gather([], args.prompts, False)][: args.limit]
    if args.nodes:
        runs = {}
        for side in sides(args.nodes):
            engine = slipstream.load(args.target, args.draft, **side.how)
            runs[side.name] = measure(engine, prompts, side.verify, args)
    else:
        how = {"tree": args.tree} if args.tree else {"gamma": args.gamma}
        engine = slipstream.load(args.target, args.draft, **how)
        runs = {name: measure(engine, prompts, name, args) for name in RULES}
    base = next(iter(runs.values()))
    return {"prompts": len(prompts), "rows": [row(name, stats, base) for name, stats in runs.items()]}


def measure(engine: Engine, prompts: Sequence[str], rule: str, args: argparse.Namespace) -> list[Stats]:
    """Decode all prompts with a rule -> statistics per prompt, summed over seeds."""
    settings = {"max_new_tokens": args.max_new_tokens, "temperature": args.temperature, "verify": rule}
    runs = [engine.generate(prompts, seed=seed, **settings) for seed in range(args.seeds)]
    return [sum((completion.stats for completion in column), Stats()) for column in zip(*runs, strict=True)]


def row(name: str, stats: Sequence[Stats], base: Sequence[Stats]) -> dict[str, Any]:
    """Return the figures of a rule; `base` are the first rule's statistics for the same prompts."""
    pairs = list(zip(stats, base, strict=True))
    rng = random.Random(0)
    draws = sorted(difference(rng.choices(pairs, k=len(pairs))) for _ in range(2000))
    total = sum(stats, Stats())
    return {
        "rule": name,
        "alpha": total.alpha,
        "mean_acceptance_length": total.mean_acceptance_length,
        "difference": difference(pairs),
        "interval": (draws[50], draws[-50]),
        "better_prompts": statistics.mean(a.target_calls / a.emitted < b.target_calls / b.emitted for a, b in pairs),
    }


def difference(pairs: Sequence[tuple[Stats, Stats]]) -> float:
    """Return the pooled mean acceptance length of a rule minus that of the first rule."""
    length, first_length = (sum(column, Stats()).mean_acceptance_length or 0 for column in zip(*pairs, strict=True))
    return length - first_length


# ---- computed ---------------------------------------------------------------------------------------------------


def exactly(tables: int) -> list[dict[str, Any]]:
    """Compute the expected tokens of one round, exactly for every table, and their mean over tables."""
    contenders = sides(TABLE_NODES)
    lengths = [[1 + expected(side, table(seed, side.depth)) for side in contenders] for seed in range(tables)]
    lines, rng = [], random.Random(0)
    for side, own in zip(contenders, zip(*lengths, strict=True), strict=True):
        gaps = [mine - first[0] for mine, first in zip(own, lengths, strict=True)]
        draws = sorted(statistics.mean(rng.choices(gaps, k=tables)) for _ in range(2000))
        lines.append(
            {
                "rule": side.name,
                "mean_acceptance_length": statistics.mean(own),
                "difference": statistics.mean(gaps),
                "interval": (draws[50], draws[-50]),
                "better_tables": statistics.mean(gap > 0 for gap in gaps),
            }
        )
    return lines


def table(seed: int, depth: int) -> Processes:
    """Return random laws after every text of up to `depth` tokens: p from a flat Dirichlet distribution, q partly p."""
    p, q = list[torch.Tensor](), list[torch.Tensor]()
    for length in range(depth + 1):
        rng = torch.Generator().manual_seed(1000 * seed + length)
        shape = (1, *(TABLE_VOCAB,) * (length + 1))
        one, other = (-torch.rand(shape, generator=rng, dtype=torch.float64).log() for _ in range(2))
        p.append(one / one.sum(-1, keepdim=True))
        q.append(LIKE_TARGET * p[-1] + (1 - LIKE_TARGET) * other / other.sum(-1, keepdim=True))
    return Processes(p, q[:depth], False)


def expected(side: Side, process: Processes) -> float:
    """Return the expected number of accepted tokens, by enumerating every draft and every outcome of verification."""
    chosen = rule(side.verify)
    chain, independent = max(side.shape) == 1, bool(chosen.paths)
    parents = tuple(range(-1, side.depth - 1)) if chain else tree_parents(side.shape)[0]
    lines = ancestors(parents)
    owners, tokens, weights = drafts(process, lines, independent)
    p = torch.stack([after(process.p[len(line)], owners, tokens, line) for line in ((), *lines)], 1)
    q = torch.stack([after(process.q[len(line) - 1], owners, tokens, line[:-1]) for line in lines], 1)
    lengths = (len(lines),) * len(tokens)
    draft = Draft(tokens, Law(probs=q), lengths, parents=None if chain else parents, replacement=independent)
    verdicts = outcomes(lambda draw: chosen.verify(Law(probs=p), draft, draw))
    return float(sum((verdict.accepted * chance * weights).sum() for verdict, chance in verdicts))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", nargs="?", help="a file of prompts, one per line or JSON lines")
    parser.add_argument("--target")
    parser.add_argument("--draft")
    parser.add_argument("--gamma", type=int, default=5)
    parser.add_argument("--tree", type=int, nargs="*")
    parser.add_argument("--nodes", type=int, help="compare chains, paths and trees with this number of nodes")
    parser.add_argument("--tables", type=int, help="compute on this number of random tables instead")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--limit", type=int, default=164)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
