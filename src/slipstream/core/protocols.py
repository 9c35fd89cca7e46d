"""The protocols that rooms meet at: `Scorer`, `Drafter`, `Verifier` and `Controller`.

Letters are the paper's (arXiv 2211.17192): *p* is the target's law, *q* the draft's, *gamma* the number of
drafted tokens, *beta* the chance that one tested token is kept, *alpha* its mean. Shapes use `rows` (sequences
that run together), `positions` (consecutive tokens of a row) and `vocab`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from slipstream.core.draft import Draft, Tree
from slipstream.core.request import Row
from slipstream.core.round import Context, Round
from slipstream.core.source import Source, SourceForm


@dataclass(frozen=True)
class Shape:
    """The sizes of a pass: rows, new tokens of each, and slots that attention looks at."""

    rows: int
    width: int
    slots: int


class Scorer(Protocol):
    """An autoregressive model with its cache for a batch of rows, each with a length of its own.

    Calls serve the rows that they name or bring something for; the others lie still.
    """

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
        """The form of the sources that its encoder reads; None for a model without an encoder."""
        ...

    @property
    def lengths(self) -> list[int]:
        """Tokens in the cache, per row."""
        ...

    def add(self, rows: int, sources: Sequence[Source | None] = ()) -> None:
        """Append empty rows, with the source of each if the model has an encoder."""
        ...

    def fork(self, rows: Sequence[int]) -> None:
        """Append copies of these rows, in this order, with their sources; a row may be named several times."""
        ...

    def free(self, rows: Sequence[int]) -> None:
        """Remove rows; the others keep their order."""
        ...

    def extend(self, tokens: Tensor, counts: Sequence[int], first: int = 0, tree: Tree | None = None) -> Tensor:
        """Feed `counts[r]` of tokens (rows, n) to the rows first .. first + rows -> logits (rows, n, vocab)."""
        ...

    def prefill(self, texts: Sequence[Sequence[int]], first: int = 0) -> None:
        """Feed texts to the rows first .. first + len(texts), behind what they hold; no logits are wanted."""
        ...

    def rollback(self, lengths: Sequence[int]) -> None:
        """Forget everything after `lengths[r]` tokens of the first rows; rows behind them stay as they are."""
        ...

    def scrub(self) -> None:
        """Zero what rolled-back tokens left in the cache: NaN passes any mask, since 0 * NaN is NaN."""
        ...

    def keep(self, starts: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Move a tree's accepted tokens together, in the first rows: what lies at starts[r] + paths[r][i] goes to
        starts[r] + i."""
        ...

    def fix_shape(self, shape: Shape | None) -> None:
        """Run every pass after the prefill in one shape, so that no bit of the logits depends on what is scored
        together; None: in the shape of the work at hand, which is faster."""
        ...


@runtime_checkable
class TakesMemory(Scorer, Protocol):
    """A Scorer that knows what its cache takes."""

    def bytes_for(self, lengths: Sequence[int]) -> int:
        """What texts of these lengths take, with what is allocated ahead."""
        ...


@runtime_checkable
class HasModel(Scorer, Protocol):
    """A Scorer that runs a model of transformers, which others may look into or borrow layers from."""

    @property
    def model(self) -> Any:
        """The model; of an encoder-decoder the whole of it."""
        ...

    @property
    def execution(self) -> Any:
        """What makes passes faster, as graphs do, which hide the hidden states; None runs them eagerly."""
        ...

    @property
    def shares_rows(self) -> bool:
        """Whether `sharing_rows` is possible, which a state that sums up a text does not allow."""
        ...

    def sharing_rows(self, model: Any, name: str) -> HasModel:
        """A Scorer that runs another model, made of this one's layers or of copies of them, over the same rows and
        cache. What it adds to the rows has to be rolled back before this one goes on."""
        ...


@runtime_checkable
class SeesWindows(HasModel, Protocol):
    """A Scorer whose rows may be read through a window."""

    def seeing(self, window: int, sinks: int) -> HasModel:
        """A Scorer that runs the same model over the same rows, and sees no more of a text than its last `window`
        tokens and its first `sinks`. What it adds to the rows has to be rolled back before this one goes on."""
        ...


@runtime_checkable
class LiesOnRanks(HasModel, Protocol):
    """A Scorer whose model is divided among several processes, of which this one leads."""

    @property
    def ranks(self) -> int:
        """How many processes."""
        ...

    def check(self) -> None:
        """Raises ConnectionError if one of them is lost."""
        ...

    def call_on_loss(self, function: Callable[[], object]) -> None:
        """Have a function called, by another thread, as soon as one is lost."""
        ...


class Drafter(Protocol):
    """Makes drafts. It learns which rows run from the context alone, so it serves any number of texts in turn."""

    def propose(self, context: Context, gammas: Sequence[int]) -> Draft:
        """At most `gammas[r]` tokens for each row."""
        ...

    def observe(self, round: Round) -> None:
        """Called after every round, when the rows hold the emitted tokens."""
        ...


@runtime_checkable
class HasScorers(Drafter, Protocol):
    """A drafter with models whose caches hold the rows' texts."""

    @property
    def scorers(self) -> Sequence[Scorer]:
        """The Scorers of the models that draft; without the target where it drafts for itself in its own cache."""
        ...


@runtime_checkable
class DraftsByOneModel(Drafter, Protocol):
    """A drafter that asks one model for the law behind a text, as it can be asked for the law behind any other."""

    @property
    def scorer(self) -> Scorer:
        """That model, with the target's vocabulary."""
        ...

    @property
    def on_target_rows(self) -> bool:
        """Whether it works on the rows of the target's own cache."""
        ...

    def release(self) -> None:
        """Forget the rows that it follows, so that somebody else may use the model."""
        ...


@runtime_checkable
class DraftsByText(Drafter, Protocol):
    """A drafter that looks at the tokens of a row and at nothing else, so that any text may stand there."""

    @property
    def by_text(self) -> bool: ...


@runtime_checkable
class Untrusted(Drafter, Protocol):
    """A drafter that somebody else runs, who may know every seed: no draw that decides about its drafts may be made
    from the seed alone."""

    @property
    def secret(self) -> int | None:
        """What those draws are made from besides; None if that somebody is trusted."""
        ...


@runtime_checkable
class HasDrafters(Drafter, Protocol):
    """A drafter that is put together of others, which draft for the same target."""

    @property
    def drafters(self) -> Sequence[Drafter]:
        """Those."""
        ...


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


def secret_among(drafter: Drafter) -> int | None:
    """The secret that draws are made from where a drafter, or one inside it, is not trusted; None if all are."""
    if isinstance(drafter, Untrusted) and drafter.secret is not None:
        return drafter.secret
    inside = drafter.drafters if isinstance(drafter, HasDrafters) else ()
    return next((secret for each in inside if (secret := secret_among(each)) is not None), None)


def scorers_among(drafters: Sequence[Drafter]) -> tuple[Scorer, ...]:
    """The models whose caches hold the rows' texts, of all of these drafters."""
    return tuple(scorer for each in drafters if isinstance(each, HasScorers) for scorer in each.scorers)
