"""Measures how much a server loses beside other programs: a busy loop on each core, the idle machine, in turns.

python benchmarks/neighbours.py [--compile] [--rounds 3] [--spells 3] [--json FILE] [-- more options of the server]

Each turn starts `slipstream serve` with its default settings and the embedded pair, beside loops or not, and waits
until it says that it is ready. Then it asks for texts in spells, which are beside loops by turns, so that the same
server meets both within seconds. The report holds medians of seconds until ready and of tokens per second, and both
ratios: the fair share of the processor is 0.5 of the speed. `others` is the share of the machine that programs used
that the benchmark did not start; a turn in which that was more than 0.1 of a core is repeated.
"""

import argparse
import json
import os
import re
import resource
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

TEXT = {"prompt": "def moving_average(values, window):", "max_tokens": 64, "temperature": 0, "ignore_eos": True}
LOOPS = {"idle": 0, "beside": os.cpu_count() or 1}
"""The kinds of spells and starts, and how many busy loops run beside them."""

TEXTS = 5  # of a spell
MOST_OTHERS, TRIES = 0.1, 4


def main() -> None:
    """Measure, and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--compile", action="store_true", help="serve graphs; they are made before anything is measured"
    )
    parser.add_argument("--rounds", type=int, default=3, help="servers that start idle, and beside loops")
    parser.add_argument("--spells", type=int, default=3, help="of each kind that each server answers in")
    parser.add_argument("--json", type=Path, help="also write the report here")
    parser.add_argument("serve", nargs="*", help="options of `slipstream serve`")
    args = parser.parse_args()
    options = ["--compile"] * args.compile + args.serve
    turn(options, "idle", 1)  # builds kernels, and graphs
    turns = [undisturbed(options, start, args.spells) for _ in range(args.rounds) for start in LOOPS]
    report = {"options": options, **machine(), **summary(turns), "turns": turns}
    print(json.dumps(report, indent=1))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


def machine() -> dict[str, Any]:
    """Return the facts that the figures depend on."""
    import torch

    from slipstream.kernels.library import described
    from slipstream.kernels.threads import cores_for_us

    return {
        "cpu": described("model name"),
        "cores": os.cpu_count(),
        "threads": cores_for_us(),
        "torch": torch.__version__,
    }


def summary(turns: list[dict[str, Any]]) -> dict[str, float]:
    """Return the medians, and the ratios of both kinds."""
    ready = {kind: statistics.median(each["ready_s"] for each in turns if each["start"] == kind) for kind in LOOPS}
    speed = {kind: statistics.median(speed for each in turns for speed in each[kind]) for kind in LOOPS}
    return {
        **{f"{kind}_ready_s": ready[kind] for kind in LOOPS},
        **{f"{kind}_tokens_per_second": speed[kind] for kind in LOOPS},
        "speed_kept": speed["beside"] / speed["idle"],
        "start_up_longer": ready["beside"] / ready["idle"],
    }


def undisturbed(options: list[str], start: str, spells: int) -> dict[str, Any]:
    """Do a turn, again while others used the machine, at most `TRIES` times."""
    for _ in range(TRIES):
        done = turn(options, start, spells)
        if done["others"] <= MOST_OTHERS:
            break
    return done


def turn(options: list[str], start: str, spells: int) -> dict[str, Any]:
    """Start a server and ask it for texts -> seconds until it was ready, and the speed of every text of both kinds."""
    began, busy, ours = time.perf_counter(), machine_seconds(), our_seconds()
    speeds: dict[str, list[float]] = {kind: [] for kind in LOOPS}
    with ExitStack() as stack:
        with busy_loops(LOOPS[start]):
            url = stack.enter_context(server(options))
            ready = time.perf_counter() - began
        ask(url)
        for kind in [*LOOPS] * spells:
            with busy_loops(LOOPS[kind]):
                speeds[kind] += [ask(url) for _ in range(TEXTS)]
    others = (machine_seconds() - busy - (our_seconds() - ours)) / (time.perf_counter() - began)
    return {"start": start, "ready_s": ready, **speeds, "others": others}


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Keep each of the first `count` cores busy with a program of its own."""
    loops = [subprocess.Popen(["taskset", "-c", str(core), "sh", "-c", "while :; do :; done"]) for core in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@contextmanager
def server(options: list[str]) -> Iterator[str]:
    """Start a server -> its URL, as soon as it is ready."""
    command = [sys.executable, "-m", "slipstream", "serve", "--port", "0", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        found = next(filter(None, (re.search(r"is ready at (\S+)", line) for line in process.stderr)), None)
        if found is None:
            raise SystemExit(f"the server ended with exit code {process.wait()}")
        try:
            yield found[1]
        finally:
            process.send_signal(signal.SIGTERM)


def ask(url: str) -> float:
    """Ask for a text -> tokens per second."""
    began = time.perf_counter()
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(TEXT).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        tokens = json.load(answer)["usage"]["completion_tokens"]
    return float(tokens) / (time.perf_counter() - began)


def machine_seconds() -> float:
    """Return the processor seconds that all programs have used."""
    user, nice, system, _, _, irq, soft = map(int, Path("/proc/stat").read_text().split()[1:8])
    return (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK")


def our_seconds() -> float:
    """Return those of this program and of the ones that it started and that have ended."""
    return sum(
        used.ru_utime + used.ru_stime
        for used in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


if __name__ == "__main__":
    main()
