"""How many tokens each acceptance rule keeps on real prompts, paired by prompt, with a bootstrap interval.

python benchmarks/rules.py PROMPTS.jsonl[.gz] [--target DIR --draft DIR] [--temperature 1.0] [--gamma 5] [--json]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Sequence

import slipstream
from slipstream.core.stats import Stats
from slipstream.engine.engine import Engine
from slipstream.text.prompts import gather

RULES = ("token", "block", "match", "coupled")


def main() -> None:
    args = arguments()
    prompts = [item.prompt for item in gather([], args.prompts, False)][: args.limit]
    engine = slipstream.load(args.target, args.draft, gamma=args.gamma, tree=args.tree)
    stats = {rule: measure(engine, prompts, rule, args) for rule in RULES}
    rows = [row(rule, stats[rule], stats["token"]) for rule in RULES]
    if args.json:
        print(json.dumps({**vars(args), "prompts": len(prompts), "rows": rows}))
        return
    print(f"{len(prompts)} prompts x {args.seeds} seeds, gamma {args.gamma}, temperature {args.temperature}")
    for line in rows:
        low, high = line["interval"]
        print(
            f"{line['rule']:8} mean acceptance length {line['mean_acceptance_length']:.3f}   "
            f"against token {line['difference']:+.3f} [{low:+.3f}, {high:+.3f}]   alpha {line['alpha']:.3f}"
        )


def measure(engine: Engine, prompts: Sequence[str], rule: str, args: argparse.Namespace) -> list[Stats]:
    """Statistics per prompt, summed over seeds."""
    settings = {"max_new_tokens": args.max_new_tokens, "temperature": args.temperature, "verify": rule}
    runs = [engine.generate(prompts, seed=seed, **settings) for seed in range(args.seeds)]
    return [sum((completion.stats for completion in column), Stats()) for column in zip(*runs, strict=True)]


def row(rule: str, stats: Sequence[Stats], base: Sequence[Stats]) -> dict[str, object]:
    pairs = list(zip(stats, base, strict=True))
    rng = random.Random(0)
    draws = sorted(difference(rng.choices(pairs, k=len(pairs))) for _ in range(2000))
    total = sum(stats, Stats())
    return {
        "rule": rule,
        "alpha": total.alpha,
        "mean_acceptance_length": total.mean_acceptance_length,
        "difference": difference(pairs),
        "interval": (draws[50], draws[-50]),
        "better_prompts": statistics.mean(a.target_calls / a.emitted < b.target_calls / b.emitted for a, b in pairs),
    }


def difference(pairs: Sequence[tuple[Stats, Stats]]) -> float:
    """Pooled mean acceptance length of the rule minus that of token verification."""
    ours, theirs = (sum(column, Stats()).mean_acceptance_length or 0 for column in zip(*pairs, strict=True))
    return ours - theirs


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", help="a file of prompts, one per line or JSON lines")
    parser.add_argument("--target")
    parser.add_argument("--draft")
    parser.add_argument("--gamma", type=int, default=5)
    parser.add_argument("--tree", type=int, nargs="*")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--limit", type=int, default=164)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
