"""The nouns of the house: what the rooms pass to each other, and the protocols they meet at.

Letters are the paper's (arXiv 2211.17192): *p* is the target's law, *q* the draft's, *gamma* the number of
drafted tokens, *beta* the chance that one tested token is kept, *alpha* its mean. Shapes use `rows` (sequences
that run together), `positions` (consecutive tokens of a row) and `vocab`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from slipstream.stats import Stats


@dataclass(frozen=True, slots=True)
class Law:
    """A distribution per position: dense weights, or a point mass held as token ids.

    Exactly one of the two is given. `probs` (rows, positions, vocab) is float32 or wider and sums to one, except
    for coins, which may carry any positive total. `tokens` (rows, positions) is the point mass of greedy decoding
    and of copied drafts, so that no one-hot vector of the vocabulary is ever built for them. `scores` are the
    processed logits behind a greedy point mass, which only lenient rules look at.
    """

    probs: Tensor | None = None
    tokens: Tensor | None = None
    scores: Tensor | None = None

    def __post_init__(self) -> None:
        assert (self.probs is None) != (self.tokens is None), "a Law is dense or a point mass, not both"

    @property
    def point(self) -> bool:
        """Whether the law is a point mass."""
        return self.tokens is not None

    @property
    def rows(self) -> int:
        """How many rows the law covers."""
        return self._data.shape[0]

    @property
    def positions(self) -> int:
        """How many positions the law covers."""
        return self._data.shape[1]

    @property
    def device(self) -> torch.device:
        """Where the law lives."""
        return self._data.device

    @property
    def dense(self) -> Tensor:
        """The weights of a law that is no point mass."""
        assert self.probs is not None
        return self.probs

    @property
    def _data(self) -> Tensor:
        data = self.tokens if self.probs is None else self.probs
        assert data is not None
        return data

    def _map(self, change: Callable[[Tensor], Tensor]) -> Law:
        return Law(*(None if data is None else change(data) for data in (self.probs, self.tokens, self.scores)))

    def of(self, tokens: Tensor) -> Tensor:
        """The probability of `tokens` (rows, positions), in the same shape."""
        if self.probs is None:
            return (self._data == tokens).float()
        return self.probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)

    def first(self, positions: int) -> Law:
        """The law of the first positions."""
        return self._map(lambda data: data[:, :positions])

    def at(self, index: Tensor) -> Law:
        """The law of one position per row: `index` (rows,) -> a Law over (rows, 1)."""
        rows = torch.arange(index.shape[0], device=self.device)
        return self._map(lambda data: data[rows, index].unsqueeze(1))

    def bare(self) -> Law:
        """The same law without scores."""
        return replace(self, scores=None)

    def select(self, rows: Tensor) -> Law:
        """The law of these rows, in this order."""
        return self._map(lambda data: data[rows])

    def to(self, device: torch.device) -> Law:
        """The same law on `device`."""
        return self if self.device == device else self._map(lambda data: data.to(device))

    @staticmethod
    def join(laws: Sequence[Law], dim: int) -> Law:
        """One law out of several: `dim` 0 stacks rows, 1 appends positions. All dense, or all point masses."""
        if len(laws) == 1:
            return laws[0]
        return Law(*(_cat([getattr(law, name) for law in laws], dim) for name in ("probs", "tokens", "scores")))


def _cat(parts: Sequence[Tensor | None], dim: int) -> Tensor | None:
    given = [part for part in parts if part is not None]
    return torch.cat(given, dim) if len(given) == len(parts) else None


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed tokens and the law each was REALLY sampled from.

    `tokens` (rows, gamma) is padded on the right; row r proposes `lengths[r]` tokens, possibly none. `law` covers
    the same positions; None only if no row proposes anything. `parents` is None for a chain. `windowed` counts,
    per row, the tokens drafted from a shortened prefix because the draft's context is smaller than the text.
    """

    tokens: Tensor
    law: Law | None
    lengths: tuple[int, ...]
    parents: Tensor | None = None
    windowed: tuple[int, ...] = ()

    @staticmethod
    def empty(rows: int, device: torch.device) -> Draft:
        """A draft without tokens: the round becomes a plain decoding step."""
        return Draft(torch.empty(rows, 0, dtype=torch.long, device=device), None, (0,) * rows)

    def to(self, device: torch.device) -> Draft:
        """The same draft on `device`: target and draft may live on different ones."""
        if self.tokens.device == device:
            return self
        return replace(self, tokens=self.tokens.to(device), law=self.law and self.law.to(device))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a verifier decides: `accepted` (rows,) drafted tokens stand, and `law` (rows, 1) is the next token's.

    `beta` (rows, gamma) is the chance, given the prefix, that the drafted token of that position is kept if it is
    tested: sum_x min(p(x), q(x)) when sampling (Theorem 3.5), and for greedy decoding whether it is kept.
    Lossy rules tell their price per drafted token, both (rows, gamma): `relaxed`, passed only thanks to the
    relaxation, and `distance`, the total variation of that position's law from the target's.
    """

    accepted: Tensor
    law: Law
    beta: Tensor
    relaxed: Tensor | None = None
    distance: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Key:
    """Where a draw happens: row r draws for the token positions from `positions[r]` on.

    Two draws with equal (seed, request, origin, position, purpose) are the same draw, whatever else is in the
    batch. `origins` are the text lengths when the round began: without them the next round would reuse the numbers
    of tokens that this one rejects, and a rule that looks at the whole draft (block verification) would be biased.
    """

    seeds: tuple[int, ...]
    requests: tuple[int, ...]
    origins: tuple[int, ...]
    positions: tuple[int, ...]
    purpose: str


Seam = Callable[[Law, Key], Tensor]
"""All randomness: a law over (rows, positions) and a key -> token ids (rows, positions)."""


class Sampler(Protocol):
    """Turns logits into the law really sampled from (section 2.2 of the paper)."""

    @property
    def greedy(self) -> bool: ...

    def law(self, logits: Tensor, rows: Sequence[Row], drafted: Tensor, model: str) -> Law:
        """logits (rows, positions, vocab), `drafted` (rows, n): the last position stands after all n tokens.

        `model` names whose logits they are in errors.
        """
        ...


@dataclass(frozen=True)
class Request:
    """One text to be continued.

    `prompt` are token ids, `key` names the request in the keys of its draws, `stop` is asked after every emitted
    token (with prompt and output) and answers a finish reason or None.
    """

    prompt: tuple[int, ...]
    sampler: Sampler
    max_new_tokens: int
    eos: frozenset[int] = frozenset()
    seed: int = 0
    key: int = 0
    stop: Callable[[list[int]], str | None] | None = None


@dataclass
class Row:
    """A request in progress: `tokens` are prompt and output; the last one is pending, not yet in any cache."""

    request: Request
    index: int  # the place of the request in its list
    tokens: list[int]
    stats: Stats = field(default_factory=Stats)
    finish_reason: str | None = None

    @property
    def output(self) -> list[int]:
        """The emitted tokens."""
        return self.tokens[len(self.request.prompt) :]

    @property
    def room(self) -> int:
        """How many tokens may still be emitted."""
        return self.request.max_new_tokens - (len(self.tokens) - len(self.request.prompt))


@dataclass(frozen=True, slots=True)
class Context:
    """The rows that run together, as drafters see them, and the seam they draw through."""

    rows: tuple[Row, ...]
    seam: Seam

    def law(self, logits: Tensor, drafted: Tensor, model: str) -> Law:
        """The law really sampled from. logits (rows, positions, vocab); `drafted` (rows, n) follows the text.

        The LAST position of the logits stands after all drafted tokens, so target (gamma + 1 positions, gamma
        drafted) and drafter (1 position, i drafted so far) call it alike.
        """
        groups: dict[int, list[int]] = {}
        for place, row in enumerate(self.rows):
            groups.setdefault(id(row.request.sampler), []).append(place)
        if len(groups) == 1:
            return self.rows[0].request.sampler.law(logits, self.rows, drafted, model)
        laws = []
        for places in groups.values():
            rows = [self.rows[place] for place in places]
            laws.append(rows[0].request.sampler.law(logits[places], rows, drafted[places], model))
        order = torch.tensor([place for places in groups.values() for place in places]).argsort()
        return Law.join(laws, 0).select(order.to(logits.device))

    def draw(self, law: Law, purpose: str, start: int | Sequence[int] = 0) -> Tensor:
        """Token ids (rows, positions). Position j of `law` is the text's token len(tokens) + start + j.

        `start` is one number, or one per row.
        """
        starts = [start] * len(self.rows) if isinstance(start, int) else start
        origins = tuple(len(row.tokens) for row in self.rows)
        key = Key(
            tuple(row.request.seed for row in self.rows),
            tuple(row.request.key for row in self.rows),
            origins,
            tuple(origin + begin for origin, begin in zip(origins, starts, strict=True)),
            purpose,
        )
        return self.seam(law, key)


@dataclass(frozen=True, slots=True)
class Round:
    """One draft and its verification: the record that streams, statistics, benchmarks and controllers read.

    `tokens[r]` were emitted for `rows[r]` after all cuts; `accepted[r]` of them came from the draft, and one more,
    unless a cut came before it, from the target. `seconds` has the phases `draft`, `target`, `accept` (laws,
    verification and draws) and `rest`.
    """

    rows: tuple[Row, ...]
    draft: Draft
    verdict: Verdict
    tokens: tuple[tuple[int, ...], ...]
    accepted: tuple[int, ...]
    gamma: int
    seconds: dict[str, float]

    def source(self, row: int, position: int) -> str:
        """Where an emitted token came from: "draft", "correction", "bonus", or "target" if nothing was drafted."""
        if position < self.accepted[row]:
            return "draft"
        drafted = self.draft.lengths[row]
        return "target" if not drafted else "correction" if position < drafted else "bonus"


class Scorer(Protocol):
    """One autoregressive model and its cache for a batch of rows, each with a length of its own."""

    @property
    def name(self) -> str: ...

    @property
    def vocab(self) -> int: ...

    @property
    def context(self) -> int | None:
        """The longest text the model can hold; None if there is no limit."""
        ...

    @property
    def device(self) -> torch.device: ...

    @property
    def lengths(self) -> list[int]:
        """Tokens in the cache, per row."""
        ...

    def add(self, rows: int) -> None:
        """Append empty rows."""
        ...

    def free(self, rows: Sequence[int]) -> None:
        """Remove rows; the others keep their order."""
        ...

    def extend(self, tokens: Tensor, counts: Sequence[int], first: int = 0) -> Tensor:
        """Feed `counts[r]` of tokens (rows, n) to every row from `first` on -> logits (rows, n, vocab)."""
        ...

    def prefill(self, texts: Sequence[Sequence[int]], first: int = 0) -> None:
        """Feed whole texts to the rows from `first` on; no logits are wanted."""
        ...

    def rollback(self, lengths: Sequence[int]) -> None:
        """Forget everything after `lengths[r]` tokens of each row."""
        ...


class Drafter(Protocol):
    """Makes drafts. It learns which rows run from the context alone, so it serves any number of texts in turn."""

    def propose(self, context: Context, gammas: Sequence[int]) -> Draft:
        """At most `gammas[r]` tokens for each row."""
        ...

    def observe(self, round: Round) -> None:
        """Called after every round, when the rows hold the emitted tokens."""
        ...


Verifier = Callable[[Law, Draft, Callable[..., Tensor]], Verdict]
"""(p over gamma + 1 positions, draft, draw(law, purpose, start=0)) -> Verdict."""


class Controller(Protocol):
    """Chooses gamma. Settings are immutable, the evolving state is passed in and out."""

    def init(self) -> Any: ...

    def gamma(self, state: Any) -> int: ...

    def update(self, state: Any, round: Round) -> Any: ...
