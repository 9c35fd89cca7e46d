"""Measures a corpus for drafting: the time to build it and to look up text, and generation with it against plain.

python benchmarks/datastore.py --megabytes 100                       # tokens made up: Zipf, with copied passages
python benchmarks/datastore.py --documents DIR --prompts HumanEval.jsonl.gz [--target DIR] [--gamma 5]

Made-up tokens: ranks drawn from Zipf's law (exponent 1.2) over 32,000 ids, two bytes each, of which about every eighth
is in a passage of 5 to 500 tokens copied from elsewhere. Lookups: suffixes of 64 tokens taken from the text (they match
in full), and the same with one foreign token as the fourth from the end (only the last three tokens match). Half of the
queries load the file's pages into memory; the others are timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import slipstream
from slipstream.core.stats import Stats
from slipstream.drafters.datastore.corpus import Corpus
from slipstream.drafters.datastore.drafter import Datastore, DatastoreSettings
from slipstream.text.documents import read
from slipstream.text.prompts import gather

VOCAB, DOCUMENT = 32_000, 1_000  # token ids, and tokens of a made-up document


def main() -> None:
    args = arguments()
    report = generation(args) if args.documents else size(args.megabytes)
    print(json.dumps(report, indent=None if args.json else 2))


def size(megabytes: float) -> dict[str, Any]:
    """Build, save and memory-map a corpus of made-up tokens, and look up text in it -> times and sizes."""
    tokens = made_up(int(megabytes * 1e6) // 2)
    with TemporaryDirectory() as folder:
        path, times = Path(folder) / "corpus.safetensors", [time.perf_counter()]
        built = Corpus.build(np.array_split(tokens, max(1, len(tokens) // DOCUMENT)), VOCAB)
        times.append(time.perf_counter())
        built.save(path)
        times.append(time.perf_counter())
        corpus = Corpus.load(path)
        times.append(time.perf_counter())
        seconds = np.diff(times)
        rng = np.random.default_rng(1)
        long = [tokens[place : place + 64].tolist() for place in rng.integers(0, len(tokens) - 64, 4000)]
        short = [[*text[:-4], VOCAB - 1, *text[-3:]] for text in long]
        return {
            "tokens": len(tokens),
            "token_megabytes": 2 * len(tokens) / 1e6,
            "file_megabytes": path.stat().st_size / 1e6,
            "build_seconds": seconds[0],
            "build_megabytes_per_second": 2 * len(tokens) / 1e6 / seconds[0],
            "save_seconds": seconds[1],
            "map_milliseconds": 1e3 * seconds[2],
            "long_match_microseconds": timed(corpus, long),
            "short_match_microseconds": timed(corpus, short),
        }


def made_up(count: int) -> np.ndarray[Any, Any]:
    """Return `count` made-up tokens (count,) with copied passages."""
    rng = np.random.default_rng(0)
    tokens = (rng.zipf(1.2, count) % (VOCAB - 1)).astype(np.int32)
    for start, origin, length in zip(
        *rng.integers(0, count - 500, (2, count // 2000)), rng.integers(5, 500, count // 2000), strict=True
    ):
        tokens[start : start + length] = tokens[origin : origin + length]
    return tokens


def timed(corpus: Corpus, queries: Sequence[Sequence[int]]) -> dict[str, float]:
    """Return the microseconds of one lookup of 8 tokens: the median and the 99th percentile."""
    microseconds = []
    for query in queries:
        start = time.perf_counter()
        corpus.match(query, 8)
        microseconds.append(1e6 * (time.perf_counter() - start))
    timed_half = sorted(microseconds[len(microseconds) // 2 :])
    return {"median": statistics.median(timed_half), "p99": timed_half[int(0.99 * len(timed_half))]}


def generation(args: argparse.Namespace) -> dict[str, Any]:
    """Measure plain decoding and drafts from each source in turns, on the same prompts; medians over repetitions."""
    plain = slipstream.load(args.target)
    vocab = plain.decoder.target.vocab
    documents = (document for _, document in read([args.documents]))
    texts = [plain.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in documents]
    corpus = Corpus.build(texts, vocab)
    drafters = {
        "own text": Datastore(vocab),
        "own text and corpus": Datastore(vocab, corpus),
        "the same, chance=0.5": Datastore(vocab, corpus, settings=DatastoreSettings(chance=0.5)),
    }
    engines = {name: slipstream.load(args.target, drafter, gamma=args.gamma) for name, drafter in drafters.items()}
    prompts = [item.prompt for item in gather([], args.prompts, False)][: args.limit]
    settings = {"max_new_tokens": args.max_new_tokens, "temperature": args.temperature, "ignore_eos": True}
    speeds: dict[str, list[float]] = {name: [] for name in ("plain", *engines)}
    stats: dict[str, Stats] = {}
    for seed in range(-1, args.repetitions):  # seed -1 is the warm-up
        for name in speeds:
            engine = plain if name == "plain" else engines[name]
            start = time.perf_counter()
            done = [engine.generate(prompt, seed=seed, plain=name == "plain", **settings)[0] for prompt in prompts]
            if seed >= 0:
                speeds[name].append(sum(len(one.tokens) for one in done) / (time.perf_counter() - start))
                stats[name] = sum((one.stats for one in done), stats.get(name, Stats()))
    rows = [
        {
            "source": name,
            "tokens_per_second": statistics.median(speeds[name]),
            "alpha": stats[name].alpha,
            "mean_acceptance_length": stats[name].mean_acceptance_length,
        }
        for name in speeds
    ]
    return {"prompts": len(prompts), "corpus_tokens": len(corpus) - corpus.documents, **vars(args), "rows": rows}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=100, help="size of the made-up tokens")
    parser.add_argument("--documents", help="a folder or file to index instead")
    parser.add_argument("--prompts", help="a file of prompts to continue")
    parser.add_argument("--target")
    parser.add_argument("--gamma", type=int, default=5)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--limit", type=int, default=20)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
