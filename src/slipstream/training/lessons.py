"""Lessons, rows of tokens with the target's law at every position, and what is learned from them: objectives."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

LEAST_REST = 1e-4  # the least probability of all unlisted tokens together, so that its logarithm stays finite

Objective = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A function of log p and log q on the listed tokens (..., n) and the used share of the budget () -> losses (...)."""


def forward_kl(log_p: Tensor, log_q: Tensor, used: Tensor) -> Tensor:
    """Compute KL(p || q), which teaches the draft to cover all likely tokens of the target."""
    p_rest, q_rest = _rest(log_p), _rest(log_q)
    return (log_p.exp() * (log_p - log_q)).sum(-1) + p_rest * (p_rest.log() - q_rest.log())


def reverse_kl(log_p: Tensor, log_q: Tensor, used: Tensor) -> Tensor:
    """Compute KL(q || p), which teaches the draft to avoid tokens that are unlikely in the target."""
    return forward_kl(log_q, log_p, used)


def total_variation(log_p: Tensor, log_q: Tensor, used: Tensor) -> Tensor:
    """Compute TV(p, q) = 1 - sum_x min(p(x), q(x)), the chance that a drafted token is rejected.
    Its gradient teaches little while the laws are far apart."""
    return 0.5 * ((log_p.exp() - log_q.exp()).abs().sum(-1) + (_rest(log_p) - _rest(log_q)).abs())


def kl_then_tv(log_p: Tensor, log_q: Tensor, used: Tensor) -> Tensor:
    """Blend forward KL, which teaches fast at first, into total variation, the final aim, over the budget."""
    tilt = 0.9 * used
    return (1 - tilt) * forward_kl(log_p, log_q, used) + 2 * tilt * total_variation(log_p, log_q, used)


OBJECTIVES: Mapping[str, Objective] = {  # the objectives, by the names that users give
    "kl": forward_kl,
    "reverse-kl": reverse_kl,
    "tv": total_variation,
    "kl-tv": kl_then_tv,
}


def objective_of(name: str) -> Objective:
    if name not in OBJECTIVES:
        raise ValueError(f"objective {name!r} is not known: use {', '.join(OBJECTIVES)}.")
    return OBJECTIVES[name]


def _rest(log_law: Tensor) -> Tensor:
    return (1.0 - log_law.exp().sum(-1)).clamp(min=LEAST_REST)


TOP = 128  # the number of likeliest tokens whose probabilities are stored at every position; the others count as one
Tokens = Sequence[int] | np.ndarray  # a text as token ids
Ask = Callable[[Tensor], Tensor]  # a function from tokens (rows, n) to the target's logits (rows, n, vocab)
HELD_OUT = 0.02  # the share of a text, at its end, that is only used for measuring


class TextWindows:
    """A text in windows of `length` tokens, of which those of the last share HELD_OUT are only used for measuring."""

    def __init__(self, tokens: Tokens, length: int) -> None:
        text = torch.as_tensor(np.asarray(tokens, dtype=np.int64))
        cut = len(text) - max(length, int(HELD_OUT * len(text)))
        if cut < 2 * length:
            raise ValueError(f"{len(text)} tokens of text are too few: give at least {4 * length}.")
        self.text, self.held_out, self.length = text[:cut], text[cut:], length

    def random(self, rows: int, seed: int, step: int) -> Tensor:
        """Return windows (rows, length), which depend on seed and step alone, so that resuming changes nothing."""
        rng = np.random.default_rng([seed, step])
        starts = torch.from_numpy(rng.integers(0, len(self.text) - self.length + 1, rows))
        return self.text[starts[:, None] + torch.arange(self.length)]

    def to_measure(self, count: int) -> Tensor:
        """Return windows (count, length) of the held-out end, at even distances."""
        starts = np.linspace(0, len(self.held_out) - self.length, count).astype(int)
        return self.held_out[torch.from_numpy(starts)[:, None] + torch.arange(self.length)]


class LessonBatch(NamedTuple):
    """A batch of rows with the target's laws.

    `tokens` are (rows, n); `real` (rows, n - 1) is true where there is a next token. `ids` (rows, n - 1, top) are the
    target's likeliest tokens there, and `log_p` the logarithms of their probabilities.
    """

    tokens: Tensor
    real: Tensor
    ids: Tensor
    log_p: Tensor


class Lessons:
    """Rows of tokens, and the target's laws at each position, which are computed when a row is first picked."""

    def __init__(self, texts: Sequence[Tokens], length: int, vocab: int, ask: Ask | None) -> None:
        """Store texts, each cut at `length` tokens; `ask` computes the target's logits.

        Without `ask` the law at a position is the next token of the text, which makes sequence-level distillation on
        texts of the target.
        """
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
        return len(self.rows)

    @property
    def tokens(self) -> int:
        return int(self._counts.sum())

    def pick(self, places: Sequence[int] | np.ndarray, device: torch.device) -> LessonBatch:
        chosen = torch.as_tensor(np.asarray(places, dtype=np.int64))
        tokens = self.rows[chosen].to(device)
        real = self.real(chosen)
        if self._ask is None:
            ids = tokens[:, 1:, None]
            return LessonBatch(tokens, real.to(device), ids, torch.zeros(ids.shape, device=device))
        self._learn(chosen[~self._known[chosen]].unique(), self._ask, device)
        ids, log_p = self._ids[chosen].long(), self._log_p[chosen].float()
        return LessonBatch(tokens, real.to(device), ids.to(device), log_p.to(device))

    @torch.no_grad()
    def _learn(self, places: Tensor, ask: Ask, device: torch.device) -> None:
        """Compute and store the target's laws on rows. Raises FloatingPointError for logits that are not finite."""
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
        """Return at which positions (rows, length - 1) of some rows there is a next token."""
        return torch.arange(self.rows.shape[1] - 1)[None] < self._counts[places, None] - 1


def windows(tokens: Tokens, length: int, most: int, seed: int = 0) -> list[np.ndarray]:
    """Cut a long text into pieces of `length` tokens that do not overlap -> at most `most` of them, in random order."""
    text = np.asarray(tokens, dtype=np.int64)
    count = len(text) // length
    places = np.random.default_rng([seed, 11]).permutation(count)[:most]
    return [text[place * length : (place + 1) * length] for place in places]
