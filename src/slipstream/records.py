"""The nouns of the house: what the rooms pass to each other, and the protocols they meet at.

Letters are the paper's (arXiv 2211.17192): *p* is the target's law, *q* the draft's, *gamma* the number of
drafted tokens, *beta* the chance that one tested token is kept, *alpha* its mean. Shapes use `rows` (sequences
that run together), `positions` (consecutive tokens of a row) and `vocab`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from slipstream.branches import ABSENT as ABSENT
from slipstream.branches import Tree as Tree
from slipstream.branches import ancestors as ancestors
from slipstream.laws import Fault, Faults, Law, RowFailure
from slipstream.sources import Source, SourceForm
from slipstream.stats import Stats


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed tokens and the law each was REALLY sampled from.

    `tokens` (rows, gamma) is padded on the right; row r proposes `lengths[r]` tokens, possibly none. `law` covers
    the same positions; None only if no row proposes anything. `windowed` counts, per row, the tokens drafted from
    a shortened prefix because the draft's context is smaller than the text.

    `parents` is None for a chain. In a tree it names each node's parent (-1 for the pending token; level by level);
    siblings were drawn one after the other from the law at their parent, each without the tokens drawn before if
    `replacement` is False. A row may lack nodes: those from `lengths[r]` on, and those whose token is ABSENT.
    """

    tokens: Tensor
    law: Law | None
    lengths: tuple[int, ...]
    windowed: tuple[int, ...] = ()
    parents: tuple[int, ...] | None = None
    replacement: bool = False

    @property
    def tree(self) -> Tree | None:
        """What pending token and nodes see of each other when the target scores them; None for a chain."""
        if self.parents is None:
            return None
        return Tree.of((-1, *(parent + 1 for parent in self.parents)), 1 + len(self.parents))

    @property
    def fed(self) -> Tensor:
        """The tokens as a model takes them."""
        return self.tokens if self.parents is None else self.tokens.clamp(min=0)

    @property
    def depths(self) -> tuple[int, ...]:
        """How many tokens deep each row's draft is; its length, for a chain."""
        if self.parents is None:
            return self.lengths
        lines = ancestors(self.parents)
        return tuple(len(lines[length - 1]) if length else 0 for length in self.lengths)

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
    relaxation, and `distance`, the total variation of that position's law from the target's. `path` (rows, depth)
    names the accepted nodes of a tree; None for a chain.
    """

    accepted: Tensor
    law: Law
    beta: Tensor
    relaxed: Tensor | None = None
    distance: Tensor | None = None
    path: Tensor | None = None


def accepted_paths(verdict: Verdict) -> list[list[int]]:
    """The accepted nodes of a tree, per row."""
    assert verdict.path is not None
    pairs = zip(verdict.path.tolist(), verdict.accepted.tolist(), strict=True)
    return [path[:count] for path, count in pairs]


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


@dataclass(frozen=True, slots=True)
class Texts:
    """What stands before each position, for samplers that look at it.

    Position j of a row stands after the row's own tokens and the `drafted` (rows, n) tokens that `paths[j]` names.
    """

    drafted: Tensor
    paths: Sequence[Sequence[int]]

    @staticmethod
    def chain(drafted: Tensor, positions: int) -> Texts:
        """The last of the positions stands after all drafted tokens, the others each one token earlier."""
        last = drafted.shape[1]
        return Texts(drafted, [range(last - positions + 1 + j) for j in range(positions)])

    def of(self, row: Row, place: int, position: int) -> Tensor:
        """The tokens (length,) before a position of the row at `place`."""
        text = torch.tensor(row.tokens, device=self.drafted.device)
        return torch.cat([text, self.drafted[place, list(self.paths[position])]])

    def select(self, places: Sequence[int]) -> Texts:
        """The texts of some of the rows."""
        return Texts(self.drafted[list(places)], self.paths)


class Sampler(Protocol):
    """Turns logits into the law really sampled from (section 2.2 of the paper)."""

    @property
    def greedy(self) -> bool: ...

    def law(self, logits: Tensor, rows: Sequence[Row], texts: Texts, model: str) -> Law:
        """The law of logits (rows, positions, vocab). `model` names whose logits they are, in errors.

        Raises RowFailure where there is none.
        """
        ...


@dataclass(frozen=True)
class Request:
    """One text to be continued.

    `prompt` are token ids, `key` names the request in the keys of its draws, `stop` is asked after every emitted
    token and answers a finish reason or None. `source` is what an encoder reads; `prompt` begins the decoder's text.
    """

    prompt: tuple[int, ...]
    sampler: Sampler
    max_new_tokens: int
    eos: frozenset[int] = frozenset()
    seed: int = 0
    key: int = 0
    stop: Callable[[list[int]], str | None] | None = None
    source: Source | None = None


@dataclass
class Row:
    """A request in progress: `tokens` are prompt and output; the last one is pending, not yet in any cache."""

    request: Request
    index: int  # the place of the request in its list
    tokens: list[int]
    stats: Stats = field(default_factory=Stats)
    finish_reason: str | None = None
    error: Fault | None = None  # why no token is possible any more, where `finish_reason` is "error"

    @property
    def output(self) -> list[int]:
        """The emitted tokens."""
        return self.tokens[len(self.request.prompt) :]

    @property
    def room(self) -> int:
        """How many tokens may still be emitted."""
        return self.request.max_new_tokens - (len(self.tokens) - len(self.request.prompt))

    @property
    def context_full(self) -> bool:
        """Whether the row has ended before its limit, because the target can hold no longer text."""
        return self.finish_reason == "length" and self.room > 0


@dataclass(frozen=True, slots=True)
class Context:
    """The rows that run together, as drafters see them, and the seam they draw through."""

    rows: tuple[Row, ...]
    seam: Seam

    def law(self, logits: Tensor, texts: Texts, model: str) -> Law:
        """The law really sampled from, of logits (rows, positions, vocab), each row by its own sampler.

        For drafts, which any law leaves exact: where there is none, some law stands in its place.
        """
        law, faults = self.law_and_faults(logits, texts, model)
        if faults and not bool(logits.amax(-1).isfinite().all()):
            warnings.warn(f"{model} gives non-finite logits, so that hardly any draft stands.", RuntimeWarning, 2)
        return law

    def law_and_faults(self, logits: Tensor, texts: Texts, model: str) -> tuple[Law, Faults]:
        """The same law, and where none can be made: (place of the row, position) -> why, in a sentence."""
        groups: dict[int, list[int]] = {}
        for place, row in enumerate(self.rows):
            groups.setdefault(id(row.request.sampler), []).append(place)
        if len(groups) == 1:
            return _attempt(self.rows, logits, texts, model)
        laws, faults = list[Law](), dict[tuple[int, int], Fault]()
        for places in groups.values():
            rows = [self.rows[place] for place in places]
            law, found = _attempt(rows, logits[places], texts.select(places), model)
            laws.append(law)
            faults |= {(places[r], position): why for (r, position), why in found.items()}
        order = torch.tensor([place for places in groups.values() for place in places]).argsort()
        return Law.join(laws, 0).select(order.to(logits.device)), faults

    def target_law(self, logits: Tensor, draft: Draft, model: str) -> tuple[Law, Faults]:
        """p at the pending token and after every drafted one, and where there is none."""
        paths = None if draft.parents is None else [(), *ancestors(draft.parents)]
        texts = Texts.chain(draft.tokens, logits.shape[1]) if paths is None else Texts(draft.fed, paths)
        return self.law_and_faults(logits, texts, model)

    def draw(self, law: Law, purpose: str, start: int | Sequence[int] = 0) -> Tensor:
        """Token ids (rows, positions), drawn from a law by `key`."""
        return self.seam(law, self.key(purpose, start))

    def key(self, purpose: str, start: int | Sequence[int] = 0) -> Key:
        """Of draws for the texts' tokens from len(tokens) + start on; `start` is one number, or one per row."""
        starts = [start] * len(self.rows) if isinstance(start, int) else start
        origins = tuple(len(row.tokens) for row in self.rows)
        places = tuple(origin + begin for origin, begin in zip(origins, starts, strict=True))
        requests = [row.request for row in self.rows]
        seeds, names = tuple(request.seed for request in requests), tuple(request.key for request in requests)
        return Key(seeds, names, origins, places, purpose)


