"""Measures what long contexts cost: prefill, attention, and rounds compared with plain steps.

python benchmarks/contexts.py --target build/target-134m --draft build/draft-24m [--compile] [--parts rounds] [--json]

Parts: `prefill` reads a prompt with our model and with transformers' (torch's attention, oneDNN's products) in turns;
`attention` gives the bytes of keys and values of a layer read per second, for one and six new tokens, and the memory's
bandwidth in the same run; `rounds` decodes after prompts of each length, plainly and with drafts (gamma 5), and gives
the times of a step and of a round and the speed-up, without prefill. `--draft` may be any draft, for example
`window:1024?weights=int4`. The models read longer texts here than they were trained for: times are those of such
lengths, but the generated text means nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from kernel import timed
from serving import roomy
from transformers import AutoModelForCausalLM

import slipstream
from slipstream.bench import PROMPTS
from slipstream.core.stats import Stats
from slipstream.engine.engine import Engine
from slipstream.kernels.cpu import panel_attention

PARTS = ("prefill", "attention", "rounds")
HEADS, WIDTH = (12, 6), 64  # query heads and heads of keys, of the 134 M target


def main() -> None:
    args = arguments()
    with roomy(args):
        how: dict[str, Any] = {"dtype": args.dtype, "gamma": args.gamma, "compile": args.compile}
        engine = slipstream.load(str(args.target), args.draft, **how)
        text = list(islice(cycle(engine.encode("\n".join(PROMPTS))), args.context))
        measures: dict[str, Callable[[], Any]] = {
            "prefill": lambda: prefills(engine, str(args.target), args, text),
            "attention": lambda: attentions(args),
            "rounds": lambda: [steps(engine, text[:length], args) for length in args.behind],
        }
        found = {part: measures[part]() for part in args.parts}
    print(json.dumps(found) if args.json else json.dumps(found, indent=1))


def read_bandwidth(count: int = 15) -> float:
    """Return the bytes per second of summing 512 MB, far more than caches hold: the best run, as this is a limit."""
    data, times = torch.ones(128 * 2**20), []
    for _ in range(count):
        start = perf_counter()
        data.sum().item()
        times.append(perf_counter() - start)
    return data.numel() * data.element_size() / min(times)


@torch.inference_mode()
def prefills(engine: Engine, target: str, args: argparse.Namespace, text: Sequence[int]) -> list[dict[str, Any]]:
    """Return the seconds of prefill by prompt length, ours and transformers'."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=args.dtype, attn_implementation="sdpa").eval()
    scorer, rows = engine.decoder.target, []
    for length in args.prompts:
        ids = torch.tensor([text[:length]])

        def ours(prompt: list[int] = list(text[:length])) -> None:  # noqa: B006
            scorer.add(1)
            scorer.prefill([prompt])
            scorer.free([0])

        def by_transformers(ids: torch.Tensor = ids) -> None:
            model(ids, use_cache=True, logits_to_keep=1)

        one, other = timed([ours, by_transformers], args.repetitions)
        rows.append({"tokens": length, "ours": one, "transformers": other})
        say(f"{length} tokens: {one:.3f} s, transformers {other:.3f} s")
    return rows


@torch.inference_mode()
def attentions(args: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds and bytes of attention with one and six queries, by the number of slots in the KV cache.

    Every run reads a layer of its own, so that keys and values come from memory, not from the processor's caches.
    """
    rows, (heads, groups) = [], HEADS
    for slots in args.slots:
        size = 2 * groups * slots * WIDTH * 2
        layers = [torch.randn(2, 1, groups, slots, WIDTH).bfloat16() for _ in range(max(2, (1 << 28) // size))]
        for tokens in (1, 6):
            queries = torch.randn(1, tokens, heads, WIDTH).bfloat16().transpose(1, 2)
            hidden = torch.full((tokens, slots), torch.finfo(torch.bfloat16).min).triu(1 + slots - tokens).bfloat16()
            laps = []
            for layer in cycle(layers):
                start = perf_counter()
                panel_attention(queries, *layer, hidden[None, None], WIDTH**-0.5)
                laps.append(perf_counter() - start)
                if len(laps) > 2 * len(layers):
                    break
            seconds = median(laps[len(layers) :])
            rows.append({"slots": slots, "tokens": tokens, "seconds": seconds, "bytes": size})
            say(f"{tokens} tokens over {slots} slots: {1e6 * seconds:.0f} microseconds")
    return {"bandwidth": read_bandwidth(), "rows": rows}


def steps(engine: Engine, prompt: list[int], args: argparse.Namespace) -> dict[str, Any]:
    """Return the milliseconds of a plain step and of a round after a prompt, the tokens per round, and the speed-up."""

    def decoded(**how: Any) -> tuple[float, float]:
        """Decode a text -> milliseconds and tokens per target call."""
        [done] = engine.generate(tuple(prompt), max_new_tokens=args.max_new_tokens, ignore_eos=True, **how)
        calls = done.stats.target_calls
        return 1000 * without_prefill(done.stats) / calls, len(done.tokens) / calls

    laps = [(decoded(plain=True)[0], *decoded()) for _ in range(args.repetitions + 1)][1:]
    plain, round, tokens = (median(values) for values in zip(*laps, strict=True))
    ratio = median(round_ms / plain_ms for plain_ms, round_ms, _ in laps)
    speedup = median(plain_ms * count / round_ms for plain_ms, round_ms, count in laps)
    say(
        f"behind {len(prompt)} tokens: plain step {plain:.1f} ms, round {round:.1f} ms, {tokens:.2f} tokens a round, "
        f"{speedup:.2f} x plain"
    )
    times = {"context": len(prompt), "plain": plain, "round": round, "ratio": ratio}
    return {**times, "tokens_per_round": tokens, "speedup": speedup}


def without_prefill(stats: Stats) -> float:
    """Return the seconds of the rounds of a text, without prefill."""
    return sum(seconds for phase, seconds in stats.seconds.items() if phase != "prefill")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--gamma", type=int, default=5)
    parser.add_argument("--context", type=int, default=16384, help="positions that the models accept")
    parser.add_argument("--prompts", type=int, nargs="+", default=[1024, 4096, 8192], help="prefill: prompt tokens")
    parser.add_argument("--slots", type=int, nargs="+", default=[4096, 16384], help="attention: slots of the cache")
    parser.add_argument("--behind", type=int, nargs="+", default=[128, 1024, 4096, 8192], help="rounds: prompt tokens")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
