"""Races a chat model with each draft against itself without one, by kind of prompt, and against llama.cpp on its file.

python benchmarks/chat_file.py MODEL PROMPTS.jsonl [--draft lookup ...] [--each 3] [--llama PYTHON] [--json FILE]

MODEL is smollm2, a .gguf file, a folder or a name. Prompts, `prompt` or the first of `turns`, are asked as chats, as
token ids, one text at a time; end tokens are ignored. There are --each of every kind, `category`.
Speed is new tokens / seconds of whole calls, prompt included, the median of the laps, in turns on the same number of
threads with gamma="auto". Decoding alone is what is left without the time of calls for one token. Processor time says
more on a busy machine. alpha is of a lap with gamma 4.
PYTHON is a Python with llama-cpp-python, which continues greedily.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from measurements import machine, typed

import slipstream
from slipstream.core.stats import Stats
from slipstream.models.loading.pairings import located

PEER = Path(__file__).parent / "peers" / "llama_cpp_speed.py"
GAMMA = 4  # of the lap that measures alpha
Run = Callable[[list[int], int], list[int]]
WHOLE, DECODING, OF_CPU = SPEEDS = ("tokens/s", "tokens/s of decoding alone", "tokens/processor second")


def main() -> None:
    args = arguments()
    model = str(located(args.model))
    engines = {"plain": slipstream.load(model, draft=None, threads=args.threads, dtype=args.dtype)}
    for draft in args.draft:
        engines[draft] = slipstream.load(model, draft=draft, threads=args.threads, dtype=args.dtype)
    prompts = asked(engines["plain"].tokenizer, args.prompts, args.each)
    found: dict[str, Any] = {"model": Path(model).name, "new": args.new, "temperatures": {}}
    found["prompts"] = {kind: len(some) for kind, some in prompts.items()}
    with ExitStack() as stack:
        peer = stack.enter_context(started(args.llama, model)) if args.llama else None
        for temperature in args.temperature:
            programs = {name: ours(engine, temperature) for name, engine in engines.items()}
            if peer and temperature == 0:
                programs["llama.cpp"] = theirs(peer)
            laws = {name: measured(engine, prompts, args.new, temperature) for name, engine in engines.items()}
            found["temperatures"][str(temperature)] = {"alpha": laws, **raced(programs, prompts, args.new, args.laps)}
            record = {"date": datetime.now(UTC).date().isoformat(), "machine": machine() | {"threads": args.threads}}
            record |= {"commands": [typed()], "figures": [found]}
            if args.json:
                args.json.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{table(found)}\n\nThe same by processor time:\n\n{table(found, OF_CPU)}\n")
    print({temperature: at["same"] for temperature, at in found["temperatures"].items()}, "texts are those of plain")


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
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
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


def ours(engine: Any, temperature: float) -> Run:
    def run(prompt: list[int], new: int) -> list[int]:
        return list(engine.generate([prompt], max_new_tokens=new, ignore_eos=True, temperature=temperature)[0].tokens)

    return run


def started(python: str, model: str) -> subprocess.Popen[str]:
    """Start llama.cpp in a process of its own."""
    command = [python, str(PEER), model, str(torch.get_num_threads())]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command, text=True, **pipes)


def theirs(peer: Any) -> Run:
    def run(prompt: list[int], new: int) -> list[int]:
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


def raced(programs: dict[str, Run], prompts: dict[str, list[list[int]]], new: int, laps: int) -> dict[str, Any]:
    """Return the speeds of every program by kind of prompt, and how many of its texts are those without a draft."""
    speeds: dict[str, Any] = {name: {kind: [] for kind in prompts} for name in programs}
    same = dict.fromkeys(programs, 0)
    for lap in range(laps):
        for kind, some in prompts.items():
            texts = {}
            for name in list(programs)[:: 1 if lap % 2 else -1]:
                began = time.perf_counter()
                for prompt in some:
                    programs[name](prompt, 1)
                wall, processor_time = time.perf_counter(), time.process_time()
                texts[name] = [programs[name](prompt, new) for prompt in some]
                took, used = time.perf_counter() - wall, time.process_time() - processor_time
                count, later = len(some) * new, len(some) * (new - 1)
                speeds[name][kind].append([count / took, later / max(1e-9, took - (wall - began)), count / used])
            for name in programs if lap == laps - 1 else ():
                same[name] += sum(map(list.__eq__, texts[name], texts["plain"]))
    medians = {
        name: {kind: list(map(median, zip(*laps, strict=True))) for kind, laps in by_kind.items()}
        for name, by_kind in speeds.items()
    }
    by_speed = {
        of: {name: {kind: three[place] for kind, three in kinds.items()} for name, kinds in medians.items()}
        for place, of in enumerate(SPEEDS)
    }
    return {**by_speed, "same": same}


def table(found: dict[str, Any], of: str = WHOLE) -> str:
    """Return the table of speeds over plain decoding, with alpha, by kind of prompt; the last rows are of all kinds."""
    parts = found["temperatures"].items()
    lines = ["kind of prompt"], ["---"]
    for temperature, at in parts:
        lines[0].append(f"T = {float(temperature):g}: plain, {of}")
        lines[0].extend(list(at[of])[1:])
        lines[1].extend(["---"] * len(at[of]))
    rows = [[kind, *(cell for _, at in parts for cell in cells(at, of, [kind]))] for kind in found["prompts"]]
    for name, speed in [("all", of), ("all, decoding alone", DECODING)][: 2 if of == WHOLE else 1]:
        rows.append([name, *(cell for _, at in parts for cell in cells(at, speed, list(found["prompts"])))])
    return "\n".join(f"| {' | '.join(line)} |" for line in (*lines, *rows))


def cells(at: dict[str, Any], of: str, kinds: list[str]) -> list[str]:
    """Return the cells of one temperature: plain speed, and of every draft the speed over it and alpha."""
    speeds = {name: len(kinds) / sum(1 / each[kind] for kind in kinds) for name, each in at[of].items()}
    found = [f"{speeds['plain']:.1f}"]
    for name in list(speeds)[1:]:
        laws = [at["alpha"][name][kind]["alpha"] for kind in kinds] if name in at["alpha"] else []
        alphas = [alpha for alpha in laws if alpha is not None]  # nothing may have been drafted
        found.append(f"{speeds[name] / speeds['plain']:.2f}" + (f" ({mean(alphas):.2f})" if alphas else ""))
    return found


if __name__ == "__main__":
    main()
