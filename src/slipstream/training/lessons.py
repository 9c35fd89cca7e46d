"""Lessons: rows of tokens with what a target says at every position, asked for once and used many times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

TOP = 128
"""Tokens whose probabilities are remembered one by one, at every position; the others count as one."""

Tokens = Sequence[int] | np.ndarray
"""A text as token ids."""

Ask = Callable[[Tensor], Tensor]
"""Tokens (rows, n) -> the target's logits (rows, n, vocab)."""


class Batch(NamedTuple):
    """Rows of `tokens` (rows, n), of which `real` (rows, n - 1) says where a next token is; the target's likeliest
    tokens there, `ids` (rows, n - 1, top), and the logarithms `log_p` of their probabilities."""

    tokens: Tensor
    real: Tensor
    ids: Tensor
    log_p: Tensor


class Lessons:
    """Rows of tokens, and the target's laws at each position, which it is asked for when a row is first picked."""

    def __init__(self, texts: Sequence[Tokens], length: int, vocab: int, ask: Ask | None) -> None:
        """Texts are cut at `length` tokens. Without `ask` the law at a position is the token that follows in the text,
        which is sequence-level distillation on texts of the target."""
        kept = [text[:length] for text in texts if len(text) > 1]
        self._ask, self._counts = ask, torch.tensor([len(text) for text in kept], dtype=torch.long)
        self.rows = torch.zeros(len(kept), length, dtype=torch.long)
        for row, text in enumerate(kept):
            self.rows[row, : len(text)] = torch.as_tensor(np.asarray(text, dtype=np.int64))
        self._known = torch.zeros(len(kept), dtype=torch.bool)
        shape = (len(kept), length - 1, min(TOP, vocab)) if ask else (0, 0, 0)
        self._log_p = torch.empty(shape, dtype=torch.float16)
        self._ids = torch.empty(shape, dtype=torch.int16 if vocab <= 2**15 else torch.int32)

    def __len__(self) -> int:
        """How many rows there are."""
        return len(self.rows)

    @property
    def tokens(self) -> int:
        """How many tokens the rows have."""
        return int(self._counts.sum())

    def pick(self, places: Sequence[int] | np.ndarray, device: torch.device) -> Batch:
        """The rows at some places, with the target's laws."""
        chosen = torch.as_tensor(np.asarray(places, dtype=np.int64))
        tokens = self.rows[chosen].to(device)
        real = torch.arange(tokens.shape[1] - 1)[None] < self._counts[chosen, None] - 1
        if self._ask is None:
            ids = tokens[:, 1:, None]
            return Batch(tokens, real.to(device), ids, torch.zeros(ids.shape, device=device))
        self._learn(chosen[~self._known[chosen]].unique(), self._ask, device)
        ids, log_p = self._ids[chosen].long(), self._log_p[chosen].float()
        return Batch(tokens, real.to(device), ids.to(device), log_p.to(device))

    @torch.no_grad()
    def _learn(self, places: Tensor, ask: Ask, device: torch.device) -> None:
        """Ask the target about rows. Raises FloatingPointError if what it says is no finite number."""
        if not len(places):
            return
        log_p = ask(self.rows[places].to(device))[:, :-1].float().log_softmax(-1)
        top = log_p.topk(self._ids.shape[-1])
        if not top.values[self.real(places).to(device)].isfinite().all():
            raise FloatingPointError(
                "the target gives non-finite logits: its weights are damaged or overflow in this dtype."
            )
        self._log_p[places] = top.values.clamp(min=-60000).half().cpu()
        self._ids[places] = top.indices.to(self._ids.dtype).cpu()
        self._known[places] = True

    def real(self, places: Tensor) -> Tensor:
        """At which positions (rows, length - 1) of some rows a next token is."""
        return torch.arange(self.rows.shape[1] - 1)[None] < self._counts[places, None] - 1


def windows(tokens: Tokens, length: int, most: int, seed: int = 0) -> list[np.ndarray]:
    """A long text in pieces of `length` tokens that do not overlap: all, or `most` of them at random."""
    text = np.asarray(tokens, dtype=np.int64)
    count = len(text) // length
    places = np.random.default_rng([seed, 11]).permutation(count)[:most]
    return [text[place * length : (place + 1) * length] for place in places]
