"""Compares passes by a program with eager ones: processor time of one thread, by rows that are fed at once.

python benchmarks/programs.py [MODEL ...] [--tokens 1 6 40] [--json FILE]

Both run in turns in one process, on the same weights and cache, after a text of 40 tokens; times are medians. `record`
is the time to make and compare the program. Without a model, those that ship with the package are measured.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from levels import processor

from slipstream.models.causal import CausalScorer
from slipstream.models.loading.load import load_scorer
from slipstream.models.loading.pairings import EMBEDDED

PAST, LAPS, REPEATED = 40, 15, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=[str(EMBEDDED / name) for name in ("draft", "target")])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 6, 40])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = {"processor": processor(), "models": [measured(model, args.tokens) for model in args.models]}
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    print(f"| model | record, s | {' | '.join(f'{n} tokens: eager, program, ms' for n in args.tokens)} |")
    print(f"|{'---|' * (2 + len(args.tokens))}")
    for each in found["models"]:
        cells = (f"{pair['eager']:.2f}, **{pair['program']:.2f}**" for pair in each["ms"].values())
        print(f"| {each['model']} | {each['record']:.2f} | {' | '.join(cells)} |")
    print(f"\n*{found['processor']}, one thread, processor time: `python benchmarks/programs.py`.*")


def measured(model: str, counts: list[int]) -> dict[str, Any]:
    """Return what passes of a model take, in milliseconds, by the number of tokens that are fed."""
    fast = load_scorer(model, device="cpu")
    began = time.process_time()
    remade = CausalScorer(fast.model, execution=fast.execution.of(fast.model, fast.name))
    record, scorers = time.process_time() - began, {"eager": CausalScorer(fast.model), "program": remade}
    torch.set_num_threads(1)  # loading may have chosen another number
    for scorer in scorers.values():
        scorer.add(1)
        scorer.prefill([[place % 97 + 3 for place in range(PAST)]])
    return {
        "model": Path(model).stem,
        "record": record,
        "ms": {count: {name: 1000 * took for name, took in laps(scorers, count).items()} for count in counts},
    }


def laps(scorers: dict[str, Any], count: int) -> dict[str, float]:
    """Return the medians of both, in turns."""
    times: dict[str, list[float]] = {name: [] for name in scorers}
    for _ in range(LAPS):
        for name, scorer in scorers.items():
            times[name].append(timed(lambda: step(scorer, count)))  # noqa: B023 - called at once
    return {name: median(each) for name, each in times.items()}


def timed(work: Callable[[], None]) -> float:
    began = time.process_time()
    for _ in range(REPEATED):
        work()
    return (time.process_time() - began) / REPEATED


def step(scorer: Any, count: int) -> None:
    scorer.extend(torch.arange(10, 10 + count)[None], [count])
    scorer.rollback([PAST])


if __name__ == "__main__":
    main()
