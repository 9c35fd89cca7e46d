"""The commands that measure the figures of the tables in README.md and RESULTS.md.

`measure` runs the commands of a measurement and writes what they print as JSON to `results/NAME.json`, with the date,
the machine, and a digest of the package's source, so that `tables` can refuse figures of different builds.
"""

import hashlib
import json
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
RESULTS = HERE / "results"
SAME = ("cpu", "cores", "threads", "torch", "transformers", "build")
"""The facts of the machine in which all measurements must agree, so that one document may hold them."""
ALONE = ("chat", "contexts", "race", "race-intel")
"""The measurements that need not agree."""

Command = tuple[str, ...]
"""The words after `python`. {prompts}, {news}, {target} and {draft} stand for files or folders, and {json} for the file
to which a script adds its figures instead of printing them."""


@dataclass(frozen=True)
class Measurement:
    """A measurement: its name, and the commands whose JSON becomes one file of `results/`."""

    name: str
    commands: tuple[Command, ...]


PAIR = ("--target", "{target}", "--draft", "{draft}")
PLAN = ("-m", "slipstream", "plan", "--json", "--prompts", "{prompts}")
PADDED_PLAN = (*PLAN, *PAIR, "--dtype", "bfloat16", "--max-new-tokens", "48", "--repetitions", "2")
SERVING = ("benchmarks/serving.py", "{prompts}", *PAIR, "--json", "{json}")
PADDED_BEAMS = ("benchmarks/beams.py", *PAIR, "--prompts", "{prompts}", "--count", "8", "--repetitions", "3")
SMALL_PLAN = (*PLAN, "--sample", "32", "--max-new-tokens", "64")

MEASUREMENTS = (
    Measurement("bench", (("-m", "slipstream", "bench", "--quick", "--repetitions", "5", "--json"),)),
    Measurement("rules", (("benchmarks/rules.py", "{prompts}", "--max-new-tokens", "48", "--json"),)),
    Measurement(
        "beams",
        (
            ("benchmarks/beams.py", "--max-new-tokens", "24", "--repetitions", "1", "--json"),
            (*PADDED_BEAMS, "--beams", "4", "--json"),
            (*PADDED_BEAMS, "--beams", "4", "--compile", "--json"),
        ),
    ),
    Measurement("exact_shape", (("benchmarks/exact_shape.py", "{prompts}", "--dtype", "bfloat16", "--json"),)),
    Measurement(
        "plan",
        (
            (*SMALL_PLAN, "--temperature", "0"),
            (*SMALL_PLAN, "--temperature", "1"),
            (*PADDED_PLAN, "--sample", "16", "--temperature", "0"),
            (*PADDED_PLAN, "--sample", "16", "--temperature", "1"),
            (*PADDED_PLAN, "--sample", "12", "--temperature", "0", "--compile", "--gamma", "3", "--gamma", "5"),
        ),
    ),
    Measurement("kernel", (("benchmarks/kernel.py", "--json"),)),
    Measurement("contexts", (("benchmarks/contexts.py", *PAIR, "--compile", "--json"),)),
    Measurement("recurrent", (("benchmarks/recurrent.py", "--repetitions", "3", "--tokens", "32"),)),
    Measurement(
        "serving",
        (
            (*SERVING, "--compile", "--prompts", "32", "--repetitions", "2"),
            (*SERVING, "--compile", "--part", "overhead", "--repetitions", "5"),
            (*SERVING, "--part", "prefix", "--context", "8192"),
            (*SERVING, "--part", "prompt", "--context", "8192"),
        ),
    ),
)

PADDED = {
    "target": (
        "benchmarks/cost_padded.py",
        "src/slipstream/demo/target",
        "build/target-134m",
        "--preset",
        "target-134m",
    ),
    "draft": ("benchmarks/cost_padded.py", "src/slipstream/demo/draft", "build/draft-24m", "--preset", "draft-24m"),
}
"""The commands that make the cost-padded models."""


def measure(measurement: Measurement, prompts: Path, news: Path) -> Path:
    """Run the commands in order, and write their JSON -> the file. Raises CalledProcessError if one fails."""
    for command in PADDED.values():
        if not (ROOT / command[2]).exists():
            run(command)
    began, collected = perf_counter(), RESULTS / f"{measurement.name}.part"
    collected.unlink(missing_ok=True)
    files = {"prompts": prompts, "news": news, "json": collected}
    files |= {role: Path(command[2]) for role, command in PADDED.items()}
    figures = []
    RESULTS.mkdir(exist_ok=True)
    for command in measurement.commands:
        printed = run([word.format(**files) for word in command])
        if "{json}" not in command:
            figures.append(json.loads(printed))
    if collected.exists():
        figures.append(json.loads(collected.read_text(encoding="utf-8")))
        collected.unlink()
    named = {role: Path(file).name if role != "json" else "FILE" for role, file in files.items()}
    named |= {role: command[2] for role, command in PADDED.items()}
    record = {
        "date": datetime.now(UTC).date().isoformat(),
        "seconds": round(perf_counter() - began),
        "machine": machine(),
        "commands": [" ".join(word.format(**named) for word in shown(command)) for command in measurement.commands],
        "figures": figures,
    }
    path = RESULTS / f"{measurement.name}.json"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return path


def run(command: Command | list[str]) -> str:
    """Run a command with this interpreter in the repository's root -> its standard output; stderr is passed through."""
    print("python", *command, file=sys.stderr, flush=True)
    return subprocess.run([sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout


def shown(command: Command) -> Command:
    """Return a command as a reader would type it."""
    return command[1:] if command[0] == "-m" else ("python", *command)


def typed() -> str:
    """Return this process's command as a reader would type it, without the folders of this machine."""
    words = (Path(word).name if Path(word).is_absolute() else word for word in sys.argv if word != "--write")
    script, *others = words
    return " ".join(("python", f"benchmarks/{Path(script).name}", *others))


def machine() -> dict[str, Any]:
    """Return the facts that figures depend on: processor, threads, versions, and a digest of the source."""
    import slipstream
    from slipstream.measure.environment import environment

    facts = environment(slipstream.load())
    omitted = ("date", "command", "rule", "target", "draft", "load_average", "platform")
    return {name: fact for name, fact in facts.items() if name not in omitted} | {"build": digest()}


def digest(folder: Path = ROOT / "src") -> str:
    """Return a hash of the package's source files, which identifies the build."""
    files = sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".cpp"))
    content = (f"{path.relative_to(folder).as_posix()}\0".encode() + path.read_bytes() for path in files)
    return hashlib.sha256(b"\0".join(content)).hexdigest()[:12]


def records(folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """Return the records of all measurements by name. Raises ValueError if machines or builds differ.

    Races and long contexts are measured alone, on several machines; their tables say where.
    """
    by_name = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}
    for fact in SAME:
        values = {name: record["machine"][fact] for name, record in by_name.items() if name not in ALONE}
        if len(set(values.values())) > 1:
            raise ValueError(
                f"the figures are of several builds or machines, which differ in {fact} ({values}): "
                "measure all of them again with `make figures`."
            )
    return by_name
