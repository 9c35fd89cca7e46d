"""Drafting in graphs: passes of a draft, their laws and their draws, with no Python between them.

A pass of a small draft costs less than what surrounds it: masks, positions, laws, draws, and entering the graph. Here
all of that is inside: a whole chain for a single text if its length is known before, and one step per graph otherwise.
It serves laws that are made by a temperature alone; all else is drafted token by token without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from slipstream.core.draws import inverse
from slipstream.core.law import Law, pad_vocabulary, wide
from slipstream.execution.graphs import Frozen, equate, graph_progress, vary, warn
from slipstream.execution.masks import PassMasks, Sight
from slipstream.execution.passes import Cross, Parts, Pass, Stores, forward, sizes_of_stores

FED = 2  # tokens that a draft's cache lacks at most when a round begins

Inputs = tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor, Stores, Parts, Tensor, Tensor]
"""The tokens fed (rows, fed), the states before them (rows, fed, width) where the network reads such, which of them is
the last real one (rows,), how many stand before them (rows,), the numbers of the slots (end,), the cache, the source,
the temperatures (rows, 1), and numbers in [0, 1) to draw by (rows, size)."""


@dataclass(frozen=True)
class Seat:
    """Where the tokens of a step stand: `last` is the last real one of each row (rows,), `start` how many tokens stand
    before them (rows,), `places` the numbers of the slots (end,); and the cache and the source that they look at."""

    last: Tensor
    start: Tensor
    places: Tensor
    stores: Stores
    cross: Parts

    def slots(self, width: int) -> Tensor:
        """The slots of the tokens (rows, width)."""
        return self.start[:, None] + torch.arange(width)

    def at_last(self, found: Tensor) -> Tensor:
        """Of what was made of the tokens (rows, width, ...) that of the last real ones, (rows, ...)."""
        return found[:, 0] if found.shape[1] == 1 else found[torch.arange(self.last.shape[0]), self.last]


class Network(Protocol):
    """What drafts a token in a graph: a function of tensors, without any state of Python."""

    def __call__(self, tokens: Tensor, states: Tensor | None, seat: Seat) -> tuple[Tensor, Tensor | None]:
        """Tokens (rows, fed), and the states before them -> the logits (rows, vocab) behind the last real ones, and
        the states (rows, 1, width) there, for a network that goes on from what it made."""
        ...


@dataclass(frozen=True)
class ModelNetwork:
    """A model that `forward` calls, which reads tokens alone. `kinds` are what layers see, by their type; `relative`:
    the model asks how far back everything lies."""

    model: Any
    kinds: dict[str, Sight]
    relative: bool = False

    def __call__(self, tokens: Tensor, states: Tensor | None, seat: Seat) -> tuple[Tensor, None]:
        """See `Network`."""
        slots = seat.slots(tokens.shape[1])
        pass_masks = PassMasks.chain(slots, seat.places.shape[0])
        masks = {kind: pass_masks.mask(sight, self.model.dtype) for kind, sight in self.kinds.items()}
        cross = seat.cross
        beside = Cross(cross[0], cross[1], pass_masks.back if self.relative else None) if cross else None
        logits = forward(self.model, Pass(tokens, slots, slots, masks, beside), seat.stores)
        return seat.at_last(logits), None


@dataclass(frozen=True)
class Wish:
    """What to draft for every text: `gammas[r]` tokens behind `fed[r]`, one or two tokens (none for a text that is
    drafted nothing, whose place in the batch is filled up), at a temperature (0: the likeliest tokens), among the
    first `vocab` ids. `chances` (rows, gamma) are the numbers in [0, 1) to draw by, if
    any text is sampled."""

    fed: Sequence[Sequence[int]]
    gammas: Sequence[int]
    temperatures: Sequence[float]
    vocab: int
    chances: Sequence[Sequence[float]] = ()

    @property
    def gamma(self) -> int:
        """The most tokens that a text wants."""
        return max(self.gammas)

    @property
    def sampled(self) -> bool:
        """Whether tokens are drawn."""
        return any(self.temperatures)


@dataclass(frozen=True)
class Room:
    """Where chains go: behind `lengths` tokens of the stores, looking at `end` slots, and at sources, if any. `states`
    (rows, fed, width) are those before the tokens that are fed, for networks that read them."""

    lengths: Sequence[int]
    end: int
    stores: Stores
    cross: Cross | None
    states: Tensor | None = None


class GraphKind(NamedTuple):
    """What one graph does: draft `size` tokens behind `width` fed ones, drawn or not, among `vocab` ids, for one text
    or for any number of them."""

    size: int
    width: int
    sampled: bool
    vocab: int
    single: bool


@dataclass
class DraftGraphs:
    """Graphs that draft as many tokens as one of the `sizes` for a single text (a wish in between is served by the next
    size and cut), and graphs of one step, for batches and for what no size serves.

    There is one for greedy and one for sampled tokens of each kind, made when it is first needed (it takes up to
    minutes; `progress` is called then). Where that fails, one warning says why, and all is drafted token by token.
    """

    network: Network
    name: str
    sizes: tuple[int, ...]
    most_fed: int = FED  # tokens that a network's cache lacks at most when a round begins
    progress: Callable[[str], object] | None = None
    _graphs: dict[GraphKind, Any] = field(default_factory=dict)
    _slots: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    _failed: bool = False

    @property
    def made(self) -> frozenset[GraphKind]:
        """The kinds of graphs that were made so far."""
        return frozenset(self._graphs)

    def run(self, wish: Wish, room: Room) -> tuple[Tensor, Law] | None:
        """Tokens (rows, gamma) and the law each was drawn from; None if that has to be done without graphs."""
        steps = self.steps(wish)
        if self._failed or not room.stores:
            return None
        try:
            tokens, best, laws = self._drafted(wish, room, steps)
        except Exception as error:  # whatever dynamo, inductor or the machine's C++ compiler object to
            self._failed = True
            warn(self.name, "drafts token by token, its chains", error)
            return None
        if not math.isfinite(best.sum().item()):
            return None  # drafting token by token says where
        tokens = tokens[:, : wish.gamma]
        if laws is None:
            return tokens, Law(tokens=tokens)
        laws, greedy = laws[:, : wish.gamma], tuple(temperature == 0 for temperature in wish.temperatures)
        return tokens, Law(probs=laws, tokens=tokens, points=greedy) if any(greedy) else Law(probs=laws)

    def width(self, wish: Wish) -> int:
        """Columns of the first step: a long graph, and one for a network that is fed many tokens, is made once, for
        any number of them."""
        return self.most_fed if self.steps(wish)[0] > 1 or self.most_fed > FED else max(map(len, wish.fed))

    def steps(self, wish: Wish) -> list[int]:
        """How many tokens each graph drafts, one after the other."""
        whole = [size for size in sorted(self.sizes) if size >= wish.gamma] if len(wish.fed) == 1 else []
        return whole[:1] or [1] * wish.gamma

    def _drafted(self, wish: Wish, room: Room, steps: list[int]) -> tuple[Tensor, Tensor, Tensor | None]:
        """Tokens (rows, gamma or more), the greatest logits, and the laws of sampled tokens."""
        tokens, states, last, start, *seen = self._inputs(wish, room)
        parts: list[tuple[Tensor, Tensor, Tensor | None]] = []
        for size, some in zip(steps, self._chances(wish, steps), strict=True):
            if parts:  # graphs that follow each other are steps of one token
                tokens, start, last = parts[-1][0], start + last + 1, torch.zeros_like(last)
            kind = GraphKind(size, tokens.shape[1], wish.sampled, wish.vocab, len(wish.fed) == 1)
            given = (tokens, states, last, start, *seen, some)
            drawn, best, laws, states = self._graph(kind, given)(*given)
            parts.append((drawn, best, laws))
        if len(parts) == 1:
            return parts[0]
        drawn, best, laws = zip(*parts, strict=True)
        return torch.cat(drawn, 1), torch.cat(best), torch.cat(laws, 1) if wish.sampled else None

    def _chances(self, wish: Wish, steps: Sequence[int]) -> Iterator[Tensor]:
        """The numbers to draw by (rows, size) of every graph, each in memory of its own with one layout: for another
        one, or for a part that begins elsewhere in a table, torch would make a graph in the middle of a call."""
        chances = torch.zeros(sum(steps), len(wish.fed), dtype=torch.float64)
        if wish.sampled:
            chances[: wish.gamma] = torch.tensor(wish.chances, dtype=torch.float64).T
        for some in map(torch.clone, chances.split(list(steps))):
            yield some[0][:, None] if len(some) == 1 else some.T

    def _inputs(self, wish: Wish, room: Room) -> tuple[Any, ...]:
        """What the first graph is given, but for the numbers to draw by; see `Inputs`."""
        if len(self._slots) < room.end:
            self._slots = torch.arange(2 * room.end)
        width = self.width(wish)
        return (
            torch.tensor([[*fed, *[0] * (width - len(fed))] for fed in wish.fed]),
            room.states,
            torch.tensor([max(len(fed) - 1, 0) for fed in wish.fed]),
            torch.tensor(room.lengths),
            self._slots[: room.end],
            room.stores,
            (room.cross.stores, room.cross.mask, None) if room.cross else None,
            torch.tensor(wish.temperatures, dtype=torch.float32)[:, None],  # whole numbers would be given another graph
        )

    def _graph(self, kind: GraphKind, inputs: Inputs) -> Any:
        if kind not in self._graphs:
            vary(_sizes(inputs), {"rows"} if kind.single else ())

            chain = _Chain(self.network, kind)

            def function(*given: Any) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
                return chain.draft(given)

            on_graph = graph_progress(self.progress, f"{self.name} for {_describe(kind)}")
            self._graphs[kind] = Frozen(function, ["given"], on_graph)
        return self._graphs[kind]


@dataclass(frozen=True)
class _Chain:
    """What a graph computes, and all that it depends on."""

    network: Network
    kind: GraphKind

    def draft(self, given: Inputs) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Tokens (rows, size), the greatest logits (size * rows,), the laws (rows, size, vocab) of sampled ones, and
        the states behind the last token, where the network has such."""
        equate(_sizes(given))
        tokens, states, last, start, places, stores, cross, temperatures, chances = given
        drawn: list[Tensor] = []
        greatest: list[Tensor] = []
        laws: list[Tensor] = []
        for place in range(self.kind.size):
            logits, states = self.network(tokens, states, Seat(last, start, places, stores, cross))
            logits = pad_vocabulary(wide(logits), self.kind.vocab)
            best, token = logits.max(-1)
            if self.kind.sampled:
                laws.append(_law(logits, token, temperatures))
                token = inverse(laws[-1], chances[:, place])
            drawn, greatest = [*drawn, token], [*greatest, best]
            tokens, start, last = token[:, None], start + last + 1, torch.zeros_like(last)
        return torch.stack(drawn, 1), torch.cat(greatest), torch.stack(laws, 1) if self.kind.sampled else None, states


