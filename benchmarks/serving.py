"""Compares our server with `transformers serve` (continuous batching) on the same models, prompts and lengths, greedy.

python benchmarks/serving.py HumanEval.jsonl.gz [--target DIR --draft DIR --dtype bfloat16 --compile] [--json FILE]
python benchmarks/serving.py HumanEval.jsonl.gz --part arrivals --trace azure-llm-2023-conversation.csv.gz
python benchmarks/serving.py HumanEval.jsonl.gz --part prefix      # the second turn of a long chat
python benchmarks/serving.py HumanEval.jsonl.gz --part prompt      # a short prompt while a long one is read
python benchmarks/serving.py HumanEval.jsonl.gz --part overhead    # the server over the library, request by request

Both servers run and take turns; the one that is not measured is stopped (SIGSTOP). Figures are medians over the
repetitions. "plain" is our server without speculation, "library" the engine without a server, one prompt at a time. A
gap is the time between two pieces of a streamed text; ours may hold several tokens. `transformers serve` needs the
package accelerate; its cache gets as many blocks as the streams need, because the size that it chooses by itself on a
CPU makes every step many times slower. Parts add up in the JSON file.
"""

import argparse
import asyncio
import csv
import gzip
import json
import math
import random
import shutil
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from serving_client import Answer, Server, ask, read_all, serving, streams
from transformers import AutoTokenizer

import slipstream

ROOT = Path(__file__).parent.parent
EMBEDDED = ROOT / "src" / "slipstream" / "demo" / "target"
PAGE = 256  # tokens of a block of transformers' cache


# ---- contenders -----------------------------------------------------------------------------------------------


def ours(args: argparse.Namespace) -> list[str]:
    """Return the command that starts our server."""
    pair = ["--target", str(args.target), "--draft", str(args.draft)] if args.target else []
    compiled = ["--compile"] if args.compile else []
    rows = ["--max-rows", str(args.max_rows), "--max-queue", "4096"]
    return [sys.executable, "-m", "slipstream", "serve", *pair, *compiled, *rows, "--dtype", args.dtype]


def transformers_command(args: argparse.Namespace) -> list[str]:
    """Return the command that starts transformers' server."""
    longest = args.longest + math.ceil((1 + args.spread) * args.max_tokens)
    blocks = max(args.streams) * math.ceil(longest / PAGE) + 1
    program = str(Path(sys.executable).with_name("transformers"))
    compiled = ["--compile"] if args.compile else []
    cache = ["--cb-num-blocks", str(blocks), *args.transformers_options.split()]
    how = ["--device", "cpu", "--dtype", args.dtype, "--log-level", "error"]
    return [program, "serve", str(args.target or EMBEDDED), "--continuous-batching", *cache, *compiled, *how]


Trace = list[tuple[float, int, int]]
"""Requests: seconds after the first arrival, tokens of the prompt, tokens of the answer."""

GREEDY = {"temperature": 0, "stream": True}
OURS = {**GREEDY, "ignore_eos": True, "stream_options": {"include_usage": True}}
PLAIN = {**OURS, "speculative": False}
GAMMA = 3  # tokens drafted per round where the server is compared with the library


def transformers_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Return request fields for greedy decoding that no end-of-text token stops."""
    never = json.dumps({"eos_token_id": -1, "do_sample": False})
    return {**GREEDY, "model": str(args.target or EMBEDDED), "generation_config": never}


# ---- figures ----------------------------------------------------------------------------------------------------


def quantile(values: Sequence[float], share: float) -> float | None:
    """Return the value that `share` of the values do not exceed; None without values."""
    return sorted(values)[min(len(values) - 1, math.floor(share * len(values)))] if values else None


def figures(answers: Sequence[Answer], seconds: float) -> dict[str, Any]:
    """Return the speed and the latencies of answers that together took `seconds`."""
    first, gaps = [one.times[0] for one in answers if one.times], [gap for one in answers for gap in one.gaps]
    return {
        "tokens_per_second": sum(one.tokens for one in answers) / seconds,
        "first_p50": quantile(first, 0.5),
        "first_p99": quantile(first, 0.99),
        "gap_p50": quantile(gaps, 0.5),
        "gap_p99": quantile(gaps, 0.99),
    }


def median(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the median of every figure over runs, and the speed of each run."""
    names = [name for name, value in runs[0].items() if isinstance(value, float)]
    return {name: statistics.median(run[name] for run in runs) for name in names} | {
        "runs": [run["tokens_per_second"] for run in runs]
    }


# ---- parts ------------------------------------------------------------------------------------------------------


