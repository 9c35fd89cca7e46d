"""The protocols between packages: `Scorer`, `Drafter`, `Verifier` and `Controller`.

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
    """The sizes of a pass: rows, new tokens per row, and the slots that attention reads."""

    rows: int
    width: int
    slots: int


class Scorer(Protocol):
    """An autoregressive model with its cache for a batch of rows, each with a length of its own.
    A call changes only the rows that it names or brings tokens for."""

    @property
    def name(self) -> str:
        """The model's name, for messages and statistics."""

    @property
    def vocab(self) -> int:
        """The size of the logits, which may exceed the number of tokens that the tokenizer has."""

    @property
    def context(self) -> int | None:
        """The longest text the model can hold; None if there is no limit."""

    @property
    def device(self) -> torch.device:
        """The device that takes the tokens and returns the logits."""

    @property
    def source_form(self) -> SourceForm | None:
        """The form of the sources that the encoder reads; None for a model without an encoder."""

    @property
    def lengths(self) -> list[int]:
        """The number of tokens in the cache, per row."""

    def add(self, rows: int, sources: Sequence[Source | None] = ()) -> None:
        """Append empty rows, with the source of each if the model has an encoder."""

    def fork(self, rows: Sequence[int]) -> None:
        """Append copies of these rows, in this order, with their sources; a row may be named several times."""

    def free(self, rows: Sequence[int]) -> None:
        """Remove rows; the others keep their order."""

    def extend(self, tokens: Tensor, counts: Sequence[int], first: int = 0, tree: Tree | None = None) -> Tensor:
        """Feed `counts[r]` of tokens (rows, n) to the rows first .. first + rows -> logits (rows, n, vocab)."""

    def prefill(self, texts: Sequence[Sequence[int]], first: int = 0) -> None:
        """Append texts to the rows first .. first + len(texts) without computing logits."""

    def rollback(self, lengths: Sequence[int]) -> None:
        """Drop everything after `lengths[r]` tokens of the first rows; rows after them stay as they are."""

    def scrub(self) -> None:
        """Zero the cache entries of rolled-back tokens: NaN passes any mask, since 0 * NaN is NaN."""

    def keep(self, starts: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Move a tree's accepted tokens together, in the first rows: the entry at starts[r] + paths[r][i] goes to
        starts[r] + i."""

    def fix_shape(self, shape: Shape | None) -> None:
        """Run every pass after the prefill in one shape, so that no bit of the logits depends on what is scored
        together; None runs each pass in the shape of its input, which is faster."""


@runtime_checkable
class TakesMemory(Scorer, Protocol):
    """A Scorer that can compute how much memory its cache takes."""

    def bytes_for(self, lengths: Sequence[int]) -> int:
        """Return the bytes of a cache for texts of these lengths, with what is allocated ahead."""


@runtime_checkable
class HasModel(Scorer, Protocol):
    """A Scorer that runs a model of transformers, whose layers other parts may read or share."""

    @property
    def model(self) -> Any:
        """The model; for an encoder-decoder, encoder and decoder together."""

    @property
    def execution(self) -> Any:
        """The object that runs passes as graphs, whose hidden states cannot be read; None if passes run eagerly."""

    @property
    def shares_rows(self) -> bool:
        """Whether `sharing_rows` is possible; it is not for models with recurrent states."""

    def sharing_rows(self, model: Any, name: str) -> HasModel:
        """Return a Scorer that runs another model, made of this one's layers or of copies of them, over the same rows
        and cache. The tokens that it adds have to be rolled back before this Scorer is called again."""


@runtime_checkable
class SeesWindows(HasModel, Protocol):
    """A Scorer that can also run its model with windowed attention over the same rows."""

    def seeing(self, window: int, sinks: int) -> HasModel:
        """Return a Scorer that runs the same model over the same rows, but attends only to the last `window` tokens of
        a text and its first `sinks`. The tokens that it adds have to be rolled back before this one is called again."""


@runtime_checkable
class LiesOnRanks(HasModel, Protocol):
    """A Scorer whose model is divided among several processes (ranks), led by this one."""

    @property
    def ranks(self) -> int:
        """The number of processes."""

    def check(self) -> None:
        """Raise ConnectionError if one of the processes is lost."""

    def call_on_loss(self, function: Callable[[], object]) -> None:
        """Register a function that another thread calls as soon as a process is lost."""


class Drafter(Protocol):
    """Makes drafts. The context of each call holds the rows that run now, so one drafter serves any number of texts."""

    def propose(self, context: Context, gammas: Sequence[int]) -> Draft:
        """Draft at most `gammas[r]` tokens for each row."""

    def observe(self, round: Round) -> None:
        """Take note of a round; called after every round, when the rows hold the emitted tokens. By default, do
        nothing."""
        return None


@dataclass(frozen=True)
class Traits:
    """What a drafter declares about itself in its attribute `traits`; without one, all is as the defaults say.

    `scorers` are those of models whose caches hold the rows' texts, without the target if it drafts in its own cache.
    `model` is the Scorer whose law after the text is the draft's, so that it can be computed for any other text too; it
    is used by other code after `release`, which drops the rows it follows, unless it works `on_target_rows`. `by_text`:
    drafts depend on the tokens of a row alone. `secret` is set if another party, which may know every seed, runs the
    draft: draws that decide about it are made from both. `drafters` are those that this one is composed of.
    """

    scorers: tuple[Scorer, ...] = ()
    model: Scorer | None = None
    on_target_rows: bool = False
    release: Callable[[], object] = bool
    by_text: bool = False
    secret: int | None = None
    drafters: tuple[Drafter, ...] = ()

    @staticmethod
    def of(drafter: Drafter) -> Traits:
        return getattr(drafter, "traits", Traits())


class Controller(Protocol):
    """Chooses gamma per row before anything is drafted, so that any choice is exact; its state is passed in and out.
    By default there is no state, and nothing is learned from rounds."""

    @property
    def most(self) -> int:
        """The greatest gamma that it may ever choose."""

    def init(self) -> Any:
        """Return the state before any round."""
        return None

    def gammas(self, state: Any, rows: Sequence[Row]) -> Sequence[int]:
        """Return how many tokens to draft for each row of the next round; 0 is a plain step."""

    def update(self, state: Any, round: Round) -> Any:
        """Return the state after a round. A controller may also `resume(state)`, the last state of an earlier call."""
        return state


def secret_among(drafter: Drafter) -> int | None:
    """Return the secret for draws if a drafter, or one inside it, is not trusted; None if all are trusted."""
    traits = Traits.of(drafter)
    secrets = (traits.secret, *map(secret_among, traits.drafters))
    return next((secret for secret in secrets if secret is not None), None)


def scorers_among(drafters: Sequence[Drafter]) -> tuple[Scorer, ...]:
    return tuple(scorer for each in drafters for scorer in Traits.of(each).scorers)
