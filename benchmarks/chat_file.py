"""Races a GGUF file: ours plainly and with drafts against llama.cpp on the same file, in turns.

python benchmarks/chat_file.py MODEL.gguf PROMPTS.jsonl --llama PYTHON [--draft lookup ...] [--limit 6] [--json FILE]

PYTHON is a Python with llama-cpp-python. Prompts, `prompt` or the first of `turns` of lines spread over the file, are
asked as chats, as token ids, one text at a time; end tokens are ignored. Speed is new tokens / seconds of prompt and
text, the median of the laps; all have the same number of threads.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from levels import processor

import slipstream

PEER = Path(__file__).parent / "peers" / "llama_cpp_speed.py"
Run = Callable[[list[int]], list[int]]


def main() -> None:
    args = arguments()
    engines = {"plain": slipstream.load(args.model, draft=None, threads=args.threads)}
    engines |= {draft: slipstream.load(args.model, draft=draft, threads=args.threads) for draft in args.draft}
    tokenizer: Any = engines["plain"].tokenizer
    rows = [json.loads(line) for line in args.prompts.read_text(encoding="utf-8").splitlines()]
    texts = [row.get("prompt") or row["turns"][0] for row in rows[:: max(1, len(rows) // args.limit)]][: args.limit]
    chats = [[{"role": "user", "content": text}] for text in texts]
    prompts = [list(tokenizer.apply_chat_template(each, add_generation_prompt=True)["input_ids"]) for each in chats]
    programs: dict[str, Run] = {name: ours(engine, args.new) for name, engine in engines.items()}
    with subprocess.Popen(
        [args.llama, str(PEER), args.model, str(torch.get_num_threads())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as peer:
        programs["llama.cpp"] = theirs(peer, args.new)
        found = raced(programs, prompts, args.laps)
    found |= {"processor": processor(), "threads": torch.get_num_threads(), "model": Path(args.model).name}
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    print("| program | tokens/s | of llama.cpp | of plain | texts of plain |\n|---|---|---|---|---|")
    speeds = found["speed"]
    for name, speed in speeds.items():
        shares = (f"{speed / speeds[other]:.2f}" for other in ("llama.cpp", "plain"))
        print(f"| {name} | {speed:.1f} | {' | '.join(shares)} | {found['same'][name]} of {len(prompts)} |")
    print(
        f"\n*{found['processor']}, {found['threads']} threads; {found['model']}, {len(prompts)} prompts x {args.new}.*"
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--llama", required=True, help="a Python with llama-cpp-python")
    parser.add_argument("--draft", nargs="*", default=["lookup"])
    parser.add_argument("--limit", type=int, default=6)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--laps", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def ours(engine: Any, new: int) -> Run:
    def run(prompt: list[int]) -> list[int]:
        return list(engine.generate([prompt], max_new_tokens=new, ignore_eos=True)[0].tokens)

    return run


def theirs(peer: Any, new: int) -> Run:
    def run(prompt: list[int]) -> list[int]:
        peer.stdin.write(json.dumps({"tokens": prompt, "count": new}) + "\n")
        peer.stdin.flush()
        return list(json.loads(peer.stdout.readline())["tokens"])

    return run


def raced(programs: dict[str, Run], prompts: list[list[int]], laps: int) -> dict[str, Any]:
    """Return the speed of every program, and how many of its texts are those of our plain decoding."""
    speeds: dict[str, list[float]] = {name: [] for name in programs}
    texts: dict[str, list[list[int]]] = {}
    for lap in range(-1, laps):  # the first one warms up
        for name in list(programs)[:: 1 if lap % 2 else -1]:
            began = time.perf_counter()
            texts[name] = [programs[name](prompt) for prompt in prompts]
            if lap >= 0:
                speeds[name].append(sum(map(len, texts[name])) / (time.perf_counter() - began))
    same = {name: sum(map(list.__eq__, found, texts["plain"])) for name, found in texts.items()}
    return {"speed": {name: median(each) for name, each in speeds.items()}, "same": same}


if __name__ == "__main__":
    main()
