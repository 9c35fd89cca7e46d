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

from . import ranks
from .budget import DEVICE, SEED, Tokens, train
from .corpus import Windows
from .models import ADAM, CONTEXT, MUON, logits_of

FROM_POOL = 0.75
TEXT_TOKENS = 1_000_000
TOKENS = 4096  # the approximate number of tokens of a batch of one process


def distillation_loss(
    draft: LlamaForCausalLM, tokens: torch.Tensor, ids: torch.Tensor, log_p: torch.Tensor, used: torch.Tensor
) -> torch.Tensor:
    """Return the loss of a batch: forward KL that turns into total variation, which is exactly the rejection rate."""
    log_q = functional.log_softmax(logits_of(draft, tokens)[:, :-1].float(), -1).gather(-1, ids)
    return kl_then_tv(log_p, log_q, used).mean()


def distill(
    draft: LlamaForCausalLM,
    target: LlamaForCausalLM,
    text: Windows,
    rows: torch.Tensor,
    tokens: int,
    file: Path,
    fast: bool,
) -> Progress:
    """Train the draft on a number of tokens: windows of the text, and rows that the target has written.

    Among several processes, each one gives rows of its own.
    """
    loss_of = torch.compile(distillation_loss, dynamic=False) if fast else distillation_loss
    share = np.random.default_rng([SEED, ranks.number()])
    read = text.windows(share, TEXT_TOKENS // CONTEXT // ranks.count(), CONTEXT)

    def ask(tokens: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return logits_of(target, tokens)

    vocab = target.config.vocab_size
    of_text, of_target = (Lessons(some.tolist(), some.shape[1], vocab, ask) for some in (read, rows))

    def step(used: float, rng: np.random.Generator) -> tuple[torch.Tensor, int]:
        lessons = of_target if rng.random() < FROM_POOL else of_text
        some = max(1, TOKENS // lessons.rows.shape[1])
        batch = lessons.pick(rng.integers(0, len(lessons), some), DEVICE)
        # A tensor, so that a compiled loss is not specialised on each value.
        fraction = torch.tensor(used, device=DEVICE)
        return loss_of(draft, batch.tokens, batch.ids, batch.log_p, fraction), batch.tokens.numel()

    draft.set_attn_implementation("folded")
    draft.train()
    return train(draft, muon_and_adam(draft, muon=MUON, adam=ADAM), Tokens(tokens), file, step)
