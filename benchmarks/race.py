"""Races Slipstream against llama.cpp, OpenVINO GenAI and transformers on the same models, prompts and threads.

python benchmarks/race.py --prepare --models FOLDER                     # makes the models' files, once
python benchmarks/race.py --models FOLDER --prompts PROMPTS.jsonl --llama NODE_FOLDER --openvino PYTHON
                          [--only smollm2 ...] [--budget SECONDS] [--json FILE] [--write]

Every program is a process of its own that keeps its models (`peers/worker.py`); all but the running one are stopped. A
run is a call for all prompts, one at a time or `rows` together; speed is the new tokens that came out / seconds of the
whole exchange, which are taken here, for all alike. End tokens are ignored, and a run with another number of tokens
than was asked is an error. A lap runs everything once, in an order that turns around (what is three times slower than
the fastest runs in every third lap); figures are medians of laps. Every run is in the file as soon as it ends, and a
call with the same settings goes on where the last one ended. With `--budget`, laps are made until that many seconds are
over, shared equally among the models.

First, processes are started afresh to take the time from the end of their imports to the first token, and their memory.
NODE_FOLDER: npm install --prefix NODE_FOLDER node-llama-cpp. PYTHON: one with openvino-genai. Both may be left out.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import measurements
import race_models
import race_table
import tables
from race_models import MODELS, PROGRAMS, Entry

PEERS = Path(__file__).parent / "peers"
Found = dict[str, Any]


@dataclass
class Program:
    """A process that continues prompts, and what it said of itself."""

    entry: Entry
    process: subprocess.Popen[str]
    imports: float = 0.0
    about: str = ""
    stopped: bool = field(default=False)

    @classmethod
    def start(cls, entry: Entry, args: argparse.Namespace) -> Program:
        """Start the process and wait for its imports."""
        command = {
            "llama.cpp": ["node", str(PEERS / "llama_cpp.mjs"), str(args.llama)],
            "OpenVINO": [str(args.openvino), str(PEERS / "openvino_peer.py")],
            "transformers": [sys.executable, str(PEERS / "transformers_peer.py")],
            "slipstream": [sys.executable, str(PEERS / "ours.py")],
        }[entry.program]
        log = None if args.verbose else subprocess.DEVNULL
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
        program, began = cls(entry, process), time.perf_counter()
        program.answer()
        program.imports = time.perf_counter() - began
        return program

    def ask(self, **message: Any) -> tuple[float, Found]:
        """Send a message -> the seconds until the answer, and the answer."""
        if self.stopped:
            self.process.send_signal(signal.SIGCONT)
        began, self.stopped = time.perf_counter(), False
        assert self.process.stdin
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()
        answer = self.answer()
        return time.perf_counter() - began, answer

    def answer(self) -> Found:
        """Read a line. Raises RuntimeError if the process has ended."""
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.entry.program} ended with {self.process.wait()}: --verbose shows what it wrote.")
        found: Found = json.loads(line)
        return found

    def load(self, args: argparse.Namespace) -> float:
        """Load the models -> seconds."""
        rows, files = max(args.rows), {"model": str(self.entry.model), "draft": str(self.entry.draft or "") or None}
        how = {"threads": args.threads, "rows": rows, "ways": self.entry.ways, **self.entry.options}
        seconds, answer = self.ask(do="load", **files, **how)
        self.about = answer["about"]
        return seconds

    def takes(self, way: str, rows: int) -> bool:
        """Whether a way can decode so many texts together: transformers drafts for one at a time only."""
        return rows == 1 or way == "plain" or self.entry.program != "transformers"

    def pause(self) -> None:
        """Stop the process, so that its waiting threads take no time from the others."""
        self.process.send_signal(signal.SIGSTOP)
        self.stopped = True

    @property
    def memory(self) -> dict[str, int]:
        """The megabytes that are resident now, and the most that ever were."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        kilobytes = {line.partition(":")[0]: line.split()[1] for line in lines if line.startswith(("VmRSS", "VmHWM"))}
        return {name: int(kilobytes[key]) // 1024 for name, key in (("resident", "VmRSS"), ("peak", "VmHWM"))}

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


# ---- measuring --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Book:
    """The file of all runs, which is written after each, so that an interrupted race goes on."""

    path: Path
    record: Found

    @classmethod
    def open(cls, path: Path, settings: Found, facts: Found) -> Book:
        """Read the file, or begin it. Exits if it is of other settings, or of another machine or build."""
        record = json.loads(path.read_text()) if path.exists() else {}
        kept = record.setdefault("machine", facts), record.setdefault("settings", settings)
        for mine, its in ((facts, kept[0]), (settings, kept[1])):
            if other := [name for name in mine if its.get(name) != mine[name]]:
                sys.exit(f"{path} was measured with other {', '.join(other)}: give another --json, or remove the file.")
        begun = {"about": {}, "runs": [], "first": [], "plans": []}
        commands = dict.fromkeys((*record.get("commands", ()), measurements.typed()))
        record |= {"date": datetime.now(UTC).date().isoformat(), "commands": [*commands]}
        record.setdefault("figures", [begun])
        return cls(path, record)

    @property
    def found(self) -> Found:
        found: Found = self.record["figures"][0]
        return found

    def has(self, part: str, **key: Any) -> bool:
        return any(all(run.get(name) == value for name, value in key.items()) for run in self.found[part])

    def add(self, part: str, key: Found, **figures: Any) -> None:
        self.found[part].append({**key, **figures, "busy": round(os.getloadavg()[0], 1)})
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.record, indent=1) + "\n")


