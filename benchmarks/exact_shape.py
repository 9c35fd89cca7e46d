"""Compares plain and speculative greedy texts: how many differ, and the speed, with and without one tensor shape.

Rounding may depend on the shape of a pass. `exact_shape` runs every pass in the same shape, so that no text should
differ; without it, passes have any shape, eager or compiled.

python benchmarks/exact_shape.py PROMPTS.jsonl[.gz] [--target DIR --draft DIR] [--dtype float32 bfloat16]
                                 [--json]
"""

import argparse
import json
from time import perf_counter
from typing import Any

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
    parser.add_argument("--json", action="store_true", help="print one JSON list at the end")
    args = parser.parse_args()
    prompts = [item.prompt for item in gather([], args.prompts, False)]
    rows = []
    for dtype in args.dtype:
        for way in ("exact_shape", "", "compile"):
            engine = slipstream.load(args.target, args.draft, dtype=dtype, **({way: True} if way else {}))
            rows.append({"dtype": dtype, "way": way, **compare(engine, prompts, args.max_new_tokens)})
            if not args.json:
                print(line(rows[-1]), flush=True)
    if args.json:
        print(json.dumps(rows))


def line(row: dict[str, Any]) -> str:
    """Return one comparison in words."""
    speeds = f"plain {row['plain']:.0f}, speculative {row['speculative']:.0f}"
    texts = f"{row['tokens']} tokens in {row['texts']} texts, {row['differ']} texts differ"
    return f"{row['dtype']:9} {row['way']:11} {texts}; tokens per second: {speeds}"


def compare(engine: Engine, prompts: list[str], limit: int) -> dict[str, Any]:
    """Return how many texts differ, how many tokens they have, and the tokens per second of both."""
    engine.warm_up(rows=(1, 2))  # graphs for batches, which loading does not make
    (plain, plain_time), (drafted, drafted_time) = (timed(engine, prompts, limit, each) for each in (True, False))
    differ = sum(one != other for one, other in zip(plain, drafted, strict=True))
    tokens = sum(map(len, plain))
    speeds = {"plain": tokens / plain_time, "speculative": tokens / drafted_time}
    return {"tokens": tokens, "texts": len(plain), "differ": differ, **speeds}


def timed(engine: Engine, prompts: list[str], limit: int, plain: bool) -> tuple[list[tuple[int, ...]], float]:
    """Decode all prompts greedily -> their texts as token ids, and the seconds."""
    start = perf_counter()
    done = engine.generate(prompts, max_new_tokens=limit, plain=plain, ignore_eos=True)
    return [one.tokens for one in done], perf_counter() - start


if __name__ == "__main__":
    main()
