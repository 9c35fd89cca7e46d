"""Plain and speculative greedy text: how many differ, in one shape, in any, and compiled, and at what speed.

python benchmarks/exact_shape.py PROMPTS.jsonl[.gz] [--target DIR --draft DIR] [--dtype float32 bfloat16]
"""

from __future__ import annotations

import argparse
from time import perf_counter

import slipstream
from slipstream.engine.engine import Engine
from slipstream.text.prompts import gather


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", help="a file of prompts, one per line or JSON lines")
    parser.add_argument("--target")
    parser.add_argument("--draft")
    parser.add_argument("--dtype", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--max-new-tokens", type=int, default=128)
    args = parser.parse_args()
    prompts = [item.prompt for item in gather([], args.prompts, False)]
    for dtype in args.dtype:
        for way in ({"exact_shape": True}, {}, {"compile": True}):
            engine = slipstream.load(args.target, args.draft, dtype=dtype, **way)
            print(f"{dtype:9} {way!s:21} {compare(engine, prompts, args.max_new_tokens)}", flush=True)


def compare(engine: Engine, prompts: list[str], limit: int) -> str:
    """How many texts differ, out of how many tokens, and the speed of both."""
    (slow, slow_time), (fast, fast_time) = (timed(engine, prompts, limit, plain) for plain in (True, False))
    differ = sum(one != other for one, other in zip(slow, fast, strict=True))
    tokens = sum(map(len, slow))
    speeds = f"plain {tokens / slow_time:.0f}, speculative {tokens / fast_time:.0f}"
    return f"{tokens} tokens in {len(slow)} texts, {differ} texts differ; tokens per second: {speeds}"


def timed(engine: Engine, prompts: list[str], limit: int, plain: bool) -> tuple[list[tuple[int, ...]], float]:
    start = perf_counter()
    done = engine.generate(prompts, max_new_tokens=limit, plain=plain, ignore_eos=True)
    return [one.tokens for one in done], perf_counter() - start


if __name__ == "__main__":
    main()