def first_tokens(name: str, entries: Sequence[Entry], prompt: list[int], book: Book, args: argparse.Namespace) -> None:
    """Take, in fresh processes in turns, the seconds from imports to the first token, and the memory after it."""
    for lap in range(args.starts):
        for entry in entries:
            key = {"model": name, "program": entry.label, "lap": lap}
            if entry.program == "OpenVINO" or book.has("first", **key):
                continue
            # With the draft that it ends with and no other: each engine of ours loads its own target.
            with Program.start(replace(entry, ways=entry.ways[-1:]), args) as program:
                loading = program.load(args)
                token, _ = program.ask(**asked(entry.ways[-1], [prompt], 1, 1, 0.0, 0))
                book.add("first", key, imports=program.imports, loading=loading, token=token, **program.memory)


def asked(way: str, prompts: Any, batch: int, count: int, temperature: float, seed: int) -> Found:
    """Return the message that asks for a run."""
    how = {"batch": batch, "count": count, "temperature": temperature, "seed": seed}
    return {"do": "run", "way": way, "prompts": prompts, **how}


def race(name: str, entries: Sequence[Entry], prompts: Any, book: Book, args: argparse.Namespace) -> None:
    """Make laps for a model until all are made, or its share of the budget is over."""
    until = time.monotonic() + args.share
    cells = [(rows, temperature) for rows in args.rows for temperature in args.temperature]
    with ExitStack() as stack:
        field = [stack.enter_context(Program.start(entry, args)) for entry in entries]
        for program in field:
            program.load(args)
            book.found["about"][program.entry.label] = program.about
            for way in program.entry.ways:
                for rows in args.rows if program.takes(way, max(args.rows)) else [1]:  # warm up
                    program.ask(**asked(way, [prompt[:32] for prompt in prompts[:rows]], rows, 8, 0.0, 0))
            program.pause()
        for ours in (each for each in field if each.entry.program == "slipstream" and args.plans):
            predict(name, ours, prompts, book, args)
        for lap in range(args.laps):
            for rows, temperature in cells:
                turns = [(program, way) for program in field for way in program.entry.ways]
                for program, way in turns[:: -1 if lap % 2 else 1]:
                    if time.monotonic() > until:
                        return
                    if lap % 3 == 0 or not is_slow(name, program, way, (rows, temperature), book):
                        run(name, program, way, (rows, temperature, lap), prompts, book, args.count)


def is_slow(name: str, program: Program, way: str, cell: tuple[int, float], book: Book) -> bool:
    """Whether a way takes three times as long as the fastest in its cell: every third lap is enough for it."""
    runs = [run for run in book.found["runs"] if (run["model"], run["rows"], run["temperature"]) == (name, *cell)]
    own = [run["seconds"] for run in runs if (run["program"], run["way"]) == (program.entry.label, way)]
    return bool(own) and own[-1] > 3 * min(run["seconds"] for run in runs)


