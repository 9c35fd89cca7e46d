"""Speed on a GPU with models of a size that one is used for, made there from the embedded pair (cost-padded).

python benchmarks/gpu.py --target target-6b --draft draft-24m --json gpu.json

Plain and speculative decoding by CUDA graphs, and transformers' own with the same models, take turns. Text and
acceptance are those of the embedded pair, arithmetic and memory traffic those of the sizes given (`cost_padded.py`).
Every race is printed and added to the file when it ends.
"""

import argparse
import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from cost_padded import PRESETS, difference, enlarge, say
from transformers import AutoModelForCausalLM, AutoTokenizer

import slipstream
from slipstream.bench.contenders import line_up
from slipstream.bench.race import measure
from slipstream.bench.records import ASSISTED_AUTO, COMPILED, LOOKUP, PROMPTS, BenchSettings
from slipstream.execution.graphs import GRAPHS
from slipstream.models.loading.pairings import EMBEDDED


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=PRESETS, default="target-1b")
    parser.add_argument("--draft", choices=PRESETS, default="draft-24m")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--gamma", type=int, nargs="+", default=[5])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument(
        "--prompts", type=int, default=4, help="for a batch of one; larger batches take as many as rows"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    engine = slipstream.load(
        *(enlarged(role, getattr(args, role), args.device) for role in ("target", "draft")),
        tokenizer=AutoTokenizer.from_pretrained(EMBEDDED / "target"),
        gamma=max(args.gamma),
        batch_size=max(args.batch),
        compile=True,
        progress=say,
    )
    for batch, temperature in product(args.batch, args.temperature):
        run(engine, batch, temperature, args)


def enlarged(role: str, preset: str, device: str) -> Any:
    """Return a model of the embedded pair, enlarged on the device; prints how far its logits moved."""
    small = AutoModelForCausalLM.from_pretrained(EMBEDDED / role, dtype="bfloat16").to(device).eval()
    large = enlarge(small, PRESETS[preset])
    moved = difference(small, large, torch.arange(1, 65, device=device)[None])
    say(f"{preset}: {large.num_parameters() / 1e6:,.0f} M parameters, logits moved by at most {moved:.2g}")
    return large


def run(engine: slipstream.Engine, batch: int, temperature: float, args: argparse.Namespace) -> None:
    """Measure the contenders at one batch size and temperature, print their rows and add the report to the file."""
    settings = BenchSettings(tuple(args.gamma), (batch,), (temperature,), args.max_new_tokens, args.repetitions)
    everyone = [each for each in line_up(engine, settings) if each.name not in {LOOKUP, ASSISTED_AUTO}]
    everyone = [replace(each, execution=COMPILED) if each.execution else each for each in everyone]
    captured = GRAPHS.captured
    report = measure(engine, PROMPTS[: max(args.prompts, batch)], settings, everyone)
    for row in report.rows:
        plain, theirs = (
            ratio and f"{ratio['median']:.2f}" for ratio in (row.ratio_to_plain, row.ratio_to_transformers)
        )
        print(
            f"batch {batch}, temperature {temperature:g}, {row.contender}, gamma {row.gamma}:",
            f"{row.tokens_per_second['median']:.0f} tokens/s, {plain} x plain, {theirs} x generate,",
            f"{row.matches_plain} of {row.prompts} as plain, alpha {row.alpha}, ms per round {row.milliseconds}",
            flush=True,
        )
    if args.json:
        known = json.loads(args.json.read_text()) if args.json.exists() else []
        sizes = {"target": args.target, "draft": args.draft, "captured": GRAPHS.captured - captured}
        args.json.write_text(json.dumps([*known, sizes | report.as_dict()], indent=1))


if __name__ == "__main__":
    main()
