"""Compares beam search with transformers' own: whether texts and scores agree, calls of the target, and speed.

python benchmarks/beams.py [--prompts FILE] [--count 200] [--beams 2 --beams 4 --beams 8] [--draft embedded --gamma 4]
                           [--repetitions 3] [--json]

Every prompt is searched alone (batch 1) by transformers, by ours without a draft and by ours with it, in an order that
rotates; times are sums over prompts, of which the median over repetitions is taken. A prompt whose texts differ while
all its scores agree to 1e-4 is a near-tie, and counted; any other difference ends the command with exit code 1. The
acceptance is the paper's condition (appendix A.4): how often the w prefixes that the target continues, its top w, are
among those that the draft proposed from its own top u. With --json, nothing but the figures is printed. The prompts are
by default a few lines of Python code in many variations, the models the embedded pair, in float32.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import slipstream
from slipstream.core.stats import Stats
from slipstream.decoding.beam import EXTRA
from slipstream.engine.engine import Engine
from slipstream.measure.environment import environment, without_folder
from slipstream.models.loading.pairings import EMBEDDED
from slipstream.text.prompts import gather

TIE = 1e-4  # the difference of scores below which two hypotheses count as tied
CONTENDERS = ("transformers", "plain", "drafted")
Texts = list[tuple[tuple[int, ...], float]]
"""The hypotheses of a prompt, best first: token ids and score."""

BEGINNINGS = (
    *("def {}(n):\n", "class {}:\n    def __init__(self", "import {}\n\n", "for {} in range(", "if {} is None:\n"),
    *("# {}\n", "    return {}", "with open({}) as", "assert {} ==", "print({}"),
)
NAMES = (
    *("fibonacci", "items", "path", "name", "os", "Stack", "value", "result", "count", "self.data"),
    *("index", "x", "lines", "config", "parse", "node", "sys", "total", "key", "args"),
)


@dataclass
class Lap:
    """One contender's run over all prompts: seconds, hypotheses and statistics."""

    seconds: float = 0.0
    texts: list[Texts] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)


def by_transformers(model: Any, ids: Sequence[int], settings: dict[str, Any], eos: Sequence[int]) -> Texts:
    """Return the texts and scores of transformers' beam search."""
    prompt = torch.tensor([ids])
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        eos_token_id=list(eos),
        pad_token_id=eos[0],
        output_scores=True,
        return_dict_in_generate=True,
        **settings,
    )
    lines = out.sequences[:, len(ids) :].tolist()
    return [(ended(line, eos), score) for line, score in zip(lines, out.sequences_scores.tolist(), strict=True)]


def ended(line: Sequence[int], eos: Sequence[int]) -> tuple[int, ...]:
    """Return a padded output up to its first EOS token, which is included."""
    stop = next((place for place, token in enumerate(line, 1) if token in eos), len(line))
    return tuple(line[:stop])


def lap(contender: str, pair: tuple[Any, Engine], prompts: Sequence[tuple[int, ...]], settings: dict[str, Any]) -> Lap:
    """Run one contender's beam search on every prompt, one after the other."""
    model, engine = pair
    one_lap, eos = Lap(), sorted(engine.eos)
    for ids in prompts:
        start = perf_counter()
        if contender == "transformers":
            one_lap.texts.append(by_transformers(model, ids, settings, eos))
        else:
            done = engine.generate(ids, plain=contender == "plain", **settings)
            one_lap.texts.append([(each.tokens, each.score or 0.0) for each in done])
            one_lap.stats += done[0].stats
        one_lap.seconds += perf_counter() - start
    return one_lap


def compare(ours: Sequence[Texts], reference: Sequence[Texts]) -> dict[str, Any]:
    """Return how many prompts have equal texts, near-ties and other differences, and the largest gap of scores."""
    counts: dict[str, Any] = {"equal": 0, "near_ties": 0, "different": 0, "largest_score_difference": 0.0}
    for our, expected in zip(ours, reference, strict=True):
        gap = max(abs(one - other) for (_, one), (_, other) in zip(our, expected, strict=True))
        same = [text for text, _ in our] == [text for text, _ in expected]
        counts["different" if gap >= TIE else "equal" if same else "near_ties"] += 1
        counts["largest_score_difference"] = max(counts["largest_score_difference"], gap)
    return counts


