"""Writes every table of speeds in README.md and RESULTS.md from the JSON files of `results/`.

python benchmarks/tables.py            # write the tables again
python benchmarks/tables.py --check    # fail if a document is not what would be written
python benchmarks/tables.py --measure --prompts HumanEval.jsonl.gz --news NEWS.txt [--only NAME ...]

A table is between `<!-- table: NAME -->` and `<!-- end -->`, with machine, build, date and commands below it. With
`--measure`, `measurements.py` runs first; that takes about an hour, and nothing else should run. `race.py` measures the
tables of races, alone and on several machines, because it needs other programs. The prompts are
HumanEval as it is published (data set `openai_humaneval`); NEWS has a prompt per line, of any prose. transformers'
server needs `pip install accelerate`.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import chat_file
import kernel
import race_table
from measurements import HERE, MEASUREMENTS, ROOT, measure, records

DOCUMENTS = (ROOT / "README.md", HERE / "RESULTS.md")
MARKED = re.compile(r"<!-- table: (?P<name>[\w-]+) -->\n(?P<body>.*?)<!-- end -->", re.S)
SPEEDS = re.compile(r"tokens/s|tokens per second|\bms\b|microseconds|x plain|x generate|x transformers", re.I)

Record = Mapping[str, Any]


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def number(value: float | None, digits: int = 2) -> str:
    """Return a figure as text, or a dash for one that a contender does not have."""
    return "-" if value is None else f"{value:.{digits}f}"


# ---- the tables -------------------------------------------------------------------------------------------------


def bench_table(record: Record) -> str:
    """Return the table of `slipstream bench`: speed, ratios, acceptance, and where the time of a round goes."""
    rows = []
    for row in record["figures"][0]["rows"]:
        ratios = [row["ratio_to_plain"], row["ratio_to_transformers"]]
        parts = row["milliseconds"] or {}
        spent = " + ".join(number(parts[name], 1) for name in ("draft", "target", "accept", "rest")) if parts else "-"
        speed = row["tokens_per_second"]
        rows.append(
            [
                f"{row['temperature']:g}",
                f"{row['contender']}, gamma {row['gamma']}" if row["gamma"] else row["contender"],
                f"{speed['median']:.0f} ({speed['min']:.0f}-{speed['max']:.0f})",
                *(number(ratio and ratio["median"]) for ratio in ratios),
                number(row["alpha"]),
                number(row["mean_acceptance_length"]),
                spent,
                "-" if row["overhead"] is None else f"{100 * row['overhead']:.1f} %",
            ]
        )
    head = [
        "temperature",
        "contender",
        "tokens/s (min-max)",
        "x plain",
        "x generate",
        "alpha",
        "tokens per target call",
    ]
    return markdown([*head, "ms per round: draft + target + accept + rest", "overhead"], rows)


def rules_table(record: Record) -> str:
    """Return the table of how many tokens each acceptance rule keeps."""
    rows = []
    for row in record["figures"][0]["rows"]:
        low, high = row["interval"]
        against = "" if row["rule"] == "token" else f"{row['difference']:+.3f} [{low:+.3f}, {high:+.3f}]"
        rows.append([row["rule"], number(row["mean_acceptance_length"], 3), against, number(row["alpha"], 3)])
    return markdown(["rule", "mean acceptance length", "against token", "alpha"], rows)


def beams_table(record: Record) -> str:
    """Return the table of beam search and transformers' own: equal texts, acceptance, calls of the target, speed."""
    rows = []
    for figures in record["figures"]:
        settings = figures["settings"]
        pair = "cost-padded" if settings["target"] else "embedded"
        for row in figures["rows"]:
            equal = row["drafted"]
            ties = f", {equal['near_ties']} near-ties" if equal["near_ties"] else ""
            rows.append(
                [
                    f"{pair}, {'compiled' if settings['compile'] else 'eager'}",
                    str(row["beams"]),
                    f"{equal['equal']} of {row['prompts']}{ties}",
                    str(row["draft_beams"]),
                    number(row["alpha"], 3),
                    f"{row['target_calls']['plain']} / {row['target_calls']['drafted']} = {row['fewer_calls']:.2f}",
                    *(number(row[f"speed_{name}"]) for name in ("plain", "drafted")),
                ]
            )
    head = ["models", "w", "prompts with transformers' texts and scores", "u", "top w of p in top u of q"]
    return markdown([*head, "target calls, plain / drafted", "plain, x transformers", "drafted, x transformers"], rows)


