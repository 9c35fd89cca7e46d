"""Compares quantized targets and drafts with the same target in bfloat16, and with other programs; prints a table.

python benchmarks/quantized.py HumanEval.jsonl.gz --target build/target-134m --draft build/draft-24m --compile
                               [--target-precision bfloat16 int8 int4] [--json FILE] [--peers PEER.json ...]

A target of each precision decodes plainly, with the draft model in a precision of its own, and with its own weights
in 4 bits as the draft. All run in turns in one process, and speed is counted as in `slipstream bench`: new tokens /
seconds of the whole call. Targets that are measured by separate commands add up in the JSON file. `--peers` adds what
`benchmarks/peers/` measured on the same models and prompts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import slipstream
from slipstream.bench import BenchSettings, Contender, measure, ours
from slipstream.decoding.controllers import Fixed
from slipstream.decoding.decoder import NoDraft
from slipstream.engine.engine import Engine
from slipstream.measure.environment import environment
from slipstream.text.prompts import gather

PLAIN = "plain"
DRAFTS = {"bfloat16": ("model", "model in int8", "int4"), "int8": ("model in int8", "int4"), "int4": ("model in int8",)}
"""The drafts that are raced, by the precision of the target."""
CUT = "model in int8, cut"
"""The draft model with a vocabulary cut to the target's most frequent tokens, with --draft-vocab."""


def main() -> None:
    args = arguments()
    found: dict[str, Any] = json.loads(args.json.read_text()) if args.json and args.json.exists() else {"rows": []}
    if args.prompts:
        others = [row for row in found["rows"] if precision_of(row) not in args.target_precision]
        measured = raced(args)
        found |= {**measured, "rows": others + measured["rows"]}
    peers = {peer["peer"] + peer["how"]: peer for peer in found.get("peers", [])}
    peers |= {peer["peer"] + peer["how"]: peer for peer in (json.loads(path.read_text()) for path in args.peers)}
    found["peers"] = list(peers.values())
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    print(table(found))


def precision_of(row: dict[str, Any]) -> str:
    """Return the precision of a row's target."""
    return str(row["contender"]).partition(", ")[0]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", nargs="?", help="a file of prompts; without it the table of --json is printed")
    parser.add_argument("--target", default="build/target-134m")
    parser.add_argument("--draft", default="build/draft-24m")
    parser.add_argument("--target-precision", nargs="*", choices=DRAFTS, default=list(DRAFTS))
    parser.add_argument("--draft-vocab", help="also race a draft model cut to so many tokens: N, FILE or N:FILE")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--limit", type=int, default=8, help="prompts to use")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--gamma", type=int, nargs="*", default=[5])
    parser.add_argument("--temperature", type=float, nargs="*", default=[0.0, 1.0])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write what is measured to this file")
    parser.add_argument("--peers", type=Path, nargs="*", default=[])
    args = parser.parse_args()
    if not args.prompts and not (args.json and args.json.exists()):
        parser.error("give a file of prompts to measure, or an existing --json FILE to print what was measured.")
    return args


# ---- measuring --------------------------------------------------------------------------------------------------


