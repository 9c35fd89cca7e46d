"""Models whose head is cut to some tokens: the others are impossible, and no time is spent on their logits."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from slipstream.kernels.packing import plain_weight, twin_of
from slipstream.models.facts import vocabulary_of
from slipstream.models.families import trial_text
from slipstream.models.recurrent.calls import calls_of

CAP = "final_logit_softcapping"
"""The configuration's name of Gemma's cap of logits; applied after the cut, it would make the cut tokens possible."""


class CutHead(nn.Module):
    """A head for some tokens of a vocabulary: hidden states (..., width) -> logits (..., vocab), -inf for the others.

    The linear layer `known` computes the kept tokens' logits, and is packed or quantized as other linear layers are.
    """

    kept: Tensor

    def __init__(self, head: Any, kept: Tensor, cap: float | None = None) -> None:
        """Cut a `head` to the tokens `kept` (n,); `cap` is the bound on their logits in Gemma (None: no bound)."""
        super().__init__()
        weight, bias = plain_weight(head).to(head.weight.dtype), getattr(head, "bias", None)
        (self.out_features, self.in_features), self.cap = weight.shape, cap
        self.register_buffer("kept", kept[kept < len(weight)].to(weight.device), persistent=False)
        self.known = nn.Linear(self.in_features, len(self.kept), bias is not None, "meta", weight.dtype)
        self.known.weight = nn.Parameter(weight[self.kept], requires_grad=False)
        if bias is not None:
            self.known.bias = nn.Parameter(bias[self.kept], requires_grad=False)

    @property
    def weight(self) -> Tensor:
        return self.known.weight

    def forward(self, hidden: Tensor) -> Tensor:
        logits = self.known(hidden)
        if self.cap is not None:
            logits = self.cap * torch.tanh(logits / self.cap)
        return logits.new_full((*logits.shape[:-1], self.out_features), -math.inf).index_copy(-1, self.kept, logits)


@torch.no_grad()
def with_kept_tokens(model: PreTrainedModel, name: str, kept: Tensor) -> PreTrainedModel:
    """Return a twin of the model whose head is cut to the tokens `kept` (n,), and which shares all else with it.

    The model may be packed. Raises ValueError in one sentence if its logits do not come from its head alone.
    """
    head = model.get_output_embeddings()
    if head is None:
        raise ValueError(f"{name} has no head whose tokens could be counted out: leave draft_vocab out.")
    twin = twin_of(model)
    config: Any = twin.config.get_text_config()
    cap = getattr(config, CAP, None)
    if cap is not None:
        setattr(config, CAP, None)
    place = next(path for path, module in model.named_modules() if module is head)
    twin.set_submodule(place, CutHead(head, kept, cap).eval())
    _refuse_others(twin, name, kept)
    return twin


@torch.inference_mode()
def _refuse_others(twin: PreTrainedModel, name: str, kept: Tensor) -> None:
    """Raise ValueError unless exactly the kept tokens are possible: some models change the logits after their head."""
    calls = calls_of(twin)
    source = calls.form.example(3) if calls.form else None
    try:
        logits = calls.alone(trial_text(vocabulary_of(twin), 3), source)[0, -1]
        possible = logits.isfinite().nonzero()[:, 0].cpu()
        works = torch.equal(possible, kept[kept < len(logits)].cpu()) and not bool(logits.isnan().any())
    except Exception as error:
        raise ValueError(f"{name} does not run with a part of its head: leave draft_vocab out.") from error
    if not works:
        raise ValueError(f"{name} changes its logits behind its head, which cannot be cut: leave draft_vocab out.")