def exact_shape_table(record: Record) -> str:
    """Return the table of how many greedy texts differ between plain and speculative decoding, and of their speeds."""
    ways = {"": "any shape", "exact_shape": "one shape (`exact_shape`)", "compile": "any shape, compiled"}
    rows = [
        [
            f"{row['dtype']}, {ways[row['way']]}",
            f"{row['differ']} of {row['texts']}",
            f"{row['plain']:.0f}",
            f"{row['speculative']:.0f}",
        ]
        for row in record["figures"][0]
    ]
    return markdown(["what", "texts that differ", "tokens/s plain", "tokens/s speculative"], rows)


def plan_table(record: Record) -> str:
    """Return the table of the predicted and measured speed-up of every plan."""
    rows = []
    for plan in record["figures"]:
        facts, machine = plan["figures"], plan["machine"]
        outlook = facts["outlooks"]["1"][facts["draft"]]
        best = next(each for each in outlook["predictions"] if each["gamma"] == outlook["best"])
        runs = facts["verifications"]
        measured = (
            f"{runs[0]['factor']:.2f} ({min(runs[0]['factors']):.2f}-{max(runs[0]['factors']):.2f})" if runs else "-"
        )
        rows.append(
            [
                f"{machine['target']['parameters'] / 1e6:.0f} M{', compiled' if plan['compile'] else ''}",
                f"{facts['settings']['sampling']['temperature']:g}",
                number(outlook["alpha"]),
                number(best["c"]),
                number(best["curve"]),
                str(best["gamma"]),
                f"{best['factor']:.2f} ({best['low']:.2f}-{best['high']:.2f})",
                measured,
                f"{100 * runs[0]['difference']:+.1f} %" if runs else "-",
            ]
        )
    head = [
        "target",
        "temperature",
        "alpha",
        "c",
        "T(gamma+1)/T(1)",
        "gamma",
        "predicted, x plain",
        "measured, x plain",
    ]
    return markdown([*head, "difference"], rows)


def kernel_table(record: Record) -> str:
    """Return the tables of our products and oneDNN's, and of our attention and torch's."""
    return kernel.table(record["figures"][0])


def contexts_table(record: Record) -> str:
    """Return the tables of what long contexts cost: prompts, attention, and rounds."""
    [found] = record["figures"]
    prompts = []
    for row in found["prefill"]:
        ours, other = row["ours"], row["transformers"]
        prompts.append([str(row["tokens"]), number(ours), number(other), number(ours / other)])
    rounds = [
        [str(row["context"]), *(number(row[name], 1) for name in ("plain", "round")), number(row["ratio"])]
        for row in found["rounds"]
    ]
    attentions = []
    for row in found["attention"]["rows"]:
        speed = row["bytes"] / row["seconds"]
        case = [str(row[name]) for name in ("heads", "format", "threads", "slots", "tokens")]
        attentions.append(
            [*case, f"{speed / 1e9:.1f}", f"{row['bandwidth'] / 1e9:.1f}", number(speed / row["bandwidth"])]
        )
    head = ["heads", "cache", "threads", "slots", "tokens", "GB/s", "the memory's GB/s", "ratio"]
    return "\n\n".join(
        (
            markdown(["tokens of a prompt", "ours, s", "transformers, s", "ours / transformers"], prompts),
            markdown(["tokens before", "plain step, ms", "round, ms", "round / plain step"], rounds),
            markdown(head, attentions),
        )
    )


