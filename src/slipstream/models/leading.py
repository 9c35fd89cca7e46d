"""One model on several ranks: a Scorer on rank 0 that tells every call to the others, which repeat it on their parts.

All that is drawn or decided (which rows run, what is drafted and accepted, who is aborted, when a text ends) is decided
on rank 0 alone. The others get the calls of the target's Scorer that came of it, so ranks cannot decide differently;
what they would return is not asked for. Calls without a pass travel with the next one that has one, so a round costs
one message; with it come the lengths of all rows, by which a rank that has come apart is noticed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from slipstream.cache.prefixes import PrefixCache, recalling
from slipstream.core.draft import Tree
from slipstream.core.media import Media, Modality
from slipstream.core.protocols import Shape
from slipstream.core.source import Source, SourceForm
from slipstream.execution.ranks import RankLost, Ranks
from slipstream.models.families import first_sentence
from slipstream.models.loading import AnyScorer, scorer_of
from slipstream.models.media_trial import proven_modalities
from slipstream.models.sharding import Plan, load_sharded

# ---- messages ---------------------------------------------------------------------------------------------------


class Message(Protocol):
    """What rank 0 tells the others."""

    def obey(self, follower: Follower) -> None:
        """Do it on another rank."""
        ...


@dataclass(frozen=True)
class Call:
    """A method of a Scorer, and what it is given."""

    method: str
    given: tuple[Any, ...]

    def on(self, part: Part) -> Any:
        """What the method returns."""
        return getattr(part, self.method)(*self.given)


@dataclass(frozen=True)
class Build:
    """Load a model: every rank its part."""

    source: str | Path
    dtype: Any
    plan: Plan
    options: dict[str, Any]

    def part(self, ranks: Ranks) -> Part:
        """This rank's part of the model. Raises ValueError if there is none."""
        with ranks.working():
            model = load_sharded(self.source, self.dtype, self.plan, ranks.size, **self.options)
            return Part(scorer_of(model, Path(self.source).name if isinstance(self.source, Path) else self.source))

    def obey(self, follower: Follower) -> None:
        """Load this rank's part, known by the number of this message from now on, and say that it is there."""
        follower.parts[follower.ranks.count] = self.part(follower.ranks)
        follower.ranks.answer()


@dataclass(frozen=True)
class Calls:
    """Calls in their order, of which only the last has a pass. `lengths` are those of the model's rows before it."""

    number: int
    calls: tuple[Call, ...]
    lengths: tuple[int, ...]

    def obey(self, follower: Follower) -> None:
        """Repeat the calls. Raises RankLost if this rank has other rows than rank 0."""
        part = follower.parts[self.number]
        *before, last = self.calls
        for call in before:
            call.on(part)
        if tuple(part.scorer.lengths) != self.lengths:
            raise RankLost(f"its rows have {part.scorer.lengths} tokens, and those of rank 0 {list(self.lengths)}.")
        with follower.ranks.working():
            last.on(part)


@dataclass(frozen=True)
class Failed:
    """Rank 0 could not obey its own last message about a model, or some rank could not."""

    number: int

    def obey(self, follower: Follower) -> None:
        """This rank could: it has come apart from the others, and gives its part up."""
        follower.parts.pop(self.number, None)
        follower.ranks.answer()


# ---- both sides -------------------------------------------------------------------------------------------------


