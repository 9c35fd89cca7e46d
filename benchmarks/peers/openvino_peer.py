"""Measures OpenVINO GenAI on the same models and prompts, in an environment of its own.

It prints JSON for `--peers` of `bars.py` and `quantized.py`.

python -m venv build/openvino && build/openvino/bin/pip install openvino-genai optimum-intel
build/openvino/bin/optimum-cli export openvino --model build/target-134m --task text-generation-with-past \\
    --weight-format fp16 build/ov-target          (the same for the draft; or int8; or int4 --group-size 32 --ratio 1)
python -c "from slipstream.bench import PROMPTS as P; import json; [print(json.dumps({'prompt': p})) for p in P[:8]]" \\
    > build/prompts.jsonl
build/openvino/bin/python benchmarks/peers/openvino_peer.py build/ov-target build/ov-draft build/prompts.jsonl \\
    > build/peer.json

Same token ids, limit and counting as `slipstream bench`: new tokens / wall time of the whole call, prefill included,
end tokens ignored, a constant draft length (confidence threshold 0). Prefix caching is off: it would keep prompts warm
between repetitions. A round is wall time / (new tokens - accepted tokens).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from transformers import AutoTokenizer

Run = tuple[float, float, int, int]
"""The seconds in all and until the first tokens, and the numbers of new and of accepted tokens."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("prompts", type=Path, help="JSON lines with a field `prompt`")
    parser.add_argument("--gamma", type=int, default=5)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--precision", default="bf16")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    texts = [json.loads(line)["prompt"] for line in args.prompts.read_text().splitlines()]
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    pipes = {gamma: pipeline(args, gamma) for gamma in (0, args.gamma)}
    for gamma, pipe in pipes.items():
        run(pipe, settings(args, gamma), prompts[:1])  # warm up
    runs: dict[int, list[Run]] = {gamma: [] for gamma in pipes}
    for number in range(args.repetitions):
        for gamma in list(pipes)[:: 1 if number % 2 else -1]:
            runs[gamma].append(run(pipes[gamma], settings(args, gamma), prompts))
    plain, drafted = runs[0], runs[args.gamma]
    rounds = [1000 * seconds / (tokens - accepted) for seconds, _, tokens, accepted in drafted]
    figures = {
        "gamma": args.gamma,
        "temperature": args.temperature,
        "plain_tokens_per_second": median(tokens / seconds for seconds, _, tokens, _ in plain),
        "plain_without_prefill": median(tokens / (seconds - prefill) for seconds, prefill, tokens, _ in plain),
        "plain_step_ms": median(1000 * seconds / tokens for seconds, _, tokens, _ in plain),
        "tokens_per_second": median(tokens / seconds for seconds, _, tokens, _ in drafted),
        "without_prefill": median(tokens / (seconds - prefill) for seconds, prefill, tokens, _ in drafted),
        "round_ms": median(rounds),
        "tokens_per_call": sum(run[2] for run in drafted) / sum(run[2] - run[3] for run in drafted),
    }
    how = f"gamma {args.gamma}, temperature {args.temperature:g}, {args.precision}, {args.threads} threads"
    name = f"OpenVINO GenAI {genai.__version__}, {Path(args.target).name} with {Path(args.draft).name}"
    print(json.dumps({"peer": name, "how": how, **figures}))


def pipeline(args: argparse.Namespace, gamma: int) -> Any:
    """Load a pipeline, with a draft model unless gamma is 0."""
    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching, scheduler.cache_size = False, 1
    how = {
        "INFERENCE_NUM_THREADS": args.threads,
        "INFERENCE_PRECISION_HINT": args.precision,
        "KV_CACHE_PRECISION": args.precision,
    }
    draft = {"draft_model": genai.draft_model(args.draft, "CPU", **how)} if gamma else {}
    return genai.LLMPipeline(args.target, "CPU", scheduler_config=scheduler, **how, **draft)


def settings(args: argparse.Namespace, gamma: int) -> Any:
    config = genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos = args.max_new_tokens, True
    if args.temperature:
        config.do_sample, config.temperature, config.top_k, config.top_p = True, args.temperature, 10**6, 1.0
    if gamma:
        config.num_assistant_tokens, config.assistant_confidence_threshold = gamma, 0.0
    return config


def run(pipe: Any, config: Any, prompts: list[list[int]]) -> Run:
    """Complete all prompts, one after the other."""
    tokens = accepted = 0
    prefill, start = 0.0, perf_counter()
    for prompt in prompts:
        done = pipe.generate(ov.Tensor(np.array([prompt], dtype=np.int64)), config)
        assert len(done.tokens[0]) == config.max_new_tokens, "all contenders must do the same work"
        tokens += len(done.tokens[0])
        prefill += done.perf_metrics.get_ttft().mean / 1000
        if config.is_assisting_generation():
            accepted += done.extended_perf_metrics.get_num_accepted_tokens()
    return perf_counter() - start, prefill, tokens, accepted


if __name__ == "__main__":
    main()
