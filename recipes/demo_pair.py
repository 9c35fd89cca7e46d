"""Train the demo pair: a target of 10 M parameters and a draft of a tenth of its size.

Both learn from the source of Python's standard library and of the packages that pair/packages.py
lists, which pip downloads. An interrupted run continues where it stopped when the same command is
given again. Two cores with AMX take two hours.

    python recipes/demo_pair.py --out DIR
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from pair import corpus, measure, models, packages, ranks
from pair.budget import DEVICE, SEED, Interrupted
from pair.card import Facts, write_card
from pair.distill import distill
from pair.writing import written_texts
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

ON_TEXT = 0.2  # the share of the draft's tokens that it learns as text, before it learns the target's laws
WORTH_COMPILING = 2_000_000  # tokens: compiling takes a minute or two


@dataclass(frozen=True)
class Setup:
    """The texts and the tokenizer that all parts of the recipe share, stored in its working folder."""

    work: Path
    library: corpus.Library
    packages: list[packages.Package]
    tokenizer: PreTrainedTokenizerFast
    text: corpus.Windows


def main() -> int:
    """Run the recipe, or resume it where an earlier run stopped."""
    args = _arguments()
    args.work.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    # A process started in the background would ignore SIGINT; SIGTERM is to save the state, too.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    disable_progress_bar()  # transformers' bars would share a line with our own
    try:
        _run(args)
    except (Interrupted, KeyboardInterrupt) as stop:
        again = shlex.join(["python", *sys.argv])
        print(f"\n{str(stop) or 'Stopped'}. Everything so far is saved; to resume:\n  {again}")
        return 130
    print(f"Done in {(time.perf_counter() - began) / 60:.1f} minutes: {args.out}")
    return 0


def _arguments() -> argparse.Namespace:
    cores = 1 if DEVICE.type == "cuda" else min(8, os.cpu_count() or 1)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="where both models go")
    parser.add_argument("--tokens-target", type=int, default=40_500_000, help="that the target reads")
    parser.add_argument("--tokens-draft", type=int, default=45_000_000, help="that the draft reads, in all")
    parser.add_argument("--tokens-written", type=int, default=2_500_000, help="that the target writes for the draft")
    parser.add_argument("--processes", type=int, default=cores, help=f"that train together (default: {cores})")
    parser.add_argument("--work", type=Path, default=Path("build/demo_pair"), help="texts and checkpoints")
    parser.add_argument("--humaneval", type=Path, help="HumanEval.jsonl.gz, only to measure on")
    return parser.parse_args()


def _run(args: argparse.Namespace) -> None:
    packages.download(args.work / "packages")
    setup = _prepare(args.work)
    fast = args.tokens_target > WORTH_COMPILING and _compiles()
    target = ranks.together(args.processes, _train_target, args.work, args.tokens_target, fast)
    models.save_pretrained(target, setup.tokenizer, args.out / "target")
    draft, rows = ranks.together(args.processes, _train_draft, args, fast)
    models.save_pretrained(draft, setup.tokenizer, args.out / "draft")
    _describe(args, setup, rows)


def _prepare(work: Path) -> Setup:
    """Read and tokenize the texts, or load what an earlier process has stored of them in `work`."""
    library = corpus.read_library()
    wheels = packages.read_packages(work / "packages")
    saved = work / "tokenizer"
    if saved.exists():
        tokenizer = PreTrainedTokenizerFast.from_pretrained(saved)
    else:
        tokenizer = corpus.train_tokenizer(library.train)
        tokenizer.save_pretrained(saved)
    stream = corpus.Stream.stored(work / "library.npz", lambda: library.train, tokenizer)

    def modules() -> list[corpus.Source]:
        everything = [module for package in wheels for module in package.modules]
        return corpus.without_copies(everything, library.held_out)

    others = corpus.Stream.stored(work / "packages.npz", modules, tokenizer)
    if ranks.first():
        sizes = (
            f"{len(stream.tokens):,} tokens of the standard library, {len(others.tokens):,} of {len(wheels)} packages"
        )
        print(f"{sizes}, on {_device()}", flush=True)
    return Setup(work, library, wheels, tokenizer, corpus.Mixture(stream, others, models.LIBRARY))


def _compiles() -> bool:
    """Whether torch can compile the training, for which it needs a C++ compiler."""
    torch._dynamo.config.suppress_errors = True  # a part that does not compile runs eagerly
    try:
        torch.compile(torch.cos)(torch.ones(2))
    except Exception as error:  # of any type; eager training needs no compiler
        print(f"torch.compile does not work here ({type(error).__name__}): training eagerly")
        return False
    return True


def _train_target(work: Path, tokens: int, fast: bool) -> LlamaForCausalLM:
    """Train the target on a number of tokens of text; with `fast`, its loss is compiled."""
    target = models.new_target()
    models.train_on_text(target, _prepare(work).text, tokens, work / "target.safetensors", fast)
    return target


def _train_draft(args: argparse.Namespace, fast: bool) -> tuple[LlamaForCausalLM, int]:
    """Train the draft on text, then on the target's laws; return it, and the number of rows that the target wrote."""
    setup = _prepare(args.work)
    # The saved model that users will load, with its rounding to bfloat16.
    target = LlamaForCausalLM.from_pretrained(args.out / "target", dtype=torch.bfloat16).to(DEVICE).eval()
    draft = models.new_draft(target)
    reading = round(args.tokens_draft * ON_TEXT)
    models.train_on_text(draft, setup.text, reading, args.work / "draft_text.safetensors", fast, models.SHORT)
    number, share = ranks.number(), args.tokens_written // args.processes
    file = args.work / f"written-{number}.safetensors"
    written = written_texts(args.out / "target", _prompts(setup), share, file)
    distill(draft, target, setup.text, written, args.tokens_draft - reading, args.work / "draft.safetensors", fast)
    return draft, len(written) * args.processes


