"""Distillation of the draft on the target's laws, with the package's lessons and objectives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch.nn import functional
from transformers import LlamaForCausalLM

from slipstream.training.lessons import Lessons
from slipstream.training.objectives import kl_then_tv
from slipstream.training.optimizers import muon_and_adam
from slipstream.training.trainer import Progress

from .budget import DEVICE, SEED, train
from .corpus import Stream
from .models import CONTEXT, logits_of
from .sampling import Pool

FROM_POOL = 0.75
TEXT_TOKENS = 200_000
TOKENS = 4096  # the approximate number of tokens of a batch


def distillation_loss(
    draft: LlamaForCausalLM, tokens: torch.Tensor, ids: torch.Tensor, log_p: torch.Tensor, used: torch.Tensor
) -> torch.Tensor:
    """Return the loss of a batch: forward KL that turns into total variation, which is exactly the rejection rate."""
    log_q = functional.log_softmax(logits_of(draft, tokens)[:, :-1].float(), -1).gather(-1, ids)
    return kl_then_tv(log_p, log_q, used).mean()


def distill(
    draft: LlamaForCausalLM,
    target: LlamaForCausalLM,
    stream: Stream,
    pool: Pool,
    minutes: float,
    file: Path,
    fast: bool,
) -> Progress:
    """Train the draft for a number of minutes on library windows and target samples."""
    loss_of = torch.compile(distillation_loss, dynamic=False) if fast else distillation_loss
    text = stream.windows(np.random.default_rng(SEED), TEXT_TOKENS // CONTEXT, CONTEXT)

    def ask(tokens: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return logits_of(target, tokens)

    vocab = target.config.vocab_size
    read, written = (Lessons(rows.tolist(), rows.shape[1], vocab, ask) for rows in (text, pool.rows))

    def step(fraction: float, rng: np.random.Generator) -> tuple[torch.Tensor, int]:
        lessons = written if rng.random() < FROM_POOL else read
        some = max(1, TOKENS // lessons.rows.shape[1])
        batch = lessons.pick(rng.integers(0, len(lessons), some), DEVICE)
        # A tensor, so that a compiled loss is not specialised on each value.
        used = torch.tensor(fraction, device=DEVICE)
        return loss_of(draft, batch.tokens, batch.ids, batch.log_p, used), batch.tokens.numel()

    draft.train()
    return train(draft, muon_and_adam(draft, muon=0.02, adam=4e-3), minutes, file, step)