def recurrent_table(record: Record) -> str:
    """Return the table of a round of hybrid models over a bare pass of as many tokens."""
    rows = []
    for row in record["figures"][0]:
        times, over = row["milliseconds"], row["over a bare pass"]
        size = f"{row['family']}, {row['parameters'] / 1e6:.0f} M"
        ways = (number(over[name]) for name in ("one pass", "two passes"))
        rows.append([size, *(number(times[name], 0) for name in ("plain step", "bare", "one pass")), *ways])
    head = ["model", "plain step, ms", "bare pass of six, ms", "round, ms", "round / bare pass", "with a second pass"]
    return markdown(head, rows)


def serving_table(record: Record) -> str:
    """Return the table of our server and others by number of streams; ratios are medians over repetitions."""
    race, rows = record["figures"][0]["race"], []
    for row in sorted(race, key=lambda row: row["streams"]):
        times = [None if row.get(name) is None else 1e3 * row[name] for name in ("first_p50", "gap_p50", "gap_p99")]
        speeds = (number(row["tokens_per_second"], 0), number(over_transformers(row, race)))
        rows.append([str(row["streams"]), row["contender"], *speeds, *(number(time, 0) for time in times)])
    times = ["first token, ms", "gap, median, ms", "gap, 99 %, ms"]
    return markdown(["streams", "contender", "tokens/s", "x transformers", *times], rows)


def over_transformers(row: Record, race: Sequence[Record]) -> float | None:
    """Return the median ratio of a contender's speed to that of transformers' server, by repetition, if that ran."""
    for other in race:
        if other["contender"] == "transformers serve" and other["streams"] == row["streams"]:
            return median(ours / peer for ours, peer in zip(row["runs"], other["runs"], strict=True))
    return None


def waits_table(record: Record) -> str:
    """Return the table of the server's other waiting times: chats, short prompts and overhead."""
    found = record["figures"][0]
    [prefix], [prompt] = found["prefix"], found["prompt"]
    turns = [median(run[turn] for run in prefix["runs"]) for turn in ("first", "second")]
    bits = "the same text" if all(run["same"] for run in prefix["runs"]) else "ANOTHER TEXT"
    rows = [
        [
            f"first token of the second turn of a chat of {prefix['chat']} tokens / of its first turn",
            f"{prefix['ratio']:.3f}",
            f"{turns[1]:.3f} / {turns[0]:.3f} s; {bits} as without the cache",
        ],
        [
            f"first token of 50 tokens while {prompt['tokens']:,} others are read",
            f"{prompt['beside']:.3f} s",
            f"alone {prompt['alone']:.3f} s; the long one {prompt['long']:.3f} s",
        ],
    ]
    if "overhead" in found:
        [overhead] = found["overhead"]
        runs = ", ".join(number(run["ratio"]) for run in overhead["runs"])
        rows.insert(0, ["one stream, server / library", f"{overhead['ratio']:.3f}", f"by repetition {runs}"])
    return markdown(["what", "measured", "from"], rows)


TABLES: dict[str, tuple[str, Callable[[Record], str]]] = {
    **{name: ("race", make) for name, make in race_table.TABLES.items()},
    **{f"{name}-intel": ("race-intel", make) for name, make in race_table.TABLES.items() if name != "speed"},
    "chat": ("chat", lambda record: chat_file.table(record["figures"][0])),
    "bench": ("bench", bench_table),
    "rules": ("rules", rules_table),
    "beams": ("beams", beams_table),
    "exact-shape": ("exact_shape", exact_shape_table),
    "plan": ("plan", plan_table),
    "kernel": ("kernel", kernel_table),
    "contexts": ("contexts", contexts_table),
    "recurrent": ("recurrent", recurrent_table),
    "serving": ("serving", serving_table),
    "waits": ("serving", waits_table),
}
"""The tables by their name in a document: the measurement, and the function that makes the table from its record."""


