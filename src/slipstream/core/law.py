"""`Law`, a distribution over the next token at each position, its log-probabilities, and the errors without one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

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


@dataclass(frozen=True, slots=True)
class Law:
    """A distribution per position: dense weights, or a point mass held as token ids.

    `probs` (rows, positions, vocab) is float32 or wider and sums to one, except for coins, which may carry any
    positive total. `tokens` (rows, positions) is the point mass of greedy decoding and of copied drafts, so that no
    one-hot vector of the vocabulary is built for them. `scores` are the processed logits behind a greedy point mass,
    which only lenient rules and trees read.

    Exactly one of `probs` and `tokens` is given, except in a batch of greedy and sampled rows: there `points` names
    the rows that are point masses, for which `tokens` is valid and `probs` is one-hot; `select` separates the kinds.
    """

    probs: Tensor | None = None
    tokens: Tensor | None = None
    scores: Tensor | None = None
    points: tuple[bool, ...] | None = None

    def __post_init__(self) -> None:
        both = self.probs is not None and self.tokens is not None
        assert both == (self.points is not None), "a Law is dense or a point mass, unless it says which rows are which"
        assert both or self.probs is not None or self.tokens is not None, "a Law without weights"

    @property
    def point(self) -> bool:
        return self.probs is None

    @property
    def rows(self) -> int:
        return self._data.shape[0]

    @property
    def positions(self) -> int:
        return self._data.shape[1]

    @property
    def device(self) -> torch.device:
        return self._data.device

    @property
    def dense(self) -> Tensor:
        """The weights (rows, positions, vocab) of a law that is not a point mass."""
        assert self.probs is not None
        return self.probs

    @property
    def ids(self) -> Tensor:
        """The tokens (rows, positions) of a point mass."""
        assert self.tokens is not None
        return self.tokens

    @property
    def _data(self) -> Tensor:
        """A tensor that begins with the dimensions (rows, positions): the weights if there are any, else the tokens."""
        return self.ids if self.probs is None else self.probs

    def _map(self, change: Callable[[Tensor], Tensor]) -> Law:
        probs, tokens, scores = (None if x is None else change(x) for x in (self.probs, self.tokens, self.scores))
        return Law(probs, tokens, scores, self.points)

    def of(self, tokens: Tensor) -> Tensor:
        """Return the probability of `tokens` (rows, positions), in the same shape."""
        if self.probs is None:
            return (self._data == tokens).float()
        return self.probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)

    def first(self, positions: int) -> Law:
        return self if positions == self.positions else self._map(lambda data: data[:, :positions])

    def stretched(self, positions: int) -> Law:
        """Return the law padded to this many positions by repeating its last one."""
        index = torch.arange(positions, device=self.device).clamp(max=self.positions - 1)
        return self._map(lambda data: data[:, index])

    def at(self, index: Tensor) -> Law:
        """Return the law at one position per row: `index` (rows,) -> a Law over (rows, 1)."""
        places = torch.arange(self.rows, device=self.device) * self.positions + index
        return self._map(lambda data: data.flatten(0, 1).index_select(0, places).unsqueeze(1))  # copies whole laws

    def bare(self) -> Law:
        return replace(self, scores=None)

    def select(self, rows: Tensor) -> Law:
        """Return the law of these rows, in this order; if all are of one kind, it is a law of that kind alone."""
        probs, tokens, scores = (None if x is None else x[rows] for x in (self.probs, self.tokens, self.scores))
        if self.points is None:
            return Law(probs, tokens, scores)
        points = tuple(self.points[row] for row in rows.tolist())
        if all(points):
            return Law(tokens=tokens, scores=scores)
        return Law(probs, tokens, scores, points) if any(points) else Law(probs=probs)

    def of_row(self, row: int) -> Law:
        return self.select(torch.tensor([row], device=self.device))

    def to(self, device: torch.device) -> Law:
        return self if self.device == device else self._map(lambda data: data.to(device))

    @staticmethod
    def join(laws: Sequence[Law], dim: int) -> Law:
        """Join laws into one: `dim` 0 stacks rows, 1 appends positions, of rows of the same kinds."""
        if len(laws) == 1:
            return laws[0]
        if dim == 0 and (any(law.points for law in laws) or len({law.point for law in laws}) > 1):
            return _stack_kinds(laws)
        names = ("probs", "tokens", "scores")
        probs, tokens, scores = (_cat([getattr(law, name) for law in laws], dim) for name in names)
        return Law(probs, tokens, scores, laws[0].points)


def _stack_kinds(laws: Sequence[Law]) -> Law:
    like = next(law.probs for law in laws if law.probs is not None)
    probs, tokens, scores, points = list[Tensor](), list[Tensor](), list[Tensor | None](), list[bool]()
    for law in laws:
        points += law.points or [law.point] * law.rows
        tokens.append(law.probs.argmax(-1) if law.tokens is None else law.tokens)  # type: ignore[union-attr]
        if law.probs is None:
            weights = like.new_zeros(*tokens[-1].shape, like.shape[-1])
            probs.append(weights.scatter_(-1, tokens[-1].unsqueeze(-1), 1))
        else:
            probs.append(law.probs)
        scores.append(law.probs if law.scores is None else law.scores)
    if any(law.point and law.scores is None for law in laws):
        scores = [None]
    return Law(torch.cat(probs), torch.cat(tokens), _cat(scores, 0) if None not in scores else None, tuple(points))


class Fault(str):
    """A sentence that says why no law can be made; `cause` is the exception that a processor raised, if one did."""

    cause: Exception | None = None

    @staticmethod
    def of(sentence: str, cause: Exception) -> Fault:
        fault = Fault(sentence)
        fault.cause = cause
        return fault


class ModelFault(Fault):
    """A fault of the model itself, whatever a request asks for."""


Faults = dict[tuple[int, int], Fault]
"""The positions where no law can be made: (place of the row, position) -> the reason."""


class RowFailure(FloatingPointError):
    """Raised if some rows have no law at some positions; `law` covers all rows, with an arbitrary law there."""

    def __init__(self, faults: Faults, law: Law) -> None:
        super().__init__(next(iter(faults.values())))
        self.faults, self.law = faults, law


def _cat(parts: Sequence[Tensor | None], dim: int) -> Tensor | None:
    present = [part for part in parts if part is not None]
    return torch.cat(present, dim) if len(present) == len(parts) else None


def total_variation(left: Tensor, right: Tensor) -> Tensor:
    """Return half the sum of absolute differences over the last dimension; the two need not have equal totals."""
    return (left - right).abs().sum(-1) / 2


def distance(left: Law, right: Law) -> Tensor:
    """Return the total variation (rows, positions) between laws of the same shape, dense or point masses: D_LK of the
    paper (Definition 3.2)."""
    if left.probs is not None and right.probs is not None:
        return total_variation(left.probs, right.probs)
    point, other = (left, right) if left.point else (right, left)
    return 1 - other.of(point.ids)


def pad_vocabulary(logits: Tensor, vocab: int) -> Tensor:
    """Cut or pad logits (..., v) to the target's vocabulary; ids beyond v get probability zero."""
    if logits.shape[-1] >= vocab:
        return logits[..., :vocab]
    return torch.nn.functional.pad(logits, (0, vocab - logits.shape[-1]), value=float("-inf"))


def wide(logits: Tensor) -> Tensor:
    """Convert logits to float32, or keep them in float64: laws are made of these."""
    return logits if logits.dtype == torch.float64 else logits.float()
