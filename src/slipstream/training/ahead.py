"""Training networks that draft from a target's hidden states: EAGLE-3 drafts, and heads of the target's own kind.

The target is frozen. It reads a window of text once; the network learns the target's own law one token on, from the
target's states, and then, as when drafting, further on from what it made itself (training-time test, arXiv 2503.01840).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from slipstream.execution.masks import PassMasks
from slipstream.files import atomic_write
from slipstream.kernels.packing import plain_weight
from slipstream.models.eagle3 import Eagle3, Eagle3Settings
from slipstream.models.head_scorer import Behind, Head
from slipstream.models.hidden_states import LAST
from slipstream.text.jsontext import json_text

KEPT = (
    *("hidden_size", "vocab_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("rms_norm_eps", "rope_parameters", "max_position_embeddings", "hidden_act"),
)
"""What the layer of a new draft takes over from a Llama-like target."""


@dataclass(frozen=True)
class AheadSettings:
    """How a network is trained: `rows` windows of `length` tokens make a step; it drafts `unroll` tokens in a row.

    Raises ValueError for what is impossible.
    """

    steps: int = 300
    rows: int = 8
    length: int = 128
    rate: float = 2e-3
    unroll: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "rows", "unroll"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is not possible: it must be 1 or more.")
        if self.length < self.unroll + 3:
            raise ValueError(f"length={self.length} is too short to draft {self.unroll} tokens: give more.")


def new_eagle3(model: Any, tokens: Sequence[int] | np.ndarray, draft_vocab: int, seed: int = 0) -> Eagle3:
    """An untrained EAGLE-3 draft for a Llama-like model, which knows the tokens that are most frequent in a text.

    Raises ValueError for an impossible number of them.
    """
    config = model.config.get_text_config()
    if not 1 <= draft_vocab <= config.vocab_size:
        raise ValueError(f"draft_vocab={draft_vocab} is not possible: the model has {config.vocab_size} tokens.")
    layer = {name: value for name in KEPT if (value := getattr(config, name, None)) is not None}
    record = {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": draft_vocab,
        "norm_before_residual": True,
        "transformer_layer_config": {"model_type": "llama", **layer, "num_hidden_layers": 1},
    }
    torch.manual_seed(seed)
    settings = Eagle3Settings.read(record, "the new draft")
    net = Eagle3(settings, settings.places(config.num_hidden_layers))
    counts = torch.bincount(torch.as_tensor(np.asarray(tokens, dtype=np.int64)), minlength=config.vocab_size)
    net.targets = counts.argsort(descending=True, stable=True)[:draft_vocab].sort().values
    embeddings, head = model.get_input_embeddings().weight, plain_weight(model.get_output_embeddings())
    with torch.no_grad():
        net.embed_tokens.weight.copy_(embeddings.float())
        net.lm_head.weight.copy_(head[net.targets].float())
    net.embed_tokens.requires_grad_(False)
    return net.to(model.device)


def save_eagle3(net: Eagle3, folder: str | Path) -> None:
    """Write a draft as speculators does: config.json and model.safetensors, each whole or not at all."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    settings = net.settings
    layer = {"model_type": settings.layer.model_type, **settings.layer.to_diff_dict()}
    record = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": settings.draft_vocab,
        "eagle_aux_hidden_state_layer_ids": list(net.places),
        "norm_before_residual": settings.norm_before_residual,
        "norm_before_fc": settings.norm_before_fc,
        "fc_norm": settings.fc_norm,
        "norm_output": settings.norm_output,
        "target_hidden_size": settings.target_width,
        "transformer_layer_config": layer,
    }
    tensors = {name: weight.detach().cpu().contiguous() for name, weight in net.state_dict().items()}
    del tensors["embed_tokens.weight"]  # the target's
    if settings.draft_vocab < net.vocab:
        targets = net.targets.cpu()
        tensors["d2t"] = targets - torch.arange(len(targets))
        tensors["t2d"] = torch.zeros(net.vocab, dtype=torch.bool).index_fill_(0, targets, True)
    with atomic_write(folder / "model.safetensors") as part:
        save_file(tensors, part, {"format": "pt"})
    with atomic_write(folder / "config.json") as part:
        part.write_text(json_text(record), encoding="utf-8")


def train_ahead(
    head: Head,
    weights: Sequence[Tensor],
    model: Any,
    tokens: Sequence[int] | np.ndarray,
    settings: AheadSettings,
    watch: Callable[[int, float], object] = lambda step, loss: None,
) -> None:
    """Train a network's weights in place, on a text of tokens and the laws of a frozen model.

    Raises ValueError if the text is shorter than two windows, FloatingPointError if the loss is no finite number.
    """
    text = torch.as_tensor(np.asarray(tokens, dtype=np.int64))
    if len(text) < 2 * settings.length:
        raise ValueError(f"{len(text)} tokens of text are too few: give at least {2 * settings.length}.")
    optimizer = torch.optim.AdamW(weights, lr=settings.rate, betas=(0.9, 0.95), weight_decay=0.01)
    rng = np.random.default_rng(settings.seed)
    for step in range(settings.steps):
        done = step / settings.steps
        optimizer.param_groups[0]["lr"] = settings.rate * min(1.0, done / 0.05 + 0.1, (1 - done) / 0.6)
        starts = torch.from_numpy(rng.integers(0, len(text) - settings.length + 1, settings.rows))
        loss = _loss(head, model, text[starts[:, None] + torch.arange(settings.length)], settings.unroll)
        if not loss.isfinite():
            raise FloatingPointError(f"the draft diverged after {step} steps: give a rate below {settings.rate:g}.")
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        watch(step + 1, float(loss.detach()))


def _loss(head: Head, model: Any, tokens: Tensor, unroll: int) -> Tensor:
    """Cross entropy against the target's laws on windows (rows, length), of tokens drafted in a row."""
    tokens = tokens.to(model.device)
    with torch.no_grad():
        out = model(input_ids=tokens, use_cache=False, output_hidden_states=True)
        # transformers' last hidden state is the normed one, and those before it are not
        states = [out.hidden_states[place if place != LAST else -1] for place in head.places]
        laws = out.logits.float().softmax(-1)
    hidden = head.combine(torch.cat(states, -1)[:, :-1])
    losses = []
    for ahead in range(unroll):
        count = tokens.shape[1] - 1 - ahead
        slots = torch.arange(count, device=tokens.device)[None]
        behind = Behind(slots, None, PassMasks.chain(slots, count))
        hidden = head(min(ahead, head.depth - 1), tokens[:, 1 + ahead :], hidden[:, :count], behind)
        logits = head.logits(hidden).float()
        known = logits.isfinite()
        p = laws[:, 1 + ahead :] * known
        log_q = functional.log_softmax(logits, -1).masked_fill(~known, 0.0)
        losses.append(-(p * log_q).sum(-1).mean())
    return torch.stack(losses).mean()
