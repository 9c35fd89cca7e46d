"""Teaching the draft to predict what the target would say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from tqdm import trange
from transformers import LlamaForCausalLM

from slipstream.training.optimizers import muon_and_adam
from slipstream.training.trainer import Progress

from .budget import DEVICE, SEED, train
from .corpus import Stream
from .models import CONTEXT, logits_of
from .sampling import Pool

FROM_POOL = 0.75
TEXT_TOKENS = 200_000
TOKENS = 4096  # of a batch, about
# The target's most likely tokens are remembered one by one, the rest as one sum.
TOP = 128


class Lessons:
    """Rows of tokens with the target's answers, asked once and used many times."""

    def __init__(self, target: LlamaForCausalLM, rows: torch.Tensor) -> None:
        count, length = rows.shape
        self.rows = rows
        self.some = max(1, TOKENS // length)
        self.log_p = torch.empty(count, length, TOP, dtype=torch.float16)
        self.ids = torch.empty(count, length, TOP, dtype=torch.int16)
        with torch.inference_mode():
            for begin in trange(0, count, self.some, desc="answers"):
                part = slice(begin, begin + self.some)
                logits = logits_of(target, rows[part].to(DEVICE)).float()
                top = logits.log_softmax(-1).topk(TOP)
                self.log_p[part], self.ids[part] = top.values.cpu(), top.indices.cpu()

    def pick(self, rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A random batch: tokens, the target's top tokens and their log-probabilities."""
        chosen = torch.from_numpy(rng.integers(0, len(self.rows), self.some))
        rows, ids, log_p = self.rows[chosen], self.ids[chosen].long(), self.log_p[chosen].float()
        return rows.to(DEVICE), ids.to(DEVICE), log_p.to(DEVICE)


def distillation_loss(
    draft: LlamaForCausalLM, tokens: torch.Tensor, ids: torch.Tensor, log_p: torch.Tensor, tilt: torch.Tensor
) -> torch.Tensor:
    """Forward KL blended with total variation, which is exactly the rejection rate.

    KL teaches fast while the two are far apart; ``tilt`` moves the weight to what counts.
    """
    log_q = logits_of(draft, tokens).float().log_softmax(-1).gather(-1, ids)
    p, q = log_p.exp(), log_q.exp()
    p_rest, q_rest = ((1.0 - x.sum(-1)).clamp(min=1e-4) for x in (p, q))
    kl = (p * (log_p - log_q)).sum(-1) + p_rest * (p_rest.log() - q_rest.log())
    variation = 0.5 * ((p - q).abs().sum(-1) + (p_rest - q_rest).abs())
    return ((1.0 - tilt) * kl + 2.0 * tilt * variation).mean()


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
    read, written = Lessons(target, text), Lessons(target, pool.rows)

    def step(fraction: float, rng: np.random.Generator) -> tuple[torch.Tensor, int]:
        batch = (written if rng.random() < FROM_POOL else read).pick(rng)
        # A tensor, so that a compiled loss is not specialised on each value.
        tilt = torch.tensor(0.9 * fraction, device=DEVICE)
        return loss_of(draft, *batch, tilt), batch[0].numel()

    draft.train()
    return train(draft, muon_and_adam(draft, muon=0.02, adam=4e-3), minutes, file, step)
