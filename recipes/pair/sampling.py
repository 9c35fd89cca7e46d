"""Samples continuations of padded prompts, to measure on."""

from __future__ import annotations

import torch
from transformers import LlamaForCausalLM

from slipstream.execution.names import state_in, with_cache


def _choose(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """Choose a token for each row of logits (rows, vocab) -> (rows, 1); temperature 0 takes the most likely one."""
    cold = temperatures == 0
    scaled = logits.float() / temperatures.masked_fill(cold, 1.0)[:, None]
    drawn = torch.multinomial(scaled.softmax(-1), 1)
    return torch.where(cold[:, None], logits.argmax(-1, keepdim=True), drawn)


@torch.inference_mode()
def continue_rows(
    model: LlamaForCausalLM,
    prompts: torch.Tensor,
    mask: torch.Tensor,
    new: int,
    temperatures: torch.Tensor,
) -> torch.Tensor:
    """Append ``new`` tokens to every prompt (rows, n) -> (rows, n + new); ``mask`` is 0 on the padding on the left."""
    rows = tokens = prompts
    past, call = None, with_cache(model)
    for _ in range(new):
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        out = call(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            cache=past,
            use_cache=True,
            logits_to_keep=1,
        )
        past = state_in(out)
        tokens = _choose(out.logits[:, -1], temperatures)
        rows = torch.cat([rows, tokens], dim=1)
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
    return rows