def _prompts(setup: Setup) -> list[list[int]]:
    """Return prompts for the target to continue: from the library, and from as many modules of the packages."""
    modules = [module for package in setup.packages for module in package.modules]
    library = setup.library.train
    chosen = np.random.default_rng(SEED).choice(len(modules), len(library), replace=False)
    sources = [*library, *(modules[at] for at in sorted(chosen))]
    return corpus.prompts(sources, setup.text, setup.tokenizer)


def _device() -> str:
    if DEVICE.type == "cuda":
        return f"one {torch.cuda.get_device_name()}"
    return f"{torch.get_num_threads()} CPU cores"


def _describe(args: argparse.Namespace, setup: Setup, rows: int) -> None:
    """Measure the saved models and write the model card."""
    target, draft = (measure.load_exact(args.out / name) for name in ("target", "draft"))
    held_out = setup.library.held_out
    sets = {"functions of held-out modules": corpus.function_headers(held_out)}
    if args.humaneval:
        sets["HumanEval"] = measure.read_prompts(args.humaneval)
    bits = [measure.bits_per_byte(model, setup.tokenizer, held_out) for model in (target, draft)]
    by_set = {name: measure.behaviour(target, draft, setup.tokenizer, prompts) for name, prompts in sets.items()}
    for name, seen in by_set.items():
        print(f"{name}: alpha T=0 {seen.greedy:.3f}, T=1 {seen.sampled:.3f}; repeated {seen.repeated:.3f}")
    print(f"held-out bits per byte: target {bits[0]:.3f}, draft {bits[1]:.3f}")
    shown = args.out.name if args.out.is_absolute() else args.out  # the card names no folder of this machine
    facts = Facts(
        library=setup.library,
        packages=setup.packages,
        target=target,
        draft=draft,
        bits=(bits[0], bits[1]),
        found=by_set,
        rows=rows,
        command=(
            f"python recipes/demo_pair.py --out {shown} --tokens-target {args.tokens_target} "
            f"--tokens-draft {args.tokens_draft} --tokens-written {args.tokens_written}"
        ),
        device=f"{_device()}, {args.processes} processes",
        tokens=(args.tokens_target, args.tokens_draft),
    )
    write_card(args.out / "README.md", facts)


if __name__ == "__main__":
    raise SystemExit(main())