def _attempt(rows: Sequence[Row], logits: Tensor, texts: Texts, model: str) -> tuple[Law, Faults]:
    try:
        return rows[0].request.sampler.law(logits, rows, texts, model), {}
    except RowFailure as failure:
        return failure.law, failure.faults


@dataclass(frozen=True, slots=True)
class Round:
    """One draft and its verification: the record that streams, statistics, benchmarks and controllers read.

    `tokens[r]` were emitted for `rows[r]` after all cuts, none if it fails at once; `accepted[r]` of them came from the
    draft, and one more, unless a cut came before it, from the target. `gammas` are what the controller asked for;
    the room that is left and the drafter may have made `draft.lengths` of it. `seconds` has the phases `draft`,
    `target`, `accept` (laws, verification and draws) and `rest`.
    """

    rows: tuple[Row, ...]
    draft: Draft
    verdict: Verdict
    tokens: tuple[tuple[int, ...], ...]
    accepted: tuple[int, ...]
    gammas: tuple[int, ...]
    seconds: dict[str, float]

    def source(self, row: int, position: int) -> str:
        """Where an emitted token came from: "draft", "correction", "bonus", or "target" if nothing was drafted."""
        if position < self.accepted[row]:
            return "draft"
        drafted = self.draft.depths[row]
        return "target" if not drafted else "correction" if position < drafted else "bonus"