def race(args: argparse.Namespace, prompts: Sequence[str]) -> list[dict[str, Any]]:
    """Run the contenders in turns at every number of streams.

    No prompt is in a prefix cache, unless one run has it twice at the same time.
    """
    runs: dict[tuple[str, int], list[dict[str, Any]]] = {}
    with ExitStack() as stack:
        mine = stack.enter_context(serving(ours(args), OURS))
        contenders: list[tuple[str, Server, dict[str, Any]]] = [
            ("slipstream", mine, {}),
            ("slipstream, plain", mine, {"speculative": False}),
        ]
        if not args.alone:
            other = stack.enter_context(serving(transformers_command(args), transformers_fields(args)))
            contenders.append(("transformers serve", other, {}))
        engine = library(args)
        for repetition in range(args.repetitions):
            for count in args.streams:
                head = f"# Part {repetition}.{count}\n"  # so that no server has cached a prompt
                some = [head + prompt for prompt in islice(cycle(prompts), max(args.prompts, 2 * count))]
                lengths = spread_lengths(args, len(some), repetition)
                for name, server, more in contenders:
                    more = {**more, "cache_salt": name} if server is mine else more
                    with server.awake():
                        began = perf_counter()
                        answers = asyncio.run(streams(server, some, count, lengths, more))
                        run = figures(answers, perf_counter() - began)
                    runs.setdefault((name, count), []).append(run)
                    tell(f"repetition {repetition + 1}, {count} streams, {name}: {run['tokens_per_second']:.1f}")
                if count == 1:
                    runs.setdefault(("library", 1), []).append(without_server(engine, some, args.max_tokens))
    return [{"contender": name, "streams": count, **median(repeated)} for (name, count), repeated in runs.items()]


def spread_lengths(args: argparse.Namespace, count: int, seed: int) -> list[int]:
    """Return random lengths of `count` answers in tokens, the same for all contenders.

    With equal lengths, requests would begin and end together, and no answer would wait for another request's prefill.
    """
    rng, spread = random.Random(seed), round(args.spread * args.max_tokens)
    return [args.max_tokens + rng.randint(-spread, spread) for _ in range(count)]


def library(args: argparse.Namespace) -> slipstream.Engine:
    """Load the engine that our server runs."""
    pair = {"target": str(args.target), "draft": str(args.draft)} if args.target else {}
    return slipstream.load(**pair, gamma="auto", dtype=args.dtype, compile=args.compile, batch_size=args.max_rows)


def without_server(engine: slipstream.Engine, prompts: Sequence[str], tokens: int) -> dict[str, Any]:
    """Return the library's speed, one prompt at a time."""
    began, written = perf_counter(), 0
    for prompt in prompts:
        [done] = engine.generate(prompt, max_new_tokens=tokens, ignore_eos=True)
        written += len(done.tokens)
    return {"tokens_per_second": written / (perf_counter() - began)}


def overhead(args: argparse.Namespace, prompts: Sequence[str]) -> list[dict[str, Any]]:
    """Measure the server's time over the library's, in turns, text by text.

    The client does not parse what it reads, since it shares the processor with the server. Both draft `GAMMA` tokens in
    every round: "auto" depends on measured times, and would choose different rounds for each.
    """
    rows, engine = [], library(args)
    engine.warm_up((1, 2))
    with serving(ours(args), OURS | {"speculative": {"gamma": GAMMA}}) as server:
        for number in range(args.repetitions):
            seconds: dict[str, list[float]] = {"library": [], "server": []}
            for text in (f"# Part {number}\n{prompt}" for prompt in prompts[: args.prompts]):
                began = perf_counter()
                engine.generate(text, max_new_tokens=args.max_tokens, ignore_eos=True, gamma=GAMMA)
                between = perf_counter()
                with server.awake():
                    read_all(server, text, args.max_tokens)
                seconds["library"].append(between - began)
                seconds["server"].append(perf_counter() - between)
            speeds = {name: args.max_tokens * len(some) / sum(some) for name, some in seconds.items()}
            rows.append({**speeds, "ratio": sum(seconds["server"]) / sum(seconds["library"])})
            tell(f"library {speeds['library']:.1f}, server {speeds['server']:.1f} tokens/s")
    return [{"ratio": statistics.median(row["ratio"] for row in rows), "runs": rows}]


