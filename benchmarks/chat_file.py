"""Races a chat model with each draft against itself without one, by kind of prompt, and against llama.cpp on its file.

python benchmarks/chat_file.py MODEL PROMPTS.jsonl [--draft lookup ...] [--each 3] [--llama PYTHON] [--json FILE]

MODEL is smollm2, a .gguf file, a folder or a name. Prompts, `prompt` or the first of `turns`, are asked as chats, as
token ids, one text at a time; end tokens are ignored. There are --each of every kind, `category`.
Speed is new tokens / seconds of whole calls, prompt included, the median of the laps, in turns on the same number of
threads with gamma="auto"; processor time beside it says more on a busy machine. alpha is of a lap with gamma 4.
PYTHON is a Python with llama-cpp-python, which continues greedily.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch
from levels import processor

import slipstream
from slipstream.core.stats import Stats
from slipstream.models.loading.pairings import located

PEER = Path(__file__).parent / "peers" / "llama_cpp_speed.py"
GAMMA = 4  # of the lap that measures alpha
Run = Callable[[list[int]], list[int]]


def main() -> None:
    args = arguments()
    model = str(located(args.model))
    engines = {"plain": slipstream.load(model, draft=None, threads=args.threads, dtype=args.dtype)}
    for draft in args.draft:
        engines[draft] = slipstream.load(model, draft=draft, threads=args.threads, dtype=args.dtype)
    prompts = asked(engines["plain"].tokenizer, args.prompts, args.each)
    found: dict[str, Any] = {"processor": processor(), "threads": torch.get_num_threads(), "model": Path(model).name}
    found |= {"prompts": {kind: len(some) for kind, some in prompts.items()}, "new": args.new, "temperatures": {}}
    with ExitStack() as stack:
        peer = stack.enter_context(started(args.llama, model)) if args.llama else None
        for temperature in args.temperature:
            programs = {name: ours(engine, args.new, temperature) for name, engine in engines.items()}
            if peer and temperature == 0:
                programs["llama.cpp"] = theirs(peer, args.new)
            laws = {name: measured(engine, prompts, args.new, temperature) for name, engine in engines.items()}
            found["temperatures"][str(temperature)] = {"alpha": laws, **raced(programs, prompts, args.laps)}
            show(temperature, found["temperatures"][str(temperature)], list(prompts))
            if args.json:
                args.json.write_text(json.dumps(found, indent=1) + "\n")
    print(f"\n*{found['processor']}, {found['threads']} threads; {found['model']}, {args.each} prompts x {args.new}.*")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--llama", help="a Python with llama-cpp-python, for .gguf files")
    parser.add_argument("--draft", nargs="*", default=["lookup"])
    parser.add_argument("--temperature", nargs="*", type=float, default=[0.0, 1.0])
    parser.add_argument("--each", type=int, default=3)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--laps", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def asked(tokenizer: Any, file: Path, each: int) -> dict[str, list[list[int]]]:
    """Return the prompts of a file as token ids, `each` of every kind."""
    texts: dict[str, list[str]] = {}
    for row in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
        texts.setdefault(row.get("category", "all"), []).append(row.get("prompt") or row["turns"][0])

    def ids(text: str) -> list[int]:
        return list(
            tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)["input_ids"]
        )

    return {kind: list(map(ids, some[:: max(1, len(some) // each)][:each])) for kind, some in texts.items()}


def ours(engine: Any, new: int, temperature: float) -> Run:
    def run(prompt: list[int]) -> list[int]:
        return list(engine.generate([prompt], max_new_tokens=new, ignore_eos=True, temperature=temperature)[0].tokens)

    return run


def started(python: str, model: str) -> subprocess.Popen[str]:
    """Start llama.cpp in a process of its own."""
    command = [python, str(PEER), model, str(torch.get_num_threads())]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command, text=True, **pipes)


def theirs(peer: Any, new: int) -> Run:
    def run(prompt: list[int]) -> list[int]:
        peer.stdin.write(json.dumps({"tokens": prompt, "count": new}) + "\n")
        peer.stdin.flush()
        return list(json.loads(peer.stdout.readline())["tokens"])

    return run


def measured(engine: Any, prompts: dict[str, list[list[int]]], new: int, temperature: float) -> dict[str, Any]:
    """Return alpha and the tokens per call of the target, by kind of prompt; all of it warms up."""
    found = {}
    for kind, some in prompts.items():
        options = {"max_new_tokens": new, "ignore_eos": True, "temperature": temperature, "gamma": GAMMA}
        stats = sum((engine.generate([each], **options)[0].stats for each in some), Stats())
        found[kind] = {"alpha": stats.alpha, "tokens a call": stats.mean_acceptance_length}
    return found


def raced(programs: dict[str, Run], prompts: dict[str, list[list[int]]], laps: int) -> dict[str, Any]:
    """Return the speeds of every program by kind of prompt, and how many of its texts are those without a draft."""
    speeds: dict[str, Any] = {name: {kind: [] for kind in prompts} for name in programs}
    same = dict.fromkeys(programs, 0)
    for lap in range(laps):
        for kind, some in prompts.items():
            texts = {}
            for name in list(programs)[:: 1 if lap % 2 else -1]:
                wall, processor_time = time.perf_counter(), time.process_time()
                texts[name] = [programs[name](prompt) for prompt in some]
                count = sum(map(len, texts[name]))
                seconds = (time.perf_counter() - wall, time.process_time() - processor_time)
                speeds[name][kind].append([count / each for each in seconds])
            for name in programs if lap == laps - 1 else ():
                same[name] += sum(map(list.__eq__, texts[name], texts["plain"]))
    medians = {
        name: {kind: list(map(median, zip(*laps, strict=True))) for kind, laps in by_kind.items()}
        for name, by_kind in speeds.items()
    }
    return {"tokens/s": part(medians, 0), "tokens/processor second": part(medians, 1), "same": same}


def part(medians: dict[str, Any], place: int) -> dict[str, dict[str, float]]:
    return {name: {kind: both[place] for kind, both in kinds.items()} for name, kinds in medians.items()}


def show(temperature: float, found: dict[str, Any], kinds: list[str]) -> None:
    speeds, spent = found["tokens/s"], found["tokens/processor second"]
    print(
        f"\n**Temperature {temperature:g}**\n\n| kind | plain, tokens/s | {' | '.join(list(speeds)[1:])} |", flush=True
    )
    print(f"|{'---|' * (1 + len(speeds))}")

    def cell(name: str, kind: str) -> str:
        alpha = found["alpha"].get(name, {}).get(kind, {}).get("alpha")
        tail = f" ({spent[name][kind] / spent['plain'][kind]:.2f})" if name in found["alpha"] else ""
        return f"{speeds[name][kind] / speeds['plain'][kind]:.2f}{tail}" + (f", alpha {alpha:.2f}" if alpha else "")

    for kind in kinds:
        print(f"| {kind} | {speeds['plain'][kind]:.1f} | {' | '.join(cell(name, kind) for name in list(speeds)[1:])} |")
    for name in list(speeds)[1:]:
        ratio = [sum(1 / each[one][kind] for kind in kinds) for each in (speeds, spent) for one in ("plain", name)]
        print(f"{name}: {ratio[0] / ratio[1]:.2f} x plain, {ratio[2] / ratio[3]:.2f} by processor time", flush=True)
    print(f"texts of plain: {found['same']}")


if __name__ == "__main__":
    main()
