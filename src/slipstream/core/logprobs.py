"""`TokenLogprobs`, the log-probabilities at one place of a text: of its token, and of the most probable ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenLogprobs:
    """The natural logarithms of the probabilities of a token, and of the most probable tokens in its place.

    For emitted tokens they are of the target's law that the token was really sampled from, after temperature, top-k and
    all processors; -inf is a token that the law excludes. At temperature 0 that law is a point mass, whose logprobs
    would all be 0 or -inf: there they are the log-softmax of the processed scores, of which the greatest is emitted.
    For tokens of a prompt, which were not sampled, they are the log-softmax of the target's logits.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # token and logprob, the most probable first


def token_logprobs(logs: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprobs]:
    """Return the logprobs of tokens, one for each row of `logs` (tokens, vocab), and of the `top` most probable."""
    own = logs.gather(-1, torch.tensor(tokens, dtype=torch.long, device=logs.device)[:, None])[:, 0].tolist()
    best = logs.topk(min(top, logs.shape[-1]), dim=-1)
    pairs = [
        tuple(sorted(zip(ids, values, strict=True), key=lambda pair: (-pair[1], pair[0])))
        for ids, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]
    return [TokenLogprobs(*each) for each in zip(tokens, own, pairs, strict=True)]
