"""Measures llama.cpp's server on the same models and prompts, and prints JSON for `--peers` of `bars.py` and others.

pip download --no-deps --no-binary llama-cpp-python llama-cpp-python && tar xf llama_cpp_python-*.tar.gz -C build
cmake -S build/llama_cpp_python-*/vendor/llama.cpp -B build/llama -DCMAKE_BUILD_TYPE=Release -DLLAMA_OPENSSL=OFF \\
    -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DBUILD_SHARED_LIBS=OFF
cmake --build build/llama --target llama-server -j 2         (or: a checkout and a server that you have)
python benchmarks/peers/llama_cpp_convert.py build/llama_cpp_python-*/vendor/llama.cpp build/target-134m \\
    build/target.gguf                                                         (the same for the draft)
python benchmarks/peers/llama_cpp_peer.py build/llama/bin/llama-server build/target.gguf build/draft.gguf \\
    --tokenizer build/target-134m > build/peer.json
build/llama/bin/llama-quantize build/target.gguf build/target-Q4_0.gguf Q4_0    (target llama-quantize)

Same prompts as token ids, same limit and same counting as `slipstream bench`: new tokens / seconds of prompt and text,
end tokens ignored, a constant draft length (it drafts whatever the draft's probability). The seconds are the server's
own, so HTTP costs it nothing; it keeps no prompt between requests. Plain and speculative servers run in turns, one at a
time. A round is its seconds / (new tokens - accepted tokens).
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from transformers import AutoTokenizer

from slipstream.bench import PROMPTS
from slipstream.text.prompts import gather

START = 60  # the most seconds that a server may take to be ready
LOG = Path(tempfile.gettempdir()) / "llama-server.log"
Run = tuple[float, float, int, int, list[list[int]]]
"""The seconds in all and for prompts, the numbers of new and of accepted tokens, and the texts as token ids."""


def main() -> None:
    args = arguments()
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    texts = [item.prompt for item in gather([], args.prompts, False)] if args.prompts else list(PROMPTS)
    prompts = [tokenizer(text)["input_ids"] for text in texts[: args.limit]]
    runs: dict[int, list[Run]] = {0: [], args.gamma: []}
    for number in range(args.repetitions):
        for gamma in list(runs)[:: 1 if number % 2 else -1]:
            with server(args, gamma) as url:
                ask(args, url, prompts[0])  # warm up
                runs[gamma].append(run(args, url, prompts))
    plain, drafted = runs[0], runs[args.gamma]
    rounds = [1000 * seconds / (tokens - accepted) for seconds, _, tokens, accepted, _ in drafted]
    figures = {
        "gamma": args.gamma,
        "temperature": args.temperature,
        "plain_tokens_per_second": median(tokens / seconds for seconds, _, tokens, *_ in plain),
        "plain_without_prefill": median(tokens / (seconds - prefill) for seconds, prefill, tokens, *_ in plain),
        "plain_step_ms": median(1000 * seconds / tokens for seconds, _, tokens, *_ in plain),
        "tokens_per_second": median(tokens / seconds for seconds, _, tokens, *_ in drafted),
        "without_prefill": median(tokens / (seconds - prefill) for seconds, prefill, tokens, *_ in drafted),
        "round_ms": median(rounds),
        "tokens_per_call": sum(run[2] for run in drafted) / sum(run[2] - run[3] for run in drafted),
        "same_text_as_plain": sum(a == b for a, b in zip(plain[0][4], drafted[0][4], strict=True)),
    }
    how = f"gamma {args.gamma}, temperature {args.temperature:g}, {args.threads} threads"
    name = f"llama.cpp {version(args.server)}, {Path(args.target).name} with {Path(args.draft).name}"
    print(json.dumps({"peer": name, "how": how, **figures}))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("server", help="the program llama-server")
    parser.add_argument("target", help="GGUF")
    parser.add_argument("draft", help="GGUF")
    parser.add_argument("--tokenizer", required=True, help="the model's folder")
    parser.add_argument("--prompts", help="a file of prompts (default: those built into slipstream bench)")
    parser.add_argument("--limit", type=int, default=4, help="prompts to use")
    parser.add_argument("--gamma", type=int, default=5)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def version(program: str) -> str:
    printed = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    lines = (printed.stderr + printed.stdout).splitlines()
    return next(line.removeprefix("version: ") for line in lines if line.startswith("version: "))


@contextmanager
def server(args: argparse.Namespace, gamma: int) -> Iterator[str]:
    """Run a server within the context, with a draft unless gamma is 0, and yield its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [args.server, "-m", args.target, "--port", str(port), "-t", str(args.threads), "-c", "2048", "-np", "1"]
    command += ["--cache-ram", "0", "--no-webui"]
    if gamma:
        command += ["--spec-type", "draft-simple", "--spec-draft-model", args.draft]
        command += ["--spec-draft-n-max", str(gamma), "--spec-draft-p-min", "0.0"]
    with open(LOG, "w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            wait(process, f"http://127.0.0.1:{port}/health")
            yield f"http://127.0.0.1:{port}/completion"
        finally:
            process.terminate()


def wait(process: subprocess.Popen[bytes], url: str) -> None:
    """Wait until the server answers. Exits with a message if it stops or takes too long."""
    for _ in range(10 * START):
        if process.poll() is not None:
            break
        try:
            urllib.request.urlopen(url).close()
            return
        except OSError:
            time.sleep(0.1)
    sys.exit(f"the server did not start: {LOG} says why.")


def ask(args: argparse.Namespace, url: str, prompt: Sequence[int]) -> dict[str, Any]:
    """Request one completion -> the server's answer with tokens and timings."""
    body = {
        "prompt": list(prompt),
        "n_predict": args.max_new_tokens,
        "ignore_eos": True,
        "cache_prompt": False,
        "return_tokens": True,
        "temperature": args.temperature,
        "samplers": ["temperature"] if args.temperature else ["top_k"],
        "top_k": 0 if args.temperature else 1,
    }
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def run(args: argparse.Namespace, url: str, prompts: Sequence[Sequence[int]]) -> Run:
    """Complete all prompts, one after the other."""
    seconds, prefill, tokens, accepted, texts = 0.0, 0.0, 0, 0, list[list[int]]()
    for prompt in prompts:
        answer = ask(args, url, prompt)
        timings = answer["timings"]
        assert timings["predicted_n"] == args.max_new_tokens, "all contenders must do the same work"
        assert timings["prompt_n"] == len(prompt), "no prompt may come from a cache"
        prefill += timings["prompt_ms"] / 1000
        seconds += (timings["prompt_ms"] + timings["predicted_ms"]) / 1000
        tokens += timings["predicted_n"]
        accepted += timings.get("draft_n_accepted", 0)
        texts.append(answer["tokens"])
    return seconds, prefill, tokens, accepted, texts


if __name__ == "__main__":
    main()
