"""Measures drafts made by the target itself: acceptance by position, and speed over plain decoding in the same run.

python benchmarks/self_speculation.py --prompts FILE --draft exit:1 --draft exit:4 --draft heads:DIR --gamma 3

Every repetition runs plain decoding and each draft once, in an order that rotates; ratios are taken in a repetition,
and the median over repetitions is printed. Speed is emitted tokens per second, prefill excluded, all prompts pooled.
Without --target: the embedded one, in float32. Greedy unless --temperature is given.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import reduce
from operator import add
from statistics import median
from typing import Any

from slipstream.core.draws import request_key
from slipstream.core.request import Request
from slipstream.core.stats import Stats
from slipstream.decoding.controllers import Fixed
from slipstream.decoding.decoder import Decoder, NoDraft
from slipstream.decoding.generate import generate
from slipstream.decoding.sampling import Sampling
from slipstream.drafters.build_context import BuildContext
from slipstream.drafters.specification import drafter
from slipstream.engine.load import load
from slipstream.models.loading.pairings import EMBEDDED
from slipstream.text.prompts import gather

PLAIN = "plain"


def contenders(decoder: Decoder, drafts: list[str], gammas: list[int]) -> Iterator[tuple[str, int, Decoder]]:
    """Yield plain decoding, and each draft with each gamma."""
    yield PLAIN, 0, replace(decoder, drafter=NoDraft(), controller=Fixed(0))
    for draft in drafts:
        own = drafter(draft, BuildContext(decoder.target, dtype="float32"))
        yield from ((draft, gamma, replace(decoder, drafter=own, controller=Fixed(gamma))) for gamma in gammas)


def pooled(decoder: Decoder, requests: list[Request]) -> Stats:
    """Decode all requests once -> statistics summed over rows."""
    return reduce(add, [row.stats for row in generate(decoder, requests)], Stats())


def main() -> int:
    """Run the laps, and print a table or JSON lines."""
    args = _arguments()
    items = gather([], args.prompts, False)[: args.count]
    engine = load(args.target or EMBEDDED / "target", dtype="float32", batch_size=args.batch)
    sampler = Sampling(temperature=args.temperature)
    ids = [engine.encode(item.prompt) for item in items]
    requests = [Request(one, sampler, args.max_new_tokens, engine.eos, 0, request_key(one)) for one in ids]
    field = list(contenders(engine.decoder, args.draft, args.gamma))
    for _, _, decoder in field:  # warm up, so that no contender is timed on its first call
        pooled(decoder, requests[:1])
    laps: list[dict[int, Stats]] = []
    for lap in range(args.repetitions):
        order = [(place + lap) % len(field) for place in range(len(field))]
        laps.append({place: pooled(field[place][2], requests) for place in order})
        print(f"lap {lap + 1} of {args.repetitions}", file=sys.stderr, flush=True)
    for place, (name, gamma, _) in enumerate(field):
        print(_line(name, gamma, [lap[place] for lap in laps], [lap[0] for lap in laps], args.json))
    return 0


def _line(name: str, gamma: int, runs: list[Stats], plain: list[Stats], as_json: bool) -> str:
    def speed(stats: Stats) -> float:
        return stats.tokens_per_second or 0.0

    first = runs[0]
    ratios = [speed(run) / speed(other) for run, other in zip(runs, plain, strict=True)]
    figures: dict[str, Any] = {
        "draft": name,
        "gamma": gamma,
        "alpha": first.alpha,
        "by_position": first.acceptance_by_position,
        "mean_acceptance_length": first.mean_acceptance_length,
        "tokens_per_second": median(map(speed, runs)),
        "over_plain": median(ratios),
        "range": [min(ratios), max(ratios)],
    }
    if as_json:
        return json.dumps(figures)
    shares = " ".join(f"{share:.2f}" for share in first.acceptance_by_position)
    alpha = "-" if first.alpha is None else f"{first.alpha:.3f}"
    speeds = f"{figures['tokens_per_second']:.1f} | {figures['over_plain']:.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
    return f"| {name} | {gamma} | {alpha} | {shares or '-'} | {first.mean_acceptance_length or 0:.2f} | {speeds} |"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", required=True, help="a file of prompts, as for `slipstream generate --prompts`")
    parser.add_argument("--count", type=int, default=16, help="prompts to use")
    parser.add_argument("--target", help="hub name or folder")
    parser.add_argument("--draft", action="append", required=True)
    parser.add_argument("--gamma", type=int, action="append", required=True)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
