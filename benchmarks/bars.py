"""Measures the bars (limits on times and ratios) that a fast implementation has to reach, and prints a table of them.

python benchmarks/bars.py --target build/target-134m --draft build/draft-24m [--compile] [--only PART ...]
                          [--json FILE] [--peers PEER.json ...]

Parts: `steps` (the time of a pass over one and six tokens of a row, in float32 and bfloat16, and the memory's read
bandwidth), `race` (batch 1, gamma 5, compared with transformers), `batch` (batches of 1, 8 and 16, with drafts of fixed
lengths and of those that gamma="auto" chooses). With `--json`, parts measured by separate commands add up in one file.
`--peers` adds what `benchmarks/peers/` measured on the same models.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

import slipstream
from slipstream.bench import PLAIN, PROMPTS, SPECULATIVE, BenchSettings, Side, line_up, measure, ours
from slipstream.core.protocols import Scorer
from slipstream.decoding.controllers import controller
from slipstream.engine.engine import Engine
from slipstream.kernels.packing import PackedLinear
from slipstream.measure.environment import environment, scorers
from slipstream.text.prompts import gather

PARTS = ("steps", "race", "batch")
BATCHES = (1, 8, 16)
BATCH_GAMMAS = (1, 2, 3, 5)  # the larger the batch, the fewer drafted tokens fill the processor, so several are tried
WORTHWHILE = 0.7  # the least alpha at which speculation must be faster than plain decoding for a batch of 8
ROWS = 6  # tokens of a pass: the pending one and gamma = 5 drafted ones


def main() -> None:
    args = arguments()
    found = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}
    for part in args.only:
        say(f"measuring {part}")
        old = [row for row in found.get("race", []) if row["temperature"] not in args.temperature]
        passes = found.get("steps", {})
        found |= {"steps": steps, "race": race, "batch": batch}[part](args)
        if part == "race":
            found["race"] = old + found["race"]
        if part == "steps":
            found["steps"] = passes | found["steps"]
        if args.json:
            args.json.write_text(json.dumps(found, indent=1))
    for path in args.peers:
        peer = json.loads(path.read_text())
        found.setdefault("peers", {})[peer["peer"]] = peer
    print(table(found))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--dtype", default="bfloat16", help="of the parts race and batch")
    parser.add_argument("--step-dtypes", nargs="*", default=["float32", "bfloat16"], help="of the part steps")
    parser.add_argument("--compile", action="store_true", help="measure compiled execution too")
    parser.add_argument("--only", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--prompts", help="a file of prompts (default: those built into slipstream bench)")
    parser.add_argument("--limit", type=int, default=8, help="prompts to use")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--temperature", type=float, nargs="*", default=[0.0, 1.0], help="of the part race")
    parser.add_argument("--gamma", type=int, default=5)
    parser.add_argument("--batch", type=int, nargs="*", default=BATCHES, help="of the part batch")
    parser.add_argument("--json", type=Path, help="add what is measured to this file")
    parser.add_argument("--peers", type=Path, nargs="*", default=[])
    return parser.parse_args()


# ---- measuring --------------------------------------------------------------------------------------------------


def engines(args: argparse.Namespace, dtype: str) -> dict[str, Engine]:
    """Return the eager engine and, with --compile, the compiled one, each with its own copy of the weights."""
    kinds: dict[str, dict[str, Any]] = {"eager": {}, **({"compiled": {"compile": True}} if args.compile else {})}
    return {
        kind: slipstream.load(args.target, args.draft, dtype=dtype, gamma=args.gamma, **how)
        for kind, how in kinds.items()
    }


def prompts(args: argparse.Namespace) -> list[Any]:
    texts = [item.prompt for item in gather([], args.prompts, False)] if args.prompts else list(PROMPTS)
    return texts[: args.limit]


def steps(args: argparse.Namespace) -> dict[str, Any]:
    """Return the milliseconds of a pass over 1 and 6 new tokens after 128, by model, dtype and execution.

    With them come the bytes of the weights that a pass reads, and the memory's bandwidth in bytes per second.
    """
    times: dict[str, Any] = {}
    for dtype in args.step_dtypes:
        for kind, engine in engines(args, dtype).items():
            for role, scorer in zip(("target", "draft"), scorers(engine.decoder), strict=True):
                times[f"{role} {dtype} {kind}"] = {
                    **{str(width): 1000 * seconds for width, seconds in pass_times(scorer).items()},
                    "bytes": matrix_bytes(scorer),
                }
                say(f"{role} {dtype} {kind}: {times[f'{role} {dtype} {kind}']}")
            del engine, scorer
            gc.collect()
    return {"steps": times, "bandwidth": read_bandwidth()}


@torch.inference_mode()
def pass_times(scorer: Scorer, context: int = 128, count: int = 30) -> dict[int, float]:
    """Return the median seconds of a pass by the number of new tokens; the widths alternate."""
    text = [1 + i % 1000 for i in range(context)]
    scorer.free(range(len(scorer.lengths)))  # a drafter's cache may still hold its last text
    scorer.add(1)
    scorer.prefill([text])
    times: dict[int, list[float]] = {1: [], ROWS: []}
    for number in range(5 + count):
        for width, laps in times.items():
            tokens = torch.tensor([text[:width]], device=scorer.device)
            start = perf_counter()
            scorer.extend(tokens, [width])[0, -1, 0].item()
            if number >= 5:  # the first ones compile and allocate
                laps.append(perf_counter() - start)
            scorer.rollback([context])
    scorer.free([0])
    return {width: median(laps) for width, laps in times.items()}


def matrix_bytes(scorer: Scorer) -> int:
    """Return the bytes of the weight matrices that every pass reads."""
    model = getattr(scorer, "model")  # noqa: B009
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear | PackedLinear)]
    return sum(m.in_features * m.out_features for m in linear) * model.dtype.itemsize


def read_bandwidth(count: int = 15) -> float:
    """Return the bytes per second of summing 512 MB, far more than caches hold: the best run, as this is a limit."""
    data, times = torch.ones(128 * 2**20), []
    for _ in range(count):
        start = perf_counter()
        data.sum().item()
        times.append(perf_counter() - start)
    return data.numel() * data.element_size() / min(times)


def race(args: argparse.Namespace) -> dict[str, Any]:
    """Measure batch 1 at temperature 0 and 1: our decoding, eager and compiled, and transformers'."""
    settings = BenchSettings((args.gamma,), (1,), tuple(args.temperature), args.max_new_tokens, args.repetitions)
    kinds = engines(args, args.dtype)
    engine = kinds.pop("eager")
    others = [Side(other, scorers(engine.decoder)[1].name, kind) for kind, other in kinds.items()]
    rivals = [each for each in line_up(engine, settings, others) if each.name != "transformers lookup"]
    report = measure(engine, prompts(args), settings, rivals, on_run=progress)
    return {"environment": environment(engine), "race": [asdict(row) for row in report.rows]}