@dataclass(frozen=True)
class Shape:
    """Of a pass: rows, new tokens of each, and slots that attention looks at."""

    rows: int
    width: int
    slots: int


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
    def source_form(self) -> SourceForm | None:
        """What its encoder reads; None for a model without one."""
        ...

    @property
    def lengths(self) -> list[int]:
        """Tokens in the cache, per row."""
        ...

    def add(self, rows: int, sources: Sequence[Source | None] = ()) -> None:
        """Append empty rows, with the source of each if the model has an encoder."""
        ...

    def free(self, rows: Sequence[int]) -> None:
        """Remove rows; the others keep their order."""
        ...

    def extend(self, tokens: Tensor, counts: Sequence[int], first: int = 0, tree: Tree | None = None) -> Tensor:
        """Feed `counts[r]` of tokens (rows, n) to every row from `first` on -> logits (rows, n, vocab)."""
        ...

    def prefill(self, texts: Sequence[Sequence[int]], first: int = 0) -> None:
        """Feed whole texts to the rows from `first` on; no logits are wanted."""
        ...

    def rollback(self, lengths: Sequence[int]) -> None:
        """Forget everything after `lengths[r]` tokens of each row."""
        ...

    def scrub(self) -> None:
        """Zero what rolled-back tokens left in the cache: NaN passes any mask, since 0 * NaN is NaN."""
        ...

    def keep(self, starts: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Move a tree's accepted tokens together: what lies at starts[r] + paths[r][i] goes to starts[r] + i."""
        ...

    def fix_shape(self, shape: Shape | None) -> None:
        """Run every pass after the prefill in one shape, so that no bit of the logits depends on what is scored
        together; None: in the shape of the work at hand, which is faster."""
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
    """Chooses gamma per row, before anything is drafted: so any choice is exact. The state goes in and out."""

    @property
    def most(self) -> int:
        """The greatest gamma it may ever choose."""
        ...

    def init(self) -> Any: ...

    def gammas(self, state: Any, rows: Sequence[Row]) -> Sequence[int]:
        """How many tokens to draft for each row of the next round; 0 is a plain step."""
        ...

    def update(self, state: Any, round: Round) -> Any: ...
