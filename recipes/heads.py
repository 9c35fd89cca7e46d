"""Train parallel heads for the embedded target, on a part of the embedded pair's text.

    python recipes/heads.py --out build/heads --steps 600

The text is Python's standard library without the modules that `recipes/demo_pair.py` holds out for measuring, and
without the packages that the pair has learned from, too. An interrupted run continues where it stopped when the same
command is given again. The heads stay outside the repository; `slipstream generate --draft heads:build/heads` uses
them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from pair import corpus

from slipstream.drafters.heads import FILE, KIND
from slipstream.files import load_tensors
from slipstream.models.loading.load import load_model, load_tokenizer
from slipstream.models.loading.pairings import EMBEDDED
from slipstream.training.heads import HeadTrainer, TrainingSettings
from slipstream.training.trainer import Progress


def main() -> int:
    """Train the heads, or resume their training, and print their alpha on the held-out end of the text."""
    args = _arguments()
    library, tokenizer = corpus.read_library(), load_tokenizer(EMBEDDED / "target")
    stream = corpus.Stream.of(library.train, tokenizer)
    settings = TrainingSettings(
        args.heads, args.inner, not args.blind, args.steps, rate=args.rate, bfloat16=args.bfloat16
    )
    model = load_model(EMBEDDED / "target", "float32")
    trainer = HeadTrainer(model, "slipstream embedded target", stream.tokens, args.out, settings)
    print(f"{len(library.train)} files, {len(stream.tokens):,} tokens, {torch.get_num_threads()} threads", flush=True)

    def watch(progress: Progress, loss: float) -> None:
        if progress.steps % 20 == 0 or progress.steps == settings.steps:
            pace = progress.tokens / progress.seconds
            print(f"step {progress.steps}/{settings.steps}  loss {loss:.3f}  {pace:.0f} tokens/s", flush=True)

    try:
        trainer.train(watch)
    except KeyboardInterrupt:
        print(f"stopped at step {trainer.step}; the same command goes on from there")
        return 130
    print(json.dumps(json.loads(load_tensors(args.out / FILE, KIND)[1]["report"])["alpha"]))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="where the heads go")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--inner", type=int, default=0, help="hidden units of a head; 0: as a layer of the target")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument(
        "--blind", action="store_true", help="heads that do not see the pending token, as in Stern et al."
    )
    parser.add_argument("--bfloat16", action="store_true", help="multiply in bfloat16")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
