"""Train an EAGLE-3 draft for the embedded target, and save it in the format of speculators.

    python recipes/eagle3.py --out build/eagle3 --steps 300

Half of the text is Python's standard library without the modules that `recipes/demo_pair.py` holds out for measuring;
the other half are texts that the target writes. An interrupted run continues where it stopped.
The draft stays outside the repository; `slipstream generate --draft eagle3:build/eagle3` uses it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ahead import AheadSettings, AheadTrainer, new_eagle3, save_eagle3
from pair import corpus

from slipstream.engine.load import load
from slipstream.models.loading.load import load_model, load_tokenizer
from slipstream.models.loading.pairings import EMBEDDED
from slipstream.training.material import WrittenTexts
from slipstream.training.trainer import Checkpoint, Progress


def main() -> int:
    """Train the draft, or resume its training, and save it."""
    args = _arguments()
    library, tokenizer = corpus.read_library(), load_tokenizer(EMBEDDED / "target")
    stream = corpus.Stream.of(library.train, tokenizer)
    model = load_model(EMBEDDED / "target", "float32").requires_grad_(False)
    settings = AheadSettings(args.steps, rows=16, rate=args.rate, bfloat16=args.bfloat16)
    net = new_eagle3(model, stream.tokens, args.draft_vocab)
    print(f"{len(stream.tokens):,} tokens, {torch.get_num_threads()} threads", flush=True)

    text = np.concatenate([stream.tokens, *_written(stream, library, tokenizer, args)])
    checkpoint = Checkpoint(args.out / "training.safetensors", {"draft_vocab": args.draft_vocab})
    trainer = AheadTrainer(net, net, model, text, settings, checkpoint)

    def watch(progress: Progress, loss: float) -> None:
        if progress.steps % 20 == 0 or progress.steps == settings.steps:
            print(f"step {progress.steps}/{settings.steps}  loss {loss:.3f}  {progress.seconds:.0f} s", flush=True)
        if progress.steps % 100 == 0 or progress.steps == settings.steps:
            print("alpha by position:", *(f"{alpha:.3f}" for alpha in trainer.alpha()), flush=True)

    try:
        trainer.train(watch)
    except KeyboardInterrupt:
        print(f"stopped at step {trainer.step}; the same command goes on from there")
        return 130
    save_eagle3(net, args.out)
    return 0


def _written(stream: corpus.Stream, library: corpus.Library, tokenizer: Any, args: argparse.Namespace) -> list[Any]:
    """Let the target write texts, and return them repeated to about as many tokens as the library has."""
    texts = WrittenTexts(args.out / "written.safetensors", {"target": "embedded"})
    prompts = corpus.prompts(library.train, stream, tokenizer)
    texts.write(load(EMBEDDED / "target", batch_size=64), prompts, lambda texts: texts.tokens < args.written, 160)
    return texts.texts * (len(stream.tokens) // max(1, texts.tokens))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="where the draft goes")
    parser.add_argument(
        "--draft-vocab", type=int, default=3072, help="vocabulary of the draft: the most frequent tokens"
    )
    parser.add_argument("--written", type=int, default=150_000, help="tokens that the target writes")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--bfloat16", action="store_true", help="multiply in bfloat16")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