# ---- documents --------------------------------------------------------------------------------------------------


def section(name: str, found: Mapping[str, Record]) -> str:
    """Return the text between the marks of a table. Raises ValueError for an unknown name."""
    if name not in TABLES:
        raise ValueError(f"there is no table {name}: the tables are {', '.join(TABLES)}.")
    source, write = TABLES[name]
    if source not in found:
        alone = {"race": "python benchmarks/race.py", "chat": "python benchmarks/chat_file.py"}
        how = alone.get(source.partition("-")[0], "make figures")
        return f"*Not measured with this build yet: `{how}` does it. Earlier ones: see its history.*\n"
    record = found[source]
    about = race_table.models(record["figures"][0])[0] if name == "speed" else ""
    return f"{write(record)}\n\n{place(record, about)}\n"


def place(record: Record, about: str = "") -> str:
    """Return the line below a table: machine, build, date and commands: those that name what it is `about`, or all."""
    facts = record["machine"]
    versions = ", ".join(f"{name} {facts[name]}" for name in ("torch", "transformers", "python"))
    bfloat16 = f", bfloat16 {facts['bfloat16']}" if facts.get("bfloat16") else ""
    machine = f"{facts['cpu']}, {facts['cores']} cores, {facts['threads']} threads{bfloat16}"
    build = f"slipstream {facts['slipstream']}, source {facts['build']}"
    chosen = [command for command in record["commands"] if about in command] or record["commands"]
    return f"*{machine}; {versions}; {build}; {record['date']}.* {'; '.join(f'`{command}`' for command in chosen)}"


def filled(text: str, found: Mapping[str, Record]) -> str:
    """Return a document with all its tables regenerated. Raises ValueError for a mark that has no end."""
    if text.count("<!-- table: ") != len(MARKED.findall(text)):
        raise ValueError("a table's mark has no end: write `<!-- end -->` on the line after the table.")
    return MARKED.sub(lambda mark: f"<!-- table: {mark['name']} -->\n{section(mark['name'], found)}<!-- end -->", text)


def unmarked(text: str) -> Iterator[str]:
    """Yield the heading rows of tables of speeds that are outside of all marks, so that nothing generates them."""
    lines = MARKED.sub("", text).splitlines()
    for head, rule in pairwise(lines):
        if re.match(r"\|\s*:?---", rule) and SPEEDS.search(head):
            yield head


def faults(documents: Mapping[str, str], found: Mapping[str, Record]) -> list[str]:
    """Return what is wrong with documents, given by name: tables that are not up to date, and unmarked ones."""
    wrong = [
        f"{name} is not what `python benchmarks/tables.py` writes"
        for name, text in documents.items()
        if filled(text, found) != text
    ]
    return wrong + [
        f"{name}: no command writes the table {head}" for name, text in documents.items() for head in unmarked(text)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--prompts", type=Path, help="HumanEval.jsonl.gz")
    parser.add_argument("--news", type=Path, help="a prompt per line, any prose")
    parser.add_argument("--only", nargs="*", choices=[each.name for each in MEASUREMENTS], help="measure only these")
    args = parser.parse_args()
    if args.measure:
        for name in ("prompts", "news"):
            if not (file := getattr(args, name)) or not file.is_file():
                parser.error(f"--{name} is {file}, but has to be a file: give --prompts and --news.")
        for each in MEASUREMENTS:
            if args.only is None or each.name in args.only:
                print(f"wrote {measure(each, args.prompts.absolute(), args.news.absolute())}", file=sys.stderr)
    if args.check:
        wrong = faults({path.name: path.read_text(encoding="utf-8") for path in DOCUMENTS}, records())
        sys.exit("\n".join(wrong) or 0)
    write()


def write() -> None:
    """Write the tables of all documents."""
    found = records()
    for path in DOCUMENTS:
        path.write_text(filled(path.read_text(encoding="utf-8"), found), encoding="utf-8")


if __name__ == "__main__":
    main()