def _law(logits: Tensor, best: Tensor, temperatures: Tensor) -> Tensor:
    """The law (rows, vocab) at each text's temperature, where 0 puts all on the `best` token (rows,)."""
    greedy = temperatures == 0
    point = torch.arange(logits.shape[-1]) == best[:, None]
    return torch.where(greedy, point.to(logits.dtype), (logits / torch.where(greedy, 1, temperatures)).softmax(-1))


@runtime_checkable
class DraftsInGraphs(Protocol):
    """A Scorer that can draft whole chains by graphs, after `make_draft_graphs` was called."""

    @property
    def draft_graphs(self) -> DraftGraphs | None:
        """The graphs that draft; None before `make_draft_graphs` is called."""
        ...

    def make_draft_graphs(self, sizes: Sequence[int], progress: Callable[[str], object] | None = None) -> None:
        """From now on draft by graphs, where that is possible: chains of these sizes by one."""
        ...

    def chain(self, wish: Wish) -> tuple[Tensor, Law] | None:
        """Draft chains for the first rows of the cache, one for each text of the wish -> tokens (rows, gamma) and the
        law each was drawn from; None where that has to be done without graphs."""
        ...


def _describe(kind: GraphKind) -> str:
    """Describe in words what a graph drafts."""
    how, whom = "sampled" if kind.sampled else "greedy", "one text" if kind.single else "batches"
    return f"{how} chains of {kind.size} tokens" if kind.size > 1 else f"{how} drafts of {whom}, {kind.width} fed"


def _sizes(inputs: Inputs) -> list[tuple[Tensor, dict[int, str]]]:
    """Name the dimensions of a graph's inputs whose sizes vary, by what they count."""
    tokens, states, last, start, places, stores, cross, temperatures, chances = inputs
    counted = (tokens, last, start, temperatures, chances, *([] if states is None else [states]))
    return [
        (places, {0: "end"}),
        *((tensor, {0: "rows"}) for tensor in counted),
        *sizes_of_stores(stores, "slots"),
        *(((cross[1], {0: "rows", 3: "source"}), *sizes_of_stores(cross[0], "source slots")) if cross else ()),
    ]
