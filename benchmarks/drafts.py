"""Compares drafts on files of prompts: acceptance by position, time per drafted token, and speed over plain decoding.

python benchmarks/drafts.py PROMPTS.jsonl ... --draft lookup --draft exit:4 --draft heads:DIR [--gamma 3] [--target DIR]

Every repetition runs plain decoding and each draft once, in an order that rotates; ratios are taken in a repetition,
and the median over repetitions is printed. Speed is emitted tokens per second, prefill excluded, all prompts of a file
pooled. Without --target: the embedded one, in float32.
"""

import argparse
import json
import sys
from dataclasses import replace
from functools import reduce
from operator import add
from pathlib import Path
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

Field = list[tuple[str, int, Decoder]]  # plain decoding, and each draft with each gamma


def pooled(decoder: Decoder, requests: list[Request]) -> Stats:
    """Decode all requests once -> statistics summed over rows."""
    return reduce(add, [row.stats for row in generate(decoder, requests)], Stats())


def laps(field: Field, requests: list[Request], repetitions: int) -> list[list[Stats]]:
    """Run every contender once in each lap -> their statistics, lap by lap."""
    for _, _, decoder in field:  # warm up, so that no contender is timed on its first call
        pooled(decoder, requests[:1])
    found = []
    for lap in range(repetitions):
        order = [(place + lap) % len(field) for place in range(len(field))]
        runs = {place: pooled(field[place][2], requests) for place in order}
        found.append([runs[place] for place in range(len(field))])
        print(f"lap {lap + 1} of {repetitions}", file=sys.stderr, flush=True)
    return found


def figures(runs: list[Stats], plain: list[Stats]) -> dict[str, Any]:
    first, speeds = runs[0], [run.tokens_per_second or 0.0 for run in runs]
    ratios = [speed / (other.tokens_per_second or 1.0) for speed, other in zip(speeds, plain, strict=True)]
    return {
        "alpha": first.alpha,
        "by_position": first.acceptance_by_position,
        "mean_acceptance_length": first.mean_acceptance_length,
        "ms_per_drafted_token": 1000 * first.seconds["draft"] / first.drafted if first.drafted else None,
        "tokens_per_second": median(speeds),
        "over_plain": median(ratios),
        "range": [min(ratios), max(ratios)],
    }


def shown(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(f"{each:.2f}" for each in value)
    return "-" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


def main() -> None:
    args = arguments()
    engine = load(args.target or EMBEDDED / "target", dtype="float32", batch_size=args.batch)
    field: Field = [("plain", 0, replace(engine.decoder, drafter=NoDraft(), controller=Fixed(0)))]
    for draft in args.draft:
        own = drafter(draft, BuildContext(engine.decoder.target, dtype="float32"))
        field += [(draft, gamma, replace(engine.decoder, drafter=own, controller=Fixed(gamma))) for gamma in args.gamma]
    for file in args.prompts:
        ids = [engine.encode(item.prompt) for item in gather([], file, False)[: args.count]]
        for temperature in args.temperature:
            sampler = Sampling(temperature=temperature)
            requests = [Request(one, sampler, args.max_new_tokens, engine.eos, 0, request_key(one)) for one in ids]
            found = laps(field, requests, args.repetitions)
            for (draft, gamma, _), runs in zip(field, zip(*found, strict=True), strict=True):
                about = {"work": Path(file).name.partition(".")[0], "temperature": temperature}
                line = {**about, "draft": draft, "gamma": gamma, **figures(list(runs), [lap[0] for lap in found])}
                print(json.dumps(line) if args.json else f"| {' | '.join(map(shown, line.values()))} |", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", nargs="+", help="files of prompts, as for `slipstream generate --prompts`")
    parser.add_argument("--count", type=int, default=16, help="prompts of each file to use")
    parser.add_argument("--target", help="hub name or folder")
    parser.add_argument("--draft", action="append", required=True)
    parser.add_argument("--gamma", type=int, nargs="+", default=[5])
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0])
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
