"""Compares drafts on files of prompts: acceptance, time per drafted token, and speed.

python benchmarks/drafts.py PROMPTS.jsonl ... --draft lookup --draft "lookup|embedded" [--target DIR] [--json]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import slipstream
from slipstream.core.stats import Stats
from slipstream.engine.engine import Engine
from slipstream.text.prompts import gather

COLUMNS = ("alpha", "mean_acceptance_length", "ms_per_drafted_token", "tokens_per_second", "against_plain")


def main() -> None:
    args = arguments()
    works = {Path(file).name.partition(".")[0]: read(file, args) for file in args.prompts}
    for draft in args.draft:
        engine = slipstream.load(args.target, draft, gamma=args.gamma, batch_size=1)
        for work, prompts in works.items():
            for temperature in args.temperature:
                figures = measure(engine, prompts, temperature, args)
                line: dict[str, Any] = {"draft": draft, "work": work, "temperature": temperature, **figures}
                cells = " ".join(f"{name} {'-' if (x := line[name]) is None else f'{x:.2f}'}" for name in COLUMNS)
                print(json.dumps(line) if args.json else f"{work:12} t={temperature:g} {draft:34} {cells}", flush=True)


def read(file: str, args: argparse.Namespace) -> list[Any]:
    """Return the first prompts of a file."""
    return [item.prompt for item in gather([], file, False)][: args.limit]


def measure(engine: Engine, prompts: Sequence[Any], temperature: float, args: argparse.Namespace) -> dict[str, Any]:
    """Return figures pooled over prompts; plain and speculative decoding take turns, after a warm-up."""
    settings = {"max_new_tokens": args.max_new_tokens, "temperature": temperature, "ignore_eos": True}
    engine.generate(prompts[0], **{**settings, "max_new_tokens": 8})
    drafted, plain = Stats(), Stats()
    for prompt in prompts:
        plain += engine.generate(prompt, plain=True, **settings)[0].stats
        drafted += engine.generate(prompt, **settings)[0].stats
    speeds = drafted.tokens_per_second or 0, plain.tokens_per_second or 0
    return {
        "alpha": drafted.alpha,
        "mean_acceptance_length": drafted.mean_acceptance_length,
        "ms_per_drafted_token": 1000 * drafted.seconds["draft"] / drafted.drafted if drafted.drafted else None,
        "tokens_per_second": speeds[0],
        "plain_tokens_per_second": speeds[1],
        "against_plain": speeds[0] / speeds[1],
    }


def arguments() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", nargs="+")
    parser.add_argument("--draft", action="append", required=True)
    parser.add_argument("--target")
    parser.add_argument("--gamma", type=int, default=5)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--limit", type=int, default=5)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