def batch(args: argparse.Namespace) -> dict[str, Any]:
    """Measure batches of the same prompts, plain and speculative; each row accepts its own number of tokens."""
    settings = BenchSettings(BATCH_GAMMAS, args.batch, (0.0,), args.max_new_tokens, args.repetitions)
    rows = []
    for kind, engine in engines(args, args.dtype).items():
        if kind == "compiled":
            draft: Any = scorers(engine.decoder)[1]
            draft.make_draft_graphs(BATCH_GAMMAS)  # a graph for chains of every size that is measured
        contenders = [each for each in line_up(engine, settings) if each.draft or each.name == PLAIN]
        by_clock = replace(engine.decoder, controller=controller("auto", max(BATCH_GAMMAS)))
        contenders.append(replace(ours(SPECULATIVE, by_clock), draft=contenders[-1].draft))
        rivals = [replace(each, execution=kind) for each in contenders]
        rows += measure(engine, prompts(args), settings, rivals, on_run=progress).rows
    return {"batch": [asdict(row) for row in rows]}


def progress(done: int, count: int, name: str) -> None:
    print(f"\r{done + 1}/{count} {name:40}", end="\n" if done + 1 == count else "", file=sys.stderr, flush=True)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# ---- the table --------------------------------------------------------------------------------------------------