def arrivals(args: argparse.Namespace, prompts: Sequence[str]) -> list[dict[str, Any]]:
    """Replay recorded arrivals at several loads, with our server with and without speculation."""
    trace, rows = read_trace(args.trace, args.requests), []
    with serving(ours(args), OURS) as server, server.awake():
        ids = tokens_of(args, prompts)
        for load in args.loads:
            for name, more in (("slipstream", {}), ("slipstream, plain", {"speculative": False})):
                pace = load * trace[-1][0] / len(trace)  # the factor by which the trace is sped up
                began = perf_counter()
                results = asyncio.run(replayed(server, trace, ids, args, pace, more))
                answers = [one for one in results if isinstance(one, Answer)]
                run = figures(answers, perf_counter() - began)
                good = sum(is_good(one, args) for one in answers) / (perf_counter() - began)
                about = {"contender": name, "requests_per_second": load, "time_factor": pace}
                lost = {"lost": len(results) - len(answers), "goodput": good, "length_factor": args.length_factor}
                rows.append({**about, **run, **lost})
                tell(f"{load} requests/s, {name}: goodput {good:.2f}, lost {len(results) - len(answers)}")
    return rows


def read_trace(path: Path, count: int) -> Trace:
    """Read the first `count` requests of a trace."""
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        lines = list(islice(csv.DictReader(file), count))
    times = [datetime.fromisoformat(line["TIMESTAMP"][:26]) for line in lines]
    return [
        ((time - times[0]).total_seconds(), int(line["ContextTokens"]), int(line["GeneratedTokens"]))
        for time, line in zip(times, lines, strict=True)
    ]


async def replayed(
    server: Server, trace: Trace, ids: Sequence[int], args: argparse.Namespace, pace: float, more: Any
) -> list[Answer | BaseException]:
    """Send each request when it is due, with scaled lengths -> answers, or the exceptions of requests that failed."""

    async def one(number: int, at: float, read: int, written: int) -> Answer:
        await asyncio.sleep(at / pace)
        begin = 37 * number  # prompts do not share their beginnings
        prompt = list(islice(cycle(ids), begin, begin + max(1, round(args.length_factor * read))))
        return await ask(server, prompt, max(2, round(args.length_factor * written)), **more)

    every = (one(number, *request) for number, request in enumerate(trace))
    return list(await asyncio.gather(*every, return_exceptions=True))


def is_good(one: Answer, args: argparse.Namespace) -> bool:
    """Whether an answer came within the limits --first-within and --gap-within."""
    gaps = one.gaps or [0.0]
    return bool(one.times) and one.times[0] <= args.first_within and statistics.fmean(gaps) <= args.gap_within


def prefix(args: argparse.Namespace, prompts: Sequence[str]) -> list[dict[str, Any]]:
    """Measure the time to the first token of a long chat's first and second turn, with and without the prefix cache.

    The second turn's text must be the same with a cold cache.
    """
    ids, rows = tokens_of(args, prompts), []
    with serving(ours(args), OURS) as server, server.awake():
        for number in range(args.repetitions):
            chat = list(islice(cycle(ids), 37 * number, 37 * number + args.chat))
            again = [*chat, *islice(cycle(ids), 5, 25)]
            turns = [
                asyncio.run(ask(server, prompt, 16, cache_salt=f"{salt} {number}"))
                for prompt, salt in ((chat, "warm"), (again, "warm"), (again, "cold"))
            ]
            first, second, cold = (turn.times[0] for turn in turns)
            same = turns[1].text == turns[2].text
            rows.append({"first": first, "second": second, "cold": cold, "ratio": second / first, "same": same})
            tell(f"first turn {first:.3f} s, second {second:.3f} s, cold {cold:.3f} s, same text: {same}")
    return [{"chat": args.chat, "ratio": statistics.median(row["ratio"] for row in rows), "runs": rows}]


def prompt(args: argparse.Namespace, prompts: Sequence[str]) -> list[dict[str, Any]]:
    """Measure the time to the first token of a short prompt, alone and while a long prompt is read."""
    ids, rows = tokens_of(args, prompts), []

    async def both(server: Server, number: int) -> tuple[Answer, Answer]:
        long = asyncio.ensure_future(ask(server, ids[number : number + args.long], 2, cache_salt=f"long {number}"))
        await asyncio.sleep(args.after)
        return await ask(server, ids[:50], 8, cache_salt=f"short {number}"), await long

    with serving(ours(args), OURS) as server, server.awake():
        for number in range(args.repetitions):
            alone = asyncio.run(ask(server, ids[:50], 8, cache_salt=f"alone {number}")).times[0]
            short, long = (answer.times[0] for answer in asyncio.run(both(server, number)))
            rows.append({"alone": alone, "beside": short, "long": long})
            tell(f"50 tokens alone {alone:.3f} s, beside {args.long} tokens {short:.3f} s; these {long:.3f} s")
    return [
        {"tokens": args.long, **{name: statistics.median(row[name] for row in rows) for name in rows[0]}, "runs": rows}
    ]