def raced(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all targets with all their drafts, in turns -> the facts of the machine, and a row for each."""
    engines = {
        (precision, draft): load(args, precision, draft)
        for precision in args.target_precision
        for draft in drafts(args, precision)
    }
    contenders = [each for precision in args.target_precision for each in of_target(args, precision, engines)]
    settings = BenchSettings(tuple(args.gamma), (1,), tuple(args.temperature), args.max_new_tokens, args.repetitions)
    prompts = [item.prompt for item in gather([], args.prompts, False)][: args.limit]
    first = next(iter(engines.values()))
    report = measure(first, prompts, settings, contenders, on_run=progress)
    return {"environment": environment(first), "rows": [asdict(row) for row in report.rows]}


def drafts(args: argparse.Namespace, precision: str) -> tuple[str, ...]:
    """Return the drafts that are raced for a target of this precision."""
    return (*DRAFTS[precision], *([CUT] if args.draft_vocab else []))


def load(args: argparse.Namespace, precision: str, draft: str) -> Engine:
    """Load the target in a precision, with a draft by its name here."""
    in_int8 = f"{args.draft}?quantize=int8"
    names = {"model": args.draft, "model in int8": in_int8, "int4": "int4"}
    names[CUT] = f"{in_int8}&draft_vocab={args.draft_vocab}"
    quantize = None if precision == "bfloat16" else precision
    how: dict[str, Any] = {"dtype": "bfloat16", "quantize": quantize, "compile": args.compile, "gamma": max(args.gamma)}
    print(f"loading {precision} with {draft}", file=sys.stderr, flush=True)
    engine = slipstream.load(args.target, names[draft], **how)
    if args.compile and len(args.gamma) > 1:
        drafter: Any = engine.decoder.drafter
        drafter.scorer.make_draft_graphs(args.gamma)  # a graph for chains of every length that is measured
    return engine


def of_target(args: argparse.Namespace, precision: str, engines: dict[tuple[str, str], Engine]) -> Iterator[Contender]:
    """Yield the contenders of a target: plain decoding, and every draft with every gamma."""
    for place, draft in enumerate(drafts(args, precision)):
        decoder = engines[precision, draft].decoder
        if not place:
            yield ours(f"{precision}, {PLAIN}", replace(decoder, drafter=NoDraft(), controller=Fixed(0)))
        for gamma in args.gamma:
            yield ours(f"{precision}, {draft}", replace(decoder, controller=Fixed(gamma)), gamma)


def progress(done: int, count: int, name: str) -> None:
    print(f"\r{done + 1}/{count} {name:40}", end="\n" if done + 1 == count else "", file=sys.stderr, flush=True)


# ---- the table --------------------------------------------------------------------------------------------------


def table(found: dict[str, Any]) -> str:
    """Return a Markdown table: each target, draft and temperature at its fastest gamma, and then other programs."""
    lines = ["| target, draft | temperature | gamma | tokens/s (without prefill) | alpha | x plain |"]
    lines += ["|---|---|---|---|---|---|"]
    best: dict[tuple[str, float], dict[str, Any]] = {}
    for row in found["rows"]:
        key = (row["contender"], row["temperature"])
        if key not in best or speed(row) > speed(best[key]):
            best[key] = row
    for (name, heat), row in sorted(best.items(), key=lambda item: item[0][1]):
        plain = best[f"{precision_of(row)}, {PLAIN}", heat]
        alpha = "" if row["gamma"] is None else f"{row['alpha']:.3f}"
        lines.append(
            f"| {name} | {heat:g} | {row['gamma'] or ''} | {speed(row):.0f} ({bare_speed(row):.0f}) | {alpha} "
            f"| {speed(row) / speed(plain):.2f} ({bare_speed(row) / bare_speed(plain):.2f}) |"
        )
    for peer in found["peers"]:
        for kind, prefix, gamma in ((PLAIN, "plain_", ""), ("with the draft", "", peer["gamma"])):
            speeds = f"{peer[f'{prefix}tokens_per_second']:.0f} ({peer[f'{prefix}without_prefill']:.0f})"
            lines.append(f"| {peer['peer']}, {kind} | {peer['temperature']:g} | {gamma} | {speeds} | | |")
    facts = found["environment"]
    return "\n".join(lines) + f"\n\n{facts['cpu']}, {facts['threads']} threads, torch {facts['torch']}"


def speed(row: dict[str, Any]) -> float:
    return float(row["tokens_per_second"]["median"])


def bare_speed(row: dict[str, Any]) -> float:
    """Return the tokens per second of the rounds, without prefill."""
    return float(1000 * row["mean_acceptance_length"] / row["milliseconds"]["round"])


if __name__ == "__main__":
    main()