Line = tuple[str, str, float | None, str]
"""A line of the table: what is measured, its bar ("<= 1.3"; "" for none), the figure, and where it comes from."""


def table(found: dict[str, Any]) -> str:
    """Return a Markdown table of every bar with the measured figure, or "not measured"."""
    lines = [*race_lines(found), *step_lines(found), *batch_lines(found), *limit_lines(found), *peer_lines(found)]
    text = ["| what | bar | measured | reached | from |", "|---|---|---|---|---|"]
    for what, bar, value, how in lines:
        shown = "not measured" if value is None else f"{value:.2f}"
        text.append(f"| {what} | {bar} | {shown} | {reached(bar, value)} | {how} |")
    facts = found.get("environment")
    place = f"\n{facts['cpu']}, {facts['threads']} threads, torch {facts['torch']}, " if facts else ""
    versions = f"transformers {facts['transformers']}, {facts['target']['dtype']}, cost-padded models" if facts else ""
    return "\n".join(text) + place + versions


def reached(bar: str, value: float | None) -> str:
    if not bar or value is None:
        return ""
    sign, limit = bar.split()
    return "yes" if (value <= float(limit) if sign == "<=" else value >= float(limit)) else "**no**"


def race_lines(found: dict[str, Any]) -> Iterator[Line]:
    def row(name: str, execution: str | None, heat: float) -> dict[str, Any] | None:
        rows = (each for each in found.get("race", []) if each["temperature"] == heat)
        return next((each for each in rows if (each["contender"], each["execution"]) == (name, execution)), None)

    def line(bar: str, ours: tuple[str, str | None], peer: str, heat: float, what: Callable[[Any], float]) -> Line:
        one, other = row(*ours, heat), row(peer, None, heat)
        kind = {milliseconds: "round", speed: "tokens/s"}[what]
        name = f"{kind}, temperature {heat:g}: {' '.join(filter(None, ours))} / {peer}"
        if not one or not other:
            return name, bar, None, ""
        how = f"{what(one):.1f} / {what(other):.1f}"
        alpha = f"; alpha {one['alpha']:.2f}" if one["alpha"] else ""
        return name, bar, what(one) / what(other), how + alpha

    fast, eager = ("slipstream speculative", "compiled"), ("slipstream speculative", "eager")
    for heat in (0.0, 1.0):
        yield line("<= 0.33", fast, "transformers assisted", heat, milliseconds)
        yield line("", eager, "transformers assisted", heat, milliseconds)
        yield line(">= 2.5", fast, "transformers assisted", heat, speed)
        yield line("", fast, "transformers auto", heat, speed)
        yield line(">= 1.2", eager, "transformers assisted", heat, speed)
        yield line("", eager, "transformers auto", heat, speed)
        yield line(">= 3" if heat == 0 else "", fast, "transformers generate", heat, speed)
        yield line("", eager, "transformers generate", heat, speed)
        yield line("", ("slipstream plain", "compiled"), "transformers generate", heat, speed)


def milliseconds(row: dict[str, Any]) -> float:
    return row["milliseconds_per_call"]["median"]


def speed(row: dict[str, Any]) -> float:
    return row["tokens_per_second"]["median"]


def step_lines(found: dict[str, Any]) -> Iterator[Line]:
    for dtype in ("float32", "bfloat16"):
        for kind, bar in (("compiled", "<= 1.3"), ("eager", "")):
            times = found.get("steps", {}).get(f"target {dtype} {kind}")
            what = f"target, six rows / one row, {dtype} {kind}"
            ratio = times and times[str(ROWS)] / times["1"]
            yield what, bar, ratio, f"{times[str(ROWS)]:.1f} / {times['1']:.1f} ms" if times else ""


