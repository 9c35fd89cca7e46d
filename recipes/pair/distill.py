"""Distills the draft on the target's laws, with the package's lessons and objectives."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional
from transformers import LlamaForCausalLM

from slipstream.training.lessons import LessonBatch, Lessons, kl_then_tv
from slipstream.training.trainer import Progress, muon_and_adam

from . import ranks
from .budget import DEVICE, SEED, Tokens, train
from .corpus import Windows
from .models import ADAM, CONTEXT, MUON, logits_of
from .writing import WRITTEN

FROM_TARGET = 0.75  # the share of batches that are texts written by the target
TEXT_TOKENS = 600_000  # tokens of the windows of text, in all processes together
TOKENS = 4096  # the approximate number of tokens of a batch of one process


def distillation_loss(draft: LlamaForCausalLM, batch: LessonBatch, used: torch.Tensor) -> torch.Tensor:
    """Return the loss of a batch: forward KL that turns into total variation, which is exactly the rejection rate."""
    log_q = functional.log_softmax(logits_of(draft, batch.tokens)[:, :-1].float(), -1).gather(-1, batch.ids)
    return (kl_then_tv(batch.log_p, log_q, used) * batch.real).sum() / batch.real.sum()


def distill(
    draft: LlamaForCausalLM,
    target: LlamaForCausalLM,
    text: Windows,
    written: Sequence[Sequence[int]],
    tokens: int,
    file: Path,
    fast: bool,
) -> Progress:
    """Train the draft on the target's laws for a number of tokens of text and of texts that the target has written.

    Among several processes, each one passes its own texts. `file` holds the state of the training; with `fast`, the
    loss is compiled.
    """
    loss_of = torch.compile(distillation_loss, dynamic=False) if fast else distillation_loss
    generator = np.random.default_rng([SEED, ranks.number()])
    read = text.windows(generator, TEXT_TOKENS // CONTEXT // ranks.count(), CONTEXT)

    def target_logits(tokens: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return logits_of(target, tokens)

    vocab = target.config.vocab_size
    of_text = Lessons(read.tolist(), CONTEXT, vocab, target_logits)
    of_target = Lessons(written, WRITTEN, vocab, target_logits)

    def step(used: float, rng: np.random.Generator) -> tuple[torch.Tensor, int]:
        lessons = of_target if rng.random() < FROM_TARGET else of_text
        count = max(1, TOKENS // lessons.rows.shape[1])
        batch = lessons.pick(rng.integers(0, len(lessons), count), DEVICE)
        # A tensor, so that a compiled loss is not specialised on each value.
        fraction = torch.tensor(used, device=DEVICE)
        return loss_of(draft, batch, fraction), batch.tokens.numel()

    draft.set_attn_implementation("folded")
    draft.train()
    return train(draft, muon_and_adam(draft, muon=MUON, adam=ADAM), Tokens(tokens), file, step)