class Part:
    """A rank's part of a model, as all ranks call it: tokens come as lists, and every rank has a device of its own."""

    def __init__(self, scorer: AnyScorer) -> None:
        self.scorer: Any = scorer
        self.store = recalling(scorer)

    def __getattr__(self, name: str) -> Any:
        """Every other method is the Scorer's own."""
        return getattr(self.scorer, name)

    def extend(self, tokens: list[list[int]], counts: Sequence[int], first: int, tree: Tree | None) -> Tensor:
        """See `Scorer.extend`."""
        return self.scorer.extend(torch.tensor(tokens, device=self.scorer.device), counts, first, tree)

    def use_prefixes(self, limit: int | None, block: int) -> None:
        """Store texts in a cache of this part's own: all ranks see the same texts, so they drop the same ones."""
        self.store.use_prefixes(None if limit is None else PrefixCache(limit, block))

    def recall(self, row: int, text: list[int], salt: str) -> int:
        """See `Recalling`."""
        return self.store.recall(row, text, salt)

    def remember(self, row: int, text: list[int], salt: str) -> None:
        """See `Recalling`."""
        self.store.remember(row, text, salt)


# ---- rank 0 -----------------------------------------------------------------------------------------------------


class LeadingScorer:
    """A model that lies on several ranks, on rank 0 (see `core.protocols.Scorer` for the contract and the shapes).

    Every method may raise RankLost; from then on all that run a pass do.
    """

    execution = None  # passes run eagerly: what ranks exchange is in them

    def __init__(self, ranks: Ranks, number: int, part: Part) -> None:
        self._ranks, self._number, self._part = ranks, number, part
        self._waiting: list[Call] = []
        self._lock = threading.RLock()
        inner = part.scorer
        self.name, self.model, self.device = inner.name, inner.model, inner.device
        self.vocab, self.context, self.way = inner.vocab, inner.context, inner.way
        self.shares_rows: bool = inner.shares_rows

    @property
    def ranks(self) -> int:
        """How many ranks the model lies on."""
        return self._ranks.size

    @property
    def source_form(self) -> SourceForm | None:
        """What the encoder reads, if there is one."""
        return self._part.scorer.source_form

    @property
    def modalities(self) -> frozenset[Modality]:
        """What the model reads beside text: none where it has to be tried, which a rank alone could not."""
        return self._part.scorer.modalities & proven_modalities(self.model)

    @property
    def lengths(self) -> list[int]:
        """Tokens in the cache, per row."""
        return self._part.scorer.lengths

    @property
    def bytes_per_token(self) -> int:
        """The bytes that one token takes in the cache of one rank; 0 before the first pass."""
        return self._part.scorer.bytes_per_token

    def check(self) -> None:
        """Raises RankLost if the ranks cannot go on."""
        self._ranks.check()

    def call_on_loss(self, function: Callable[[], object]) -> None:
        """Have a function without arguments called, by another thread, as soon as a rank is lost."""
        self._ranks.on_loss = function

    def sharing_rows(self, model: Any, name: str) -> Any:
        """Raises ValueError: layers of the target run on all ranks or not at all."""
        raise ValueError(f"{self.name} lies on {self.ranks} ranks, so no part of it can run for a draft on one.")

    # ---- with a pass ----

    def add(self, rows: int, sources: Sequence[Source | None] = ()) -> None:
        """Append empty rows; an encoder reads the source of each."""
        (self._together if self.source_form else self._later)("add", rows, list(sources))

    def extend(self, tokens: Tensor, counts: Sequence[int], first: int = 0, tree: Tree | None = None) -> Tensor:
        """Feed tokens (rows, n), of which `counts[r]` are real, to the rows first .. first + rows -> logits."""
        return self._together("extend", tokens.tolist(), list(counts), first, tree)

    def prefill(self, texts: Sequence[Sequence[int]], first: int = 0) -> None:
        """Feed texts, one to each of the rows from `first` on, behind what they hold."""
        self._together("prefill", [list(text) for text in texts], first)

    def bytes_for(self, lengths: Sequence[int]) -> int:
        """What texts of these lengths take on one rank, with what is allocated ahead."""
        if not self.bytes_per_token:
            self._together("bytes_for", list(lengths))
        return self._part.scorer.bytes_for(lengths)

    # ---- without ----

    def fork(self, rows: Sequence[int]) -> None:
        """Append copies of these rows, in this order, with their sources."""
        self._later("fork", list(rows))

    def free(self, rows: Sequence[int]) -> None:
        """Remove rows; the others keep their order."""
        self._later("free", list(rows))

    def rollback(self, lengths: Sequence[int]) -> None:
        """Forget everything after `lengths[r]` tokens of the first rows."""
        self._later("rollback", list(lengths))

    def scrub(self) -> None:
        """Zero what rolled-back tokens left in the cache."""
        self._later("scrub")

    def keep(self, starts: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Move the accepted tokens of a tree together."""
        self._later("keep", list(starts), [list(path) for path in paths])

    def fix_shape(self, shape: Shape | None) -> None:
        """Run every pass after the prefill in one shape; None: in that of the work at hand."""
        self._later("fix_shape", shape)

    def attach(self, row: int, media: Media) -> None:
        """Give an empty row the media of its text, all of which is then read in one piece."""
        self._later("attach", row, media)

    def use_prefixes(self, cache: PrefixCache | None) -> None:
        """Store texts on every rank from now on, in as many bytes as `cache` may take; None: nowhere."""
        sizes = (None, 1) if cache is None else (cache.limit, cache.block)
        self._later("use_prefixes", *sizes)

    def recall(self, row: int, text: Sequence[int], salt: str) -> int:
        """Make an empty row one of the longest stored beginning of a text -> how many tokens that has."""
        return self._later("recall", row, list(text), salt)

    def remember(self, row: int, text: Sequence[int], salt: str) -> None:
        """Store what a row holds of a text, whose tokens are those of the row."""
        self._later("remember", row, list(text), salt)

    # ---- calls ----

    def _later(self, method: str, *given: Any) -> Any:
        """A call that no rank needs the others for: they make it before the next pass."""
        with self._lock:
            call = Call(method, given)
            found = call.on(self._part)
            self._waiting.append(call)
            return found

    def _together(self, method: str, *given: Any) -> Any:
        """A call in which the ranks exchange what their layers give."""
        with self._lock, self._ranks.working():
            call = Call(method, given)
            calls, self._waiting = (*self._waiting, call), []
            number = self._ranks.tell(Calls(self._number, calls, tuple(self.lengths)))
            try:
                return call.on(self._part)
            except Exception as error:
                self._ranks.agree(number, Failed(self._number), error)
                raise


def lead(ranks: Ranks, source: Any, dtype: Any, plan: Plan, **options: Any) -> LeadingScorer:
    """Load a model by hub name or folder on all ranks, each its part -> its Scorer on rank 0.

    Raises ValueError in one sentence if any rank cannot.
    """
    build = Build(source, dtype, plan, options)
    number = ranks.tell(build)
    try:
        part = build.part(ranks)
    except Exception as error:
        ranks.agree(number, Failed(number), error)
        raise
    faults = {rank: fault for rank, fault in ranks.answers(number).items() if fault}
    if faults:
        ranks.tell(Failed(number))
        raise ValueError("; ".join(f"rank {rank}: {fault}" for rank, fault in faults.items()))
    return LeadingScorer(ranks, number, part)


# ---- the other ranks --------------------------------------------------------------------------------------------


@dataclass
class Follower:
    """A rank that does what rank 0 tells it: `parts` are its parts of models, by the number of the message."""

    ranks: Ranks
    parts: dict[int, Part] = field(default_factory=dict)

    def run(self) -> None:
        """Obey until rank 0 has ended. Raises RankLost if the ranks cannot go on."""
        message: Message | None
        while (message := self.ranks.listen()) is not None:
            try:
                message.obey(self)
            except RankLost as error:
                self.ranks.answer(str(error))
                raise
            except Exception as error:
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Say what happened, and go on if rank 0 had an error too: then it was one of what was asked for."""
        fault = first_sentence(error)
        self.ranks.answer(fault)
        if not self.ranks.leader_agrees() or not isinstance(self.ranks.listen(), Failed):
            raise RankLost(fault) from error