def tokens_of(args: argparse.Namespace, prompts: Sequence[str]) -> list[int]:
    """Return all prompts joined to one list of token ids, repeated to the length that the longest prompt needs."""
    tokenizer = AutoTokenizer.from_pretrained(args.target or EMBEDDED)
    ids = [token for text in prompts for token in tokenizer.encode(text, add_special_tokens=False)]
    return list(islice(cycle(ids), max(len(ids), args.long + 1000)))


@contextmanager
def roomy(args: argparse.Namespace) -> Iterator[None]:
    """Let models accept longer texts than they were trained for, in temporary copies with a larger context.

    Times are those of such lengths, but the generated text means nothing.
    """
    if not args.context:
        yield
        return
    folders = (args.target or EMBEDDED, args.draft or EMBEDDED.with_name("draft"))
    with TemporaryDirectory() as folder:
        for role, source in zip(("target", "draft"), folders, strict=True):
            if not Path(source).is_dir():
                continue  # a draft that is no folder, such as the target's own weights
            copy = Path(folder) / role
            shutil.copytree(source, copy)
            config = json.loads((copy / "config.json").read_text()) | {"max_position_embeddings": args.context}
            (copy / "config.json").write_text(json.dumps(config))
            setattr(args, role, copy)
        yield


# ---- the command ------------------------------------------------------------------------------------------------


PARTS = {"race": race, "overhead": overhead, "arrivals": arrivals, "prefix": prefix, "prompt": prompt}


def table(found: Mapping[str, Any]) -> str:
    """Return the race as a Markdown table with a line per contender and number of streams."""
    lines = [
        "| streams | contender | tokens/s | first token, ms | gap p50, ms | gap p99, ms |",
        "|---|---|---|---|---|---|",
    ]
    for row in sorted(found.get("race", ()), key=lambda row: row["streams"]):
        times = [
            "-" if row.get(name) is None else f"{1e3 * row[name]:.1f}" for name in ("first_p50", "gap_p50", "gap_p99")
        ]
        speed = f"{row['tokens_per_second']:.1f}"
        lines.append(f"| {' | '.join([str(row['streams']), row['contender'], speed, *times])} |")
    return "\n".join(lines)


def main() -> None:
    args = arguments()
    with gzip.open(args.file, "rt", encoding="utf-8") as file:
        texts = [json.loads(line)["prompt"] for line in file]
    args.longest = max(map(len, texts)) // 2  # tokens of a prompt at most, as tokens are longer than two characters
    found = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}
    with roomy(args):
        found[args.part] = PARTS[args.part](args, texts)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    print(table(found) if args.part == "race" else json.dumps(found[args.part], indent=1))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="HumanEval.jsonl.gz")
    parser.add_argument("--part", choices=PARTS, default="race")
    parser.add_argument("--target", type=Path, help="a folder; without: the embedded pair")
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--compile", action="store_true", help="of all contenders")
    parser.add_argument("--context", type=int, help="positions that the models accept, regardless of their config")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--max-rows", type=int, default=64, help="rows that our server runs together")
    parser.add_argument("--prompts", type=int, default=16, help="requests per run, at least two per stream")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--spread", type=float, default=0.5, help="share by which answers of the race differ in length")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument(
        "--theirs", dest="transformers_options", default="", help="more options of transformers serve, in one text"
    )
    parser.add_argument("--alone", action="store_true", help="without transformers serve")
    parser.add_argument("--trace", type=Path, help="TIMESTAMP,ContextTokens,GeneratedTokens as .csv.gz, of arrivals")
    parser.add_argument("--requests", type=int, default=200, help="of the trace")
    parser.add_argument("--loads", type=float, nargs="+", default=[1, 2, 4], help="requests per second, of arrivals")
    parser.add_argument("--length-factor", type=float, default=0.1, help="of the trace's lengths")
    parser.add_argument("--first-within", type=float, default=1.0, help="seconds to the first token, for goodput")
    parser.add_argument("--gap-within", type=float, default=0.1, help="mean seconds between pieces, for goodput")
    parser.add_argument("--chat", type=int, default=2000, help="tokens of the first turn, of prefix")
    parser.add_argument("--long", type=int, default=4000, help="tokens of the long prompt, of prompt")
    parser.add_argument("--after", type=float, default=0.05, help="seconds after which the short prompt comes")
    parser.add_argument("--json", type=Path, help="add what is measured to this file")
    args = parser.parse_args()
    if args.part == "arrivals" and not args.trace:
        parser.error("--part arrivals needs a --trace.")
    if (args.target is None) != (args.draft is None):
        parser.error("give --target and --draft, or neither for the embedded pair.")
    return args


def tell(text: str) -> None:
    """Print a progress message to stderr."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