def batch_lines(found: dict[str, Any]) -> Iterator[Line]:
    """Yield lines on batch 8 over batch 1, each at its fastest setting: of all settings, and of speculative ones."""
    for kind, bar in (("compiled", ">= 2.5"), ("eager", "")):
        rows = [row for row in found.get("batch", []) if row["execution"] == kind]
        yield batch_line(f"{kind}, batch 8 / batch 1", bar, rows)
        yield batch_line(f"speculative {kind}, batch 8 / batch 1", "", [row for row in rows if row["draft"]])
        yield from (by_clock_line(kind, row) for row in rows if row["draft"] and row["gamma"] is None)


def by_clock_line(kind: str, row: dict[str, Any]) -> Line:
    """Return the line of drafts whose lengths gamma="auto" chooses, over plain decoding in the same repetitions."""
    what, bar = f'{kind}, batch {row["batch"]}: gamma="auto" / plain', ">= 0.98"
    if kind == "compiled" and row["batch"] == 8 and row["alpha"] and row["alpha"] >= WORTHWHILE:
        bar = ">= 1.15"
    return what, bar, row["ratio_to_plain"]["median"], f"{speed(row):.0f} tokens/s; alpha {row['alpha'] or 0:.2f}"


def batch_line(what: str, bar: str, rows: list[dict[str, Any]]) -> Line:
    if not rows:
        return what, bar, None, ""
    best = {size: max((row for row in rows if row["batch"] == size), key=speed) for size in (1, 8)}
    speeds = [f"{speed(row):.0f} ({_how(row)})" for row in best.values()]
    return what, bar, speed(best[8]) / speed(best[1]), f"{speeds[1]} / {speeds[0]} tokens/s"


def _how(row: dict[str, Any]) -> str:
    return f"gamma {row['gamma'] or 'auto'}" if row["draft"] else "plain"


def limit_lines(found: dict[str, Any], dtype: str = "bfloat16", gamma: int = ROWS - 1) -> Iterator[Line]:
    """Yield lines that compare measured times with the time of reading every weight matrix once from memory."""
    if f"target {dtype} eager" not in found.get("steps", {}):
        return
    pace = found["bandwidth"]
    target, draft = (found["steps"][f"{role} {dtype} eager"]["bytes"] for role in ("target", "draft"))
    limit = 1000 * (target + gamma * draft) / pace
    yield "memory read here, GB/s", "", pace / 1e9, "sum of 512 MB of float32, best of 15"
    yield "target's matrices once, ms", "", 1000 * target / pace, f"{target / 1e6:.0f} MB"
    for kind in ("compiled", "eager"):
        if times := found["steps"].get(f"target {dtype} {kind}"):
            yield f"plain step, {kind} / memory limit", "", times["1"] * pace / target / 1000, f"{times['1']:.1f} ms"
        rounds = [
            row["milliseconds"]["round"]
            for row in found.get("race", [])
            if (row["contender"], row["execution"], row["temperature"]) == ("slipstream speculative", kind, 0)
        ]
        if rounds:
            yield f"round, {kind} / memory limit", "", rounds[0] / limit, f"{rounds[0]:.1f} / {limit:.1f} ms"


def peer_lines(found: dict[str, Any]) -> Iterator[Line]:
    ours = {
        row["execution"]: row
        for row in found.get("race", [])
        if row["contender"] == "slipstream speculative" and row["temperature"] == 0
    }
    for name, peer in found.get("peers", {}).items():
        for figure, value in peer.items():
            if isinstance(value, int | float):
                yield f"{name}: {figure}", "", value, peer.get("how", "")
        for kind, row in ours.items():
            if peer_round := peer.get("round_ms"):
                mine = row["milliseconds"]["round"]
                yield f"round, ours {kind} / {name}", "", mine / peer_round, f"{mine:.1f} / {peer_round:.1f} ms"


if __name__ == "__main__":
    main()
