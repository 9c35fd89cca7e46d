"""Train the demo pair: a target of 10 M parameters and a draft a tenth its size.

Both learn from the source of Python's standard library, so the recipe needs nothing but this
repository and its training dependencies. Time budgets, not step counts, decide how long it
takes; an interrupted run continues where it stopped when the same command is given again.

    python recipes/demo_pair.py --out DIR

On a CPU that has other work too, set OMP_WAIT_POLICY=PASSIVE: threads that wait by spinning slow
each other down several times.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from pair import corpus, measure, models
from pair.budget import DEVICE, Interrupted
from pair.card import Facts, write_card
from pair.distill import distill
from pair.sampling import Pool
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from slipstream.training.trainer import Progress

# The shares of the draft's minutes for plain text, and for the target's writing of samples; the rest is distillation.
ON_TEXT, ON_SAMPLES = 0.07, 0.175


@dataclass(frozen=True)
class Setup:
    """The objects that all parts of the recipe share."""

    work: Path
    library: corpus.Library
    tokenizer: PreTrainedTokenizerFast
    stream: corpus.Stream
    fast: bool


def main() -> int:
    """Run the recipe, or what is left of it."""
    args = _arguments()
    args.work.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    # A process started in the background would ignore SIGINT; SIGTERM saves the state, too.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    disable_progress_bar()  # of loading and saving: two bars would fight over one line
    try:
        _run(args)
    except (Interrupted, KeyboardInterrupt) as stop:
        again = shlex.join(["python", *sys.argv])
        print(f"\n{str(stop) or 'Stopped'}. Everything so far is saved; to resume:\n  {again}")
        return 130
    print(f"Done in {(time.perf_counter() - began) / 60:.1f} minutes: {args.out}")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="where both models go")
    parser.add_argument("--minutes-target", type=float, default=60.0)
    parser.add_argument("--minutes-draft", type=float, default=25.0)
    parser.add_argument("--work", type=Path, default=Path("build/demo_pair"), help="checkpoints")
    parser.add_argument("--humaneval", type=Path, help="HumanEval.jsonl.gz, only to measure on")
    return parser.parse_args()


def _run(args: argparse.Namespace) -> None:
    fast = _worth_compiling(min(args.minutes_target, args.minutes_draft))
    setup = _prepare(args.work, fast)
    target, learned = _train_target(setup, args.minutes_target)
    models.save_pretrained(target, setup.tokenizer, args.out / "target")
    # From here on the target is the saved model that users will load, with its rounding to bfloat16.
    target = LlamaForCausalLM.from_pretrained(args.out / "target", dtype=torch.bfloat16).to(DEVICE)
    draft, pool = _train_draft(setup, target.eval(), args.minutes_draft)
    models.save_pretrained(draft, setup.tokenizer, args.out / "draft")
    timing = (
        f"target {learned.seconds / 60:.0f} minutes ({learned.tokens / 1e6:.1f} M tokens read), "
        f"draft {args.minutes_draft:.0f} minutes (with the target's writing, without its answers to lessons)"
    )
    _describe(args, setup, pool, timing)


def _prepare(work: Path, fast: bool) -> Setup:
    library = corpus.read_library()
    saved = work / "tokenizer"
    if saved.exists():
        tokenizer = PreTrainedTokenizerFast.from_pretrained(saved)
    else:
        tokenizer = corpus.train_tokenizer(library.train)
        tokenizer.save_pretrained(saved)
    stream = corpus.Stream(library.train, tokenizer)
    print(f"{len(library.train)} files, {len(stream.tokens):,} tokens, on {_device()}")
    return Setup(work, library, tokenizer, stream, fast)


def _worth_compiling(minutes: float) -> bool:
    """Whether to compile the training: it is 1.4 times faster, after a minute of compiling, with a C++ compiler."""
    if minutes < 5:
        return False
    torch._dynamo.config.suppress_errors = True  # a part that does not compile runs eagerly
    try:
        torch.compile(torch.cos)(torch.ones(2))
    except Exception as error:  # whatever is missing, eager training still works
        print(f"torch.compile does not work here ({type(error).__name__}): training eagerly")
        return False
    return True


def _train_target(setup: Setup, minutes: float) -> tuple[LlamaForCausalLM, Progress]:
    target = models.new_target()
    file = setup.work / "target.safetensors"
    return target, models.train_on_text(target, setup.stream, minutes, file, setup.fast)


def _train_draft(setup: Setup, target: LlamaForCausalLM, minutes: float) -> tuple[LlamaForCausalLM, Pool]:
    draft = models.new_draft(target)
    reading, sampling = minutes * ON_TEXT, minutes * ON_SAMPLES
    file = setup.work / "draft_text.safetensors"
    models.train_on_text(draft, setup.stream, reading, file, setup.fast, models.SHORT)
    pool = Pool(setup.work / "samples.pt")
    prompts = corpus.prompts(setup.library.train, setup.stream, setup.tokenizer)
    pool.fill(target, prompts, sampling)
    rest = minutes - reading - sampling
    distill(draft, target, setup.stream, pool, rest, setup.work / "draft.safetensors", setup.fast)
    return draft, pool


def _device() -> str:
    if DEVICE.type == "cuda":
        return f"one {torch.cuda.get_device_name()}"
    return f"{torch.get_num_threads()} CPU cores"


def _describe(args: argparse.Namespace, setup: Setup, pool: Pool, timing: str) -> None:
    """Measure the saved models and write the model card."""
    target, draft = (measure.load_exact(args.out / name) for name in ("target", "draft"))
    held_out = setup.library.held_out
    sets = {"functions of held-out modules": corpus.function_headers(held_out)}
    if args.humaneval:
        sets["HumanEval"] = measure.read_prompts(args.humaneval)
    bits = [measure.bits_per_byte(model, setup.tokenizer, held_out) for model in (target, draft)]
    alphas = {name: measure.alpha(target, draft, setup.tokenizer, prompts) for name, prompts in sets.items()}
    for name, found in alphas.items():
        print(f"alpha on {name}: T=0 {found.greedy:.3f}, T=1 {found.sampled:.3f}")
    print(f"held-out bits per byte: target {bits[0]:.3f}, draft {bits[1]:.3f}")
    shown = args.out.name if args.out.is_absolute() else args.out  # the card names no folder of this machine
    facts = Facts(
        library=setup.library,
        target=target,
        draft=draft,
        bits=(bits[0], bits[1]),
        alphas=alphas,
        rows=len(pool.rows),
        command=(
            f"python recipes/demo_pair.py --out {shown} "
            f"--minutes-target {args.minutes_target:g} --minutes-draft {args.minutes_draft:g}"
        ),
        device=_device(),
        timing=timing,
    )
    write_card(args.out / "README.md", facts)


if __name__ == "__main__":
    raise SystemExit(main())
