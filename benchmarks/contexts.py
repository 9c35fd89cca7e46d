"""Measures what long contexts cost: prefill, attention, and rounds compared with plain steps.

python benchmarks/contexts.py --target build/target-134m --draft build/draft-24m [--compile] [--parts rounds] [--json]

Parts: `prefill` reads a prompt with our model and with transformers' (torch's attention, oneDNN's products) in turns;
`attention`, which needs no model, gives the bytes of a layer's keys and values that a program reads per second, for one
and six new tokens, by heads of real models, format of the cache and threads, beside the memory's bandwidth in turns;
`rounds` decodes after prompts of each length, plainly and with drafts (gamma 5), and gives the times of a step and of a
round and the speed-up, without prefill. `--draft` may be any draft, for example `window:1024?weights=int4`. The models
read longer texts here than they were trained for: times are those of such
lengths, but the generated text means nothing.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from itertools import cycle, islice, product
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import torch
from kernel import timed
from levels import processor
from serving import roomy
from torch import Tensor
from transformers import AutoModelForCausalLM

import slipstream
from slipstream.bench.records import PROMPTS
from slipstream.cache.stores import FloatStore, Int8Store, Store
from slipstream.core.stats import Stats
from slipstream.engine.engine import Engine
from slipstream.execution.programs import Program, recorded
from slipstream.kernels.attention import attend
from slipstream.kernels.library import level

PARTS = ("prefill", "attention", "rounds")
HEADS = ((9, 3, 64), (32, 8, 128))  # query heads, heads of keys and their width: SmolLM2-135M, Llama 3 8B
FORMATS: dict[str, tuple[torch.dtype, type[Store]]] = {
    "float32": (torch.float32, FloatStore),
    "bfloat16": (torch.bfloat16, FloatStore),
    "int8": (torch.bfloat16, Int8Store),
}


def main() -> None:
    args = arguments()
    if args.parts == ["attention"]:
        print(json.dumps({"attention": attentions(args)}, indent=None if args.json else 1))
        return
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


def attentions(args: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds and bytes of attention by a program, by threads, heads, format, slots and new tokens."""
    rows = []
    for threads, (heads, groups, width), kind, slots in product(args.threads, HEADS, FORMATS, args.slots):
        torch.set_num_threads(threads)
        dtype, format = FORMATS[kind]
        one = 2 * groups * slots * width * dtype.itemsize
        layers = [
            format.of(*torch.randn(2, 1, groups, slots, width).to(dtype)) for _ in range(max(2, (1 << 27) // one))
        ]
        size = sum(tensor.nbytes for tensor in layers[0])
        for tokens in (1, 6):
            queries = torch.randn(1, heads, tokens, width).to(dtype)
            hidden = torch.full((tokens, slots), torch.finfo(dtype).min).triu(1 + slots - tokens).to(dtype)[None, None]
            seconds, pace = read_in_turns(queries, hidden, layers)
            about = {"threads": threads, "heads": f"{heads}/{groups} x {width}", "format": kind}
            rows.append(
                {**about, "slots": slots, "tokens": tokens, "seconds": seconds, "bytes": size, "bandwidth": pace}
            )
            say(f"{rows[-1]}: {size / seconds / pace:.2f} of the bandwidth")
    return {"processor": processor(), "level": level().name, "rows": rows}


def read_in_turns(queries: Tensor, mask: Tensor, layers: list[Store]) -> tuple[float, float]:
    """Return the seconds of attention to one layer, and the bytes per second of summing numbers, in turns: medians.

    Every run reads a layer of its own, so that keys and values come from memory, not from the processor's caches.
    Seconds are processor time, divided by the threads.
    """
    sizes = [(queries, {2: "tokens"}), (mask, {2: "tokens", 3: "slots"}), *[(each, {2: "slots"}) for each in layers[0]]]
    program = Program(recorded(attention_to_store, (queries, mask, layers[0]), sizes))
    numbers, ours, reading = torch.ones(1 << 25), [], []
    for _ in range(3):
        for layer in layers:
            ours.append(seconds_of(lambda: program((queries, mask, layer))))  # noqa: B023 - called at once
        reading.append(seconds_of(numbers.sum))
    return median(ours[len(layers) :]), numbers.nbytes / median(reading)


def attention_to_store(queries: Tensor, mask: Tensor, store: Store) -> Tensor:
    """Attend to the first slots of a layer's store, as models do."""
    return attend(torch.nn.Module(), queries, *store.read(mask.shape[3]), mask)[0]


def seconds_of(work: Callable[[], Any]) -> float:
    began = process_time()
    work()
    return (process_time() - began) / torch.get_num_threads()


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
    parser.add_argument("--target", type=Path)
    parser.add_argument("--draft")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--gamma", type=int, default=5)
    parser.add_argument("--context", type=int, default=16384, help="positions that the models accept")
    parser.add_argument("--prompts", type=int, nargs="+", default=[1024, 4096, 8192], help="prefill: prompt tokens")
    parser.add_argument("--slots", type=int, nargs="+", default=[4096, 16384], help="attention: slots of the cache")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="attention: threads")
    parser.add_argument("--behind", type=int, nargs="+", default=[128, 1024, 4096, 8192], help="rounds: prompt tokens")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
