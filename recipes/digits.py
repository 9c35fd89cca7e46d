"""Train a target and a draft that write pictures of digits, pixel by pixel, on those that ship with scikit-learn.

    python recipes/digits.py --out build/digits

There are 1,797 pictures of 8 x 8 pixels with 16 levels of grey; the last 297 are held out for measuring. A text is the
digit's token (16 + digit) and 64 pixels (tokens 0 to 15). An interrupted run continues where it stopped when the same
command is given again. It takes about two minutes on two cores; `examples/images.py` shows what the pair does.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from slipstream.training.trainer import Checkpoint, Progress, Steps, Trainer

KEPT = 297
"""The number of pictures that are held out for measuring."""
SIZES = {"target": (96, 3), "draft": (32, 1)}
"""The hidden units and layers of both models."""


def texts() -> Tensor:
    """Return all pictures as token ids (pictures, 65): the digit, and then its pixels row by row."""
    digits = load_digits()
    pixels = torch.from_numpy(digits.images).long().clamp(max=15).flatten(1)
    return torch.cat([16 + torch.from_numpy(digits.target).long()[:, None], pixels], 1)


def new_model(hidden: int, layers: int) -> LlamaForCausalLM:
    """Make a small Llama model with 26 tokens."""
    config = LlamaConfig(
        vocab_size=26,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 16,
        max_position_embeddings=80,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


def train(name: str, out: Path, steps: int, batch: int = 64) -> LlamaForCausalLM:
    """Train one of the two models, or resume its training, and save it to its folder under `out`."""
    torch.manual_seed(0)
    model, pictures = new_model(*SIZES[name]), texts()[:-KEPT]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    checkpoint = Checkpoint(out / f"{name}.state", {"model": name, "steps": steps, "batch": batch})

    def loss(step: int, used: float) -> tuple[Tensor, int]:
        places = torch.randint(len(pictures), (batch,), generator=torch.Generator().manual_seed(step))
        return model(input_ids=pictures[places], labels=pictures[places]).loss, batch * pictures.shape[1]

    def schedule(step: int, used: float) -> float:
        return min(1.0, (step + 1) / 20) * (0.5 + 0.5 * math.cos(math.pi * used))

    def watch(progress: Progress, value: float) -> None:
        if progress.steps % 50 == 0 or progress.steps == steps:
            print(f"{name}: step {progress.steps}/{steps}  loss {value:.3f}", flush=True)

    trainer = Trainer(model, [optimizer], schedule, Steps(steps, 100), checkpoint)
    trainer.train(loss, watch)
    trainer.save()
    model.eval().save_pretrained(out / name)
    return model


@torch.no_grad()
def bits_per_pixel(model: LlamaForCausalLM) -> float:
    """Return the bits that the model needs per pixel of the held-out pictures."""
    held_out = texts()[-KEPT:]
    return float(model(input_ids=held_out, labels=held_out).loss) / math.log(2)


def main() -> int:
    """Train both models, and print their bits per pixel on the held-out pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="where both models go")
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    try:
        for name in SIZES:
            print(f"{name}: {bits_per_pixel(train(name, args.out, args.steps)):.3f} bits per kept pixel", flush=True)
    except KeyboardInterrupt:
        print("stopped; the same command goes on from there")
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