def run(name: str, program: Program, way: str, place: Any, prompts: Any, book: Book, count: int) -> None:
    """Run a way once, unless it is in the book or the program decodes one text at a time only."""
    rows, temperature, lap = place
    facts = {"rows": rows, "temperature": temperature, "lap": lap}
    key = {"model": name, "program": program.entry.label, "way": way, **facts}
    if book.has("runs", **key) or not program.takes(way, rows):
        return
    print(" ".join(map(str, key.values())), end=": ", file=sys.stderr, flush=True)
    seconds, answer = program.ask(**asked(way, prompts, rows, count, temperature, lap))
    program.pause()
    texts = answer.pop("tokens")
    if any(len(text) != count for text in texts) or len(texts) != len(prompts):
        raise RuntimeError(f"{key}: {[*map(len, texts)]} tokens instead of {count} for each of {len(prompts)} prompts.")
    tokens, marks = sum(map(len, texts)), [zlib.crc32(str(list(text)).encode()) for text in texts]
    book.add("runs", key, seconds=seconds, tokens=tokens, texts=marks if temperature == 0 else None, own=answer)
    print(f"{tokens / seconds:.1f} tokens/s", file=sys.stderr)


def predict(name: str, ours: Program, prompts: Any, book: Book, args: argparse.Namespace) -> None:
    """Let our planner predict the speed-up of every draft of a fixed length, one text at a time."""
    for way in ours.entry.ways:
        for temperature in args.temperature:
            key = {"model": name, "way": way, "temperature": temperature}
            if way.rpartition("@")[2].isdigit() and not book.has("plans", **key):
                _, answer = ours.ask(**{**asked(way, prompts, 1, args.count, temperature, 0), "do": "plan"})
                book.add("plans", key, **answer)


# ---- the command ------------------------------------------------------------------------------------------------


def main() -> None:
    args = arguments()
    if args.prepare:
        race_models.prepare(args.models, args.only)
    if args.laps:
        measured(args)
    if args.write:
        tables.write()
    if args.json.exists():
        print(race_table.report(json.loads(args.json.read_text())))


def measured(args: argparse.Namespace) -> None:
    """Race every model that is asked for."""
    settings = {"count": args.count, "prompts": args.limit}
    facts = {**measurements.machine(), "threads": args.threads}
    book, began = Book.open(args.json, settings, facts), time.monotonic()
    for place, name in enumerate(args.only):
        entries = list(field_of(name, args))
        prompts = race_models.prompts(MODELS[name], args.models, args.prompts, args.limit)
        first_tokens(name, entries, prompts[0], book, args)
        args.share = (args.budget - (time.monotonic() - began)) / (len(args.only) - place)
        race(name, entries, prompts, book, args)


def field_of(name: str, args: argparse.Namespace) -> Iterator[Entry]:
    """Yield the programs that race on a model: those that are here, with the files that are there."""
    here = {"slipstream": True, "transformers": True, "llama.cpp": args.llama, "OpenVINO": args.openvino}
    for entry in MODELS[name].entries(args.models, args.drafts):
        if here[entry.program] and entry.program in args.programs:
            if entry.model.exists() and (entry.draft is None or Path(entry.draft.partition("?")[0]).exists()):
                yield entry
            else:
                print(f"{entry.label} is left out on {name}: there is no {entry.model}", file=sys.stderr)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=Path("build/race"), help="the folder of the models' files")
    parser.add_argument("--prepare", action="store_true", help="make the files that are missing")
    parser.add_argument("--prompts", type=Path, help="prompts for the chat model: `prompt` or `turns` in each line")
    parser.add_argument("--llama", type=Path, help="the folder in which node-llama-cpp is installed")
    parser.add_argument("--openvino", type=Path, help="a Python with openvino-genai")
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=PROGRAMS)
    parser.add_argument("--only", nargs="+", choices=MODELS, default=["smollm2"], help="models; default: smollm2")
    parser.add_argument("--drafts", nargs="*", default=[], help="more drafts for the chat model, by our names")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--limit", type=int, default=8, help="prompts to use")
    parser.add_argument("--count", type=int, default=64, help="new tokens of every text")
    parser.add_argument("--laps", type=int, default=5, help="0 only prints what was measured")
    parser.add_argument("--starts", type=int, default=3, help="fresh processes of each program")
    parser.add_argument("--plans", action=argparse.BooleanOptionalAction, default=True, help="let our planner predict")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds, start-ups included")
    parser.add_argument("--json", type=Path, default=measurements.RESULTS / "race.json")
    parser.add_argument("--write", action="store_true", help="write the tables into the documents")
    parser.add_argument("--verbose", action="store_true", help="show what the programs write")
    return parser.parse_args()


if __name__ == "__main__":
    main()
