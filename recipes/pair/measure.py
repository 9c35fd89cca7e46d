"""Measures the pair: held-out bits per byte, and acceptance rates of the draft."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from .budget import DEVICE, SEED
from .corpus import Source
from .models import CONTEXT
from .sampling import continue_rows

NEW = 128  # tokens of a completion
AT_ONCE = 64  # prompts of a batch
LONGEST_PROMPT = 512  # tokens; longer prompts lose their start


@dataclass(frozen=True)
class Behaviour:
    """The acceptance rates on one set of prompts, at temperatures 0 (`greedy`) and 1 (`sampled`), and repetition.

    `repeated` is the share of 4-grams in greedy completions that have occurred in the same completion before.
    """

    prompts: int
    greedy: float
    sampled: float
    repeated: float


def load_exact(folder: Path) -> LlamaForCausalLM:
    """Load the saved model as users do, but in float32, so that rounding does not blur ties."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.to(DEVICE).eval()


@torch.inference_mode()
def bits_per_byte(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, sources: list[Source]) -> float:
    """Return the bits that the model needs per byte of text, in windows of its context without overlap."""
    bits = torch.zeros((), dtype=torch.float64)
    for source in sources:
        tokens = torch.tensor([tokenizer.eos_token_id, *tokenizer(source.text, verbose=False).input_ids])
        for begin in range(0, len(tokens) - 1, CONTEXT):
            window = tokens[begin : begin + CONTEXT + 1].to(DEVICE)
            logits = model(input_ids=window[None, :-1], use_cache=False).logits[0]
            bits += functional.cross_entropy(logits, window[1:], reduction="sum").double().cpu()
    total = sum(len(source.text.encode()) for source in sources)
    return bits.item() / torch.log(torch.tensor(2.0)).item() / total


def read_prompts(file: Path) -> list[str]:
    """Read the prompts of a gzipped JSON-lines file."""
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        return [json.loads(line)["prompt"] for line in lines]


def behaviour(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompts: list[str],
) -> Behaviour:
    """Measure acceptance rates at temperatures 0 and 1, and repetition, on the target's own continuations."""
    acceptance: dict[float, list[torch.Tensor]] = {0.0: [], 1.0: []}
    repeated: list[float] = []
    for tokens, mask in _padded(tokenizer, prompts):
        for temperature, chances in acceptance.items():
            rows = _continued(target, tokens, mask, temperature)
            chances.append(_agreement(target, draft, rows, mask, temperature))
            if temperature == 0:
                repeated += [_repeated(row) for row in _completions(rows, tokenizer.eos_token_id)]
    greedy, sampled = (torch.cat(chances).mean().item() for chances in acceptance.values())
    return Behaviour(len(prompts), greedy, sampled, sum(repeated) / len(repeated))


def _completions(rows: torch.Tensor, end: int) -> Iterator[list[int]]:
    for row in rows[:, -NEW:].tolist():
        yield row[: row.index(end)] if end in row else row


def _repeated(tokens: list[int]) -> float:
    """Return the share of the 4-grams of a text that have occurred in it before."""
    grams = [tuple(tokens[place : place + 4]) for place in range(len(tokens) - 3)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def _padded(tokenizer: PreTrainedTokenizerFast, prompts: list[str]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield batches (tokens, mask) of prompts of similar length, padded on the left; long ones lose their start."""
    rows = sorted((tokenizer(p, verbose=False).input_ids[-LONGEST_PROMPT:] for p in prompts), key=len)
    for begin in range(0, len(rows), AT_ONCE):
        some = rows[begin : begin + AT_ONCE]
        width = len(some[-1])
        tokens = [[tokenizer.pad_token_id] * (width - len(row)) + row for row in some]
        mask = [[0] * (width - len(row)) + [1] * len(row) for row in some]
        yield torch.tensor(tokens).to(DEVICE), torch.tensor(mask).to(DEVICE)


def _continued(model: LlamaForCausalLM, tokens: torch.Tensor, mask: torch.Tensor, temperature: float) -> torch.Tensor:
    torch.manual_seed(SEED)
    temperatures = torch.full((len(tokens),), temperature, device=DEVICE)
    return continue_rows(model, tokens, mask, NEW, temperatures)


@torch.inference_mode()
def _agreement(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, rows: torch.Tensor, mask: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Return the chance that the draft's token is accepted, at each position up to the end of a text, (positions,)."""
    p, q = (_next_token_logits(model, rows, mask) for model in (target, draft))
    if temperature == 0:
        kept = (p.argmax(-1) == q.argmax(-1)).float()
    else:
        kept = torch.minimum(p.softmax(-1), q.softmax(-1)).sum(-1)
    ends = (rows[:, -NEW:] == target.config.eos_token_id).long()
    return kept[ends.cumsum(-1) - ends == 0]


def _next_token_logits(model: LlamaForCausalLM, rows: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the logits (rows, NEW, vocab) that predict each of the last ``NEW`` tokens."""
    mask = torch.cat([mask, mask.new_ones(len(rows), NEW)], dim=1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    out = model(input_ids=rows, attention_mask=mask, position_ids=positions, logits_to_keep=NEW + 1)
    logits: torch.Tensor = out.logits[:, :-1]
    return logits