def measure(beams: int, pair: tuple[Any, Engine], prompts: Sequence[tuple[int, ...]], args: Any) -> dict[str, Any]:
    """Measure all contenders with this number of beams -> a row of the report."""
    settings = {
        "num_beams": beams,
        "num_return_sequences": beams,
        "max_new_tokens": args.max_new_tokens,
        "length_penalty": args.length_penalty,
    }
    laps: dict[str, list[Lap]] = {contender: [] for contender in CONTENDERS}
    for contender in CONTENDERS:  # warm up, so that no contender is timed on its first call
        lap(contender, pair, prompts[:1], settings)
    for repetition in range(args.repetitions):
        for place in range(len(CONTENDERS)):
            contender = CONTENDERS[(place + repetition) % len(CONTENDERS)]
            laps[contender].append(lap(contender, pair, prompts, settings))
            print(f"{beams} beams, lap {repetition + 1}, {contender}", file=sys.stderr, flush=True)
    first = {contender: some[0] for contender, some in laps.items()}
    seconds = {contender: median(each.seconds for each in some) for contender, some in laps.items()}
    drafted = first["drafted"].stats
    return {
        "beams": beams,
        "draft_beams": beams + EXTRA,
        "prompts": len(prompts),
        "plain": compare(first["plain"].texts, first["transformers"].texts),
        "drafted": compare(first["drafted"].texts, first["transformers"].texts),
        "target_calls": {"plain": first["plain"].stats.target_calls, "drafted": drafted.target_calls},
        "fewer_calls": first["plain"].stats.target_calls / drafted.target_calls,
        "alpha": drafted.alpha,
        "steps_per_call": drafted.mean_acceptance_length,
        "seconds": seconds,
        "laps": {contender: [each.seconds for each in some] for contender, some in laps.items()},
        "speed_plain": seconds["transformers"] / seconds["plain"],
        "speed_drafted": seconds["transformers"] / seconds["drafted"],
    }


def line(row: dict[str, Any]) -> str:
    """Return a row of the table."""
    equal, ties = row["drafted"]["equal"], row["drafted"]["near_ties"]
    return (
        f"| {row['beams']} | {equal} + {ties} near-ties of {row['prompts']} | {row['draft_beams']} | "
        f"{row['alpha'] or 0:.3f} | "
        f"{row['steps_per_call']:.2f} | {row['fewer_calls']:.2f} | "
        f"{row['speed_plain']:.2f} | {row['speed_drafted']:.2f} |"
    )


def read_prompts(engine: Engine, args: Any) -> list[tuple[int, ...]]:
    """Return the token ids of the prompts."""
    if args.prompts is not None:
        texts = [item.prompt for item in gather([], args.prompts, False)]
    else:
        texts = [beginning.format(name) for name in NAMES for beginning in BEGINNINGS]
    return [engine.encode(text) for text in texts[: args.count]]


def main() -> int:
    """Measure and print a table or JSON -> exit code 1 if results differ by more than near-ties, else 0."""
    args = _arguments()
    target = args.target or EMBEDDED / "target"
    engine = slipstream.load(target, args.draft, gamma=args.gamma, dtype="float32", compile=args.compile)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    prompts = read_prompts(engine, args)
    rows = [measure(beams, (model, engine), prompts, args) for beams in args.beams or (2, 4, 8)]
    if args.json:
        settings = {**vars(args), "prompts": args.prompts and without_folder(args.prompts)}
        print(json.dumps({"settings": settings, "environment": environment(engine), "rows": rows}, default=str))
    else:
        print("| w | equal texts | u | top w of p in top u of q | steps per call | fewer calls | plain | drafted |")
        print("|---|---|---|---|---|---|---|---|")
        print("\n".join(map(line, rows)))
    return int(any(row[kind]["different"] for row in rows for kind in ("plain", "drafted")))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", help="a file of prompts, as for `slipstream generate --prompts`")
    parser.add_argument("--count", type=int, default=200, help="prompts to use")
    parser.add_argument("--target", help="hub name or folder")
    parser.add_argument("--draft", default="embedded", help="a draft as for `slipstream generate --draft`")
    parser.add_argument("--gamma", type=int, default=4, help="steps drafted per round")
    parser.add_argument("--beams", type=int, action="append", help="beams w; repeatable (default: 2, 4 and 8)")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--length-penalty", type=float, default=1.0)
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--json", action="store_true", help="print all figures as JSON, nothing else")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
