"""Train an EAGLE-3 draft of 3.9 M parameters for SmolLM2-135M-Instruct, for chats.

    python recipes/chat_draft.py --out build/smollm2

The target writes chats with itself, its hidden states are stored, and the draft learns the target's laws from them. An
interrupted run continues where it stopped. Batches of chats take 90 MB each; the default ones take an hour of two
cores, and the training another.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from chat.lessons import drafted, loss_of
from chat.writing import PLACES, ChatWriter
from safetensors import safe_open
from torch import Tensor, nn

from slipstream.kernels.packing import plain_weight
from slipstream.models.heads.eagle3 import Eagle3, Eagle3Settings
from slipstream.models.loading.load import load_scorer, load_tokenizer
from slipstream.models.loading.pairings import located
from slipstream.training.ahead import KEPT, save_eagle3
from slipstream.training.trainer import Checkpoint, Progress, Steps, Trainer, muon_and_adam, trapezoid

STORED = ("tokens", "answer", "total", "states")
LAYER = {"intermediate_size": 576, "num_attention_heads": 6, "num_key_value_heads": 6, "num_hidden_layers": 1}
"""The sizes of the draft's layer where they are not the target's."""


def main() -> int:
    """Run the recipe, or resume it."""
    args = _arguments()
    source = located("smollm2")
    scorer: Any = load_scorer(source)
    files = ChatWriter(scorer, load_tokenizer(source), args.out / "chats", args.rows, args.length).write(
        args.batches, lambda line: print(line, flush=True)
    )
    net = _draft(scorer.model, files, args.draft_vocab)
    head = net.lm_head.weight.detach().to(torch.bfloat16)
    trainer = Trainer(
        net,
        muon_and_adam(net, muon=10 * args.rate, adam=args.rate),
        trapezoid(0.01, 0.6, first=0.1),
        Steps(args.steps, save_every=50),
        Checkpoint(args.out / "training.safetensors", {"steps": args.steps, "batches": args.batches}),
    )

    def loss(step: int, used: float) -> tuple[Tensor, int]:
        rng = np.random.default_rng([step, 7])
        batch = _read(files[int(rng.integers(1, len(files)))], rng.choice(args.rows, min(args.rows, 12), replace=False))
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(drafted(net, head, batch, 3, (1, 2)), used), batch["tokens"].numel()

    def watch(progress: Progress, value: float) -> None:
        if progress.steps % 20 == 0 or progress.steps == args.steps:
            print(f"step {progress.steps}/{args.steps}  loss {value:.3f}  {progress.seconds:.0f} s", flush=True)

    try:
        trainer.train(loss, watch)
    except KeyboardInterrupt:
        print(f"stopped at step {trainer.progress.steps}; the same command goes on from there")
        return 130
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):  # the first batch is held out
        held = _read(files[0], np.arange(args.rows))
        sampled, greedy = (drafted(net, head, held, 4, (kind,)) for kind in (2, 1))
    print("alpha of sampled answers, by position:", *(f"{each.alpha:.3f}" for each in sampled))
    print("same likeliest token in greedy answers:", *(f"{each.likeliest:.3f}" for each in greedy))
    save_eagle3(net, args.out / "draft", small=True)
    return 0


def _draft(model: Any, files: list[Path], vocab: int) -> Eagle3:
    """Make an untrained draft that knows the `vocab` most frequent tokens of the answers, with the target's head."""
    config = model.config
    layer = {name: getattr(config, name) for name in KEPT} | LAYER
    record = {"speculators_model_type": "eagle3", "draft_vocab_size": vocab, "transformer_layer_config": layer}
    torch.manual_seed(0)
    net = Eagle3(Eagle3Settings.read({**record, "norm_before_residual": True, "fc_norm": True}, "the draft"), PLACES)
    counts = torch.zeros(config.vocab_size)
    for file in files:
        with safe_open(file, "pt") as stored:
            tokens, answer = (stored.get_tensor(name) for name in ("tokens", "answer"))
        counts += torch.bincount(tokens[answer > 0].long(), minlength=len(counts))
    net.targets = counts.argsort(descending=True, stable=True)[:vocab].sort().values
    embeddings, head = plain_weight(model.get_input_embeddings()), plain_weight(model.get_output_embeddings())
    net.embed_tokens = nn.Embedding.from_pretrained(embeddings.float())
    net.lm_head.weight = nn.Parameter(head[net.targets].float(), requires_grad=False)
    return net


def _read(file: Path, rows: np.ndarray) -> dict[str, Tensor]:
    """Read some rows of a batch of chats."""
    with safe_open(file, "pt") as stored:
        return {name: torch.stack([stored.get_slice(name)[int(row)] for row in rows]) for name in STORED}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="where the chats, the training and the draft go")
    parser.add_argument("--batches", type=int, default=30, help="batches of chats that the target writes")
    parser.add_argument("--rows", type=int, default=48, help="chats in a batch")
    parser.add_argument("--length", type=int, default=416, help="tokens of a chat")
    parser.add_argument("--draft-vocab", type=int, default=6144)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rate", type=float, default=2e-3)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
