"""Train an EAGLE-3 draft for the embedded target, in the format of speculators, on the embedded pair's text.

    python recipes/eagle3.py --out build/eagle3 --steps 300

Text and split are those of `recipes/demo_pair.py`: Python's standard library without the modules kept for measuring.
The draft stays outside the repository; `slipstream generate --draft eagle3:build/eagle3` uses it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from pair import corpus

from slipstream.models.loading import EMBEDDED, load_model, load_tokenizer
from slipstream.training.ahead import AheadSettings, new_eagle3, save_eagle3, train_ahead


def main() -> int:
    """Train, and write the draft."""
    args = _arguments()
    stream = corpus.Stream(corpus.read_library().train, load_tokenizer(EMBEDDED / "target"))
    model = load_model(EMBEDDED / "target", "float32").requires_grad_(False)
    settings = AheadSettings(args.steps, rate=args.rate)
    net = new_eagle3(model, stream.tokens, args.draft_vocab)
    print(f"{len(stream.tokens):,} tokens, {torch.get_num_threads()} threads", flush=True)

    def watch(step: int, loss: float) -> None:
        if step % 20 == 0 or step == settings.steps:
            print(f"step {step}/{settings.steps}  loss {loss:.3f}", flush=True)

    train_ahead(
        net, [weight for weight in net.parameters() if weight.requires_grad], model, stream.tokens, settings, watch
    )
    save_eagle3(net, args.out)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="where the draft goes")
    parser.add_argument(
        "--draft-vocab", type=int, default=2048, help="how many tokens it knows, the most frequent ones"
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rate", type=float, default=2e-3)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
