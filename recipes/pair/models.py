"""Makes the two models, trains them on text, and saves them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from slipstream.training.trainer import Progress, muon_and_adam

from . import ranks
from .budget import DEVICE, SEED, Tokens, bf16, train
from .corpus import VOCABULARY, Windows

CONTEXT = 1024
BATCH = 16_384  # tokens of a step, of all processes together
Stages = tuple[tuple[float, int], ...]
"""The lengths of windows in the course of a training: (until this share of the budget, tokens of a window)."""
# Models learn fastest from short windows; the last stage covers every position that the model will be used at.
STAGES: Stages = ((0.75, 256), (0.90, 512), (1.0, CONTEXT))
SHORT: Stages = ((1.0, 256),)
LIBRARY = 0.25  # the share of windows of the standard library, which is what the held-out files are from
MUON, ADAM = 0.02, 4e-3  # learning rates


def folded_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    scaling: float,
    **others: object,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention over whole windows for training, with the heads that share keys folded into one product.

    On CPUs it takes half the time of torch's attention, whose backward pass is slow there.
    """
    rows, heads, length, width = query.shape
    groups = key.shape[1]
    queries = (query * scaling).reshape(rows, groups, -1, width)
    future = torch.full((length, length), -30_000.0, dtype=query.dtype, device=query.device).triu(1)
    scores = (queries @ key.transpose(-1, -2)).view(rows, groups, -1, length, length) + future
    weights = scores.float().softmax(-1).to(value.dtype).view(rows, groups, -1, length)
    return (weights @ value).view(rows, heads, length, width).transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register("folded", folded_attention)


def _llama(hidden: int, layers: int, heads: int, kv_heads: int, ffn: int) -> LlamaForCausalLM:
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).to(DEVICE)


def new_target() -> LlamaForCausalLM:
    """Make an untrained target of about 10 M parameters."""
    return _llama(hidden=256, layers=12, heads=4, kv_heads=2, ffn=704)


def new_draft(target: LlamaForCausalLM) -> LlamaForCausalLM:
    """Make an untrained draft of a tenth of the target's size, with only two layers for fast steps.

    Its embedding, the slowest part to learn, starts as the target's projected to its main directions.
    """
    draft = _llama(hidden=128, layers=2, heads=2, kv_heads=1, ffn=352)
    wide = target.get_input_embeddings().weight.detach().float()
    directions = torch.linalg.svd(wide, full_matrices=False).Vh[: draft.config.hidden_size]
    with torch.no_grad():
        draft.get_input_embeddings().weight.copy_(wide @ directions.T)
    return draft


def logits_of(model: LlamaForCausalLM, tokens: torch.Tensor) -> torch.Tensor:
    """Return the next-token logits (rows, n, vocab) at every position of token ids (rows, n)."""
    with bf16():
        logits: torch.Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits


def text_loss(model: LlamaForCausalLM, tokens: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of the tokens of windows (rows, n), each given those before it."""
    logits = logits_of(model, tokens[:, :-1])
    return functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def train_on_text(
    model: LlamaForCausalLM, text: Windows, tokens: int, file: Path, fast: bool, stages: Stages = STAGES
) -> Progress:
    """Train a model on a number of tokens, in windows of the text; with `fast`, the loss is compiled.

    `file` holds the state of the training.
    """
    loss_of = torch.compile(text_loss, dynamic=False) if fast else text_loss

    def step(used: float, rng: np.random.Generator) -> tuple[torch.Tensor, int]:
        length = next(length for until, length in stages if used <= until)
        rows = max(1, BATCH // ranks.count() // length)
        return loss_of(model, text.windows(rng, rows, length + 1).to(DEVICE)), rows * length

    model.set_attn_implementation("folded")
    model.train()
    return train(model, muon_and_adam(model, muon=MUON, adam=ADAM), Tokens(tokens), file, step)


def save_pretrained(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Save a model in bfloat16, with its tokenizer, to a folder."""
    copy = LlamaForCausalLM(model.config).to(torch.bfloat16)
    copy.load_state_dict(model.state_dict())
    copy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
