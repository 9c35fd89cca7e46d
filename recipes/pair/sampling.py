"""Continuations written by a model: material to distil on and to measure on."""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaForCausalLM

from slipstream.files import atomic_write

from .budget import DEVICE, SEED, advance, clock

ROW = 320  # tokens of a prompt and its continuation together
LONGEST_PROMPT = 240
BATCH = 64
# Drafts are used at every temperature, so the rows are written at several.
TEMPERATURES, SHARES = (0.0, 0.6, 1.0), (0.3, 0.1, 0.6)


def _choose(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """One token per row; temperature 0 means the most likely one."""
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
    """Append ``new`` tokens to every row; ``mask`` is 0 on padding, which is on the left."""
    rows, past = prompts, None
    tokens = prompts
    for _ in range(new):
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        out = model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=past,
            use_cache=True,
            logits_to_keep=1,
        )
        past = out.past_key_values
        tokens = _choose(out.logits[:, -1], temperatures)
        rows = torch.cat([rows, tokens], dim=1)
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
    return rows


class Pool:
    """Rows written by the target, collected for a number of minutes and kept on disk."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.rows = torch.empty(0, ROW, dtype=torch.int64)
        self.elapsed = 0.0
        if file.exists():
            state = torch.load(file, weights_only=True)
            self.rows, self.elapsed = state["rows"].long(), state["elapsed"]

    def fill(self, target: LlamaForCausalLM, prompts: list[list[int]], minutes: float) -> None:
        """Let the target continue prompts until the time is used up."""
        by_length: dict[int, list[list[int]]] = defaultdict(list)
        for prompt in prompts:
            if len(prompt) <= LONGEST_PROMPT:
                by_length[len(prompt)].append(prompt)
        seconds = minutes * 60.0
        with clock("samples", seconds, self.elapsed) as bar:
            while self.elapsed < seconds:
                began = time.perf_counter()
                rng = np.random.default_rng([SEED, 1, len(self.rows)])
                self.rows = torch.cat([self.rows, _written(target, by_length, rng)])
                self.elapsed += time.perf_counter() - began
                self._save()
                advance(bar, self.elapsed, rows=len(self.rows))

    def pick(self, rng: np.random.Generator, rows: int) -> torch.Tensor:
        """A random batch of rows."""
        return self.rows[torch.from_numpy(rng.integers(0, len(self.rows), rows))]

    def _save(self) -> None:
        with atomic_write(self.file) as part:
            torch.save({"rows": self.rows.to(torch.int16), "elapsed": self.elapsed}, part)


def _written(target: LlamaForCausalLM, by_length: dict[int, list[list[int]]], rng: np.random.Generator) -> torch.Tensor:
    """One batch: prompts of equal length (no padding to train on), mixed temperatures."""
    lengths = sorted(by_length)
    sizes = np.array([len(by_length[length]) for length in lengths])
    length = lengths[rng.choice(len(lengths), p=sizes / sizes.sum())]
    group = by_length[length]
    prompts = torch.tensor([group[i] for i in rng.integers(0, len(group), BATCH)]).to(DEVICE)
    temperatures = torch.tensor(rng.choice(TEMPERATURES, BATCH, p=SHARES), dtype=torch.float32)
    torch.manual_seed(int(rng.integers(2**31)))
    mask = torch.ones_like(prompts)
    return continue_rows(target, prompts, mask, ROW - length, temperatures.to(DEVICE)).cpu()
