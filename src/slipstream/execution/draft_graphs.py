"""Drafting in graphs: passes of a draft, their laws and their draws, with no Python between them.

A pass of a small draft costs less than the work around it: masks, positions, laws and draws. Here all of that is inside
a program of one step, or a graph of a whole chain on a GPU. They serve laws that are made by a temperature alone; other
drafts go token by token.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from slipstream.cache.stores import Stores
from slipstream.core.draws import inverse
from slipstream.core.law import Law, pad_vocabulary, wide
from slipstream.execution.graphs import equate, warn
from slipstream.execution.passes import Cross, Parts, Pass, PassMasks, Sight, forward, sizes_of_stores
from slipstream.execution.programs import Program, recorded
from slipstream.kernels.laws import greatest

FED = 2  # the most tokens that a draft's cache lacks when a round begins
TRIED = ((2, 3, 17, 7, 11), (3, 7, 31, 13, 37))  # to record with, as in `recording`: caches hold the tokens of a step

Inputs = tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor, Stores, Parts, Tensor, Tensor]
"""The inputs of a graph: the tokens fed (rows, fed), padding first; the states before them (rows, fed, ...) for a
network that reads states; how many tokens stand before the last real one (rows,), and before all of them in the cache
(rows,); the numbers of the slots (end,), the cache, the source, the temperatures (rows, 1), and numbers in [0, 1) to
draw by (rows, size)."""


def fed_slots(start: Tensor, last: Tensor, width: int) -> Tensor:
    """Return the slots (rows, width) of the tokens fed: last + 1 real ones from the slot `start` on, both (rows,).

    The real ones stand last, so that the head of a network is computed for one column alone; padding goes to the slots
    behind them, where what is drafted next overwrites it.
    """
    return start[:, None] + (torch.arange(width, device=start.device) + last[:, None] + 1) % width


@dataclass(frozen=True)
class Seat:
    """The places of the tokens of a step, with the cache (`stores`) and the source (`cross`) that they attend to.

    Each row has `last` + 1 real tokens (rows,), which stand after its padding, and `start` tokens before them in the
    cache (rows,). `places` are the numbers of the slots (end,).
    """

    last: Tensor
    start: Tensor
    places: Tensor
    stores: Stores
    cross: Parts

    def slots(self, width: int) -> Tensor:
        return fed_slots(self.start, self.last, width)


Drafted = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""The outputs of a graph: the drafted tokens (rows, size), the greatest logits (size * rows,), the laws (rows, size,
vocab) of sampled tokens, and the states of the last step for a network that goes on from them."""


class Network(Protocol):
    """A network that drafts a token in a graph: a function of tensors, without any state in Python."""

    @property
    def known(self) -> Tensor | None:
        """The ids (n,) of the tokens that it has logits for, in rising order; None for all."""

    def __call__(self, tokens: Tensor, states: Tensor | None, seat: Seat) -> tuple[Tensor, Tensor | None]:
        """Run on tokens (rows, fed) and the states before them -> the logits (rows, n) after the last ones.
        The second result is the states (rows, 1, width) there, for a network that goes on from its own states."""


@dataclass(frozen=True)
class ModelNetwork:
    """A model that reads tokens alone, as a `Network`; it is called by `call`, which takes the cache as `cache`.

    `kinds` are the sights of its layers, by their type; `relative` models have a bias for distances to cached tokens.
    `drops_logits`: the model can compute the logits of the last column alone.
    """

    call: Callable[..., Any]
    dtype: torch.dtype
    kinds: dict[str, Sight]
    relative: bool = False
    drops_logits: bool = False
    known: Tensor | None = None

    def __call__(self, tokens: Tensor, states: Tensor | None, seat: Seat) -> tuple[Tensor, None]:
        slots = seat.slots(tokens.shape[1])
        pass_masks = PassMasks.chain(slots, seat.places.shape[0])
        masks = {kind: pass_masks.mask(sight, self.dtype) for kind, sight in self.kinds.items()}
        cross = seat.cross
        cross_pass = Cross(cross[0], cross[1], pass_masks.back if self.relative else None) if cross else None
        options = {"logits_to_keep": 1} if self.drops_logits else {}
        logits = forward(self.call, Pass(tokens, slots, slots, masks, cross_pass), seat.stores, **options)
        return logits[:, -1], None


@dataclass(frozen=True)
class Wish:
    """A request to draft `gammas[r]` tokens after the tokens `fed[r]` for every text.

    `fed[r]` are one or two tokens (none for a text that gets no draft, whose row is padding). The temperature 0 takes
    the likeliest tokens. Tokens are among the first `vocab` ids. `chances` (rows, gamma) are the numbers in [0, 1) to
    draw by, if any text is sampled.
    """

    fed: Sequence[Sequence[int]]
    gammas: Sequence[int]
    temperatures: Sequence[float]
    vocab: int
    chances: Sequence[Sequence[float]] = ()

    @property
    def gamma(self) -> int:
        return max(self.gammas)

    @property
    def sampled(self) -> bool:
        return any(self.temperatures)


@dataclass(frozen=True)
class Room:
    """The room of chains in the cache: after `lengths` tokens of the stores, attending to `end` slots, and to sources.
    `states` (rows, fed, ...) are those before the tokens that are fed, for networks that read states."""

    lengths: Sequence[int]
    end: int
    stores: Stores
    cross: Cross | None
    states: Tensor | None = None


class GraphKind(NamedTuple):
    """A kind of graph: it drafts `size` tokens after `width` fed ones, `sampled` or greedy, among `vocab` ids.
    It serves a `single` text or any number of texts, and reads states of `state` dimensions."""

    size: int
    width: int
    sampled: bool
    vocab: int
    single: bool
    state: int

    @property
    def constant(self) -> frozenset[str]:
        return frozenset({"rows"} if self.single else ())


@dataclass
class DraftGraphs:
    """Programs of one step of a draft, or graphs on a GPU that draft a `whole` chain.

    There is one for greedy and one for sampled tokens of each kind, made when it is first needed. If that fails, one
    warning says why, and all is drafted token by token.
    """

    network: Network
    name: str
    most_fed: int = FED  # the most tokens that a network's cache lacks when a round begins
    progress: Callable[[str], object] | None = None
    least = 0
    whole = False
    _graphs: dict[GraphKind, Any] = field(default_factory=dict)
    _slots: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    _failed: bool = False

    @property
    def made(self) -> frozenset[GraphKind]:
        return frozenset(self._graphs)

    def run(self, wish: Wish, room: Room) -> tuple[Tensor, Law] | None:
        if self._failed or not room.stores:
            return None
        try:
            tokens, best, laws, _ = self._drafted(wish, room)
        except Exception as error:  # of any type, from the model's own code on small tensors
            self._failed = True
            warn(self.name, "drafts token by token, its chains", error)
            return None
        if not self._finite(best):
            return None  # drafting token by token reports where the logits are not finite
        tokens = tokens[:, : wish.gamma]
        if laws is None:
            return tokens, Law(tokens=tokens)
        laws, greedy = laws[:, : wish.gamma], tuple(temperature == 0 for temperature in wish.temperatures)
        if any(greedy):
            points = torch.tensor(greedy, device=laws.device)[:, None, None]
            laws = torch.where(points, torch.zeros_like(laws).scatter_(-1, tokens[..., None], 1), laws)
        return tokens, Law(laws, tokens, points=greedy) if any(greedy) else Law(probs=laws)

    def _finite(self, best: Tensor) -> bool:
        return math.isfinite(best.sum().item())

    def width(self, wish: Wish) -> int:
        """Return the columns of the first step; graphs of several tokens have `most_fed`, so that one serves all."""
        return self.most_fed if self.whole and self.length(wish) > 1 else max(map(len, wish.fed))

    def length(self, wish: Wish) -> int:
        """Return the number of tokens that are drafted for a wish."""
        return wish.gamma

    def _drafted(self, wish: Wish, room: Room) -> Drafted:
        length = self.length(wish)

        def run(inputs: Inputs) -> Drafted:
            (_, width), states, size = inputs[0].shape, inputs[1], inputs[-1].shape[1]
            single, state = self.whole and len(wish.fed) == 1, 0 if states is None else states.ndim
            return self._run(GraphKind(size, width, wish.sampled, wish.vocab, single, state), inputs)

        chances = torch.zeros(len(wish.fed), length, dtype=torch.float64)
        if wish.sampled:
            chances[:, : wish.gamma] = torch.tensor(wish.chances, dtype=torch.float64)
        inputs = (*self._inputs(wish, room), chances)
        return run(inputs) if self.whole else draft(run, length, inputs)

    def _inputs(self, wish: Wish, room: Room) -> tuple[Any, ...]:
        """Return the inputs of the first graph, without the numbers to draw by; see `Inputs`."""
        if len(self._slots) < room.end:
            self._slots = torch.arange(2 * room.end)
        width = self.width(wish)
        return (
            torch.tensor([[*[0] * (width - len(fed)), *fed] for fed in wish.fed]),
            room.states,
            torch.tensor([max(len(fed) - 1, 0) for fed in wish.fed]),
            torch.tensor(room.lengths),
            self._slots[: room.end],
            room.stores,
            (room.cross.stores, room.cross.mask, None) if room.cross else None,
            torch.tensor(wish.temperatures, dtype=torch.float32)[:, None],  # integers would need another graph
        )

    def _run(self, kind: GraphKind, inputs: Inputs) -> Drafted:
        if kind not in self._graphs:
            step = traced_draft(self.network, kind)
            self._graphs[kind] = Program(recorded(step, inputs, sizes_of_draft(inputs), tried=TRIED))
        return drafted_of(kind, self._graphs[kind](inputs))


def drafted_of(kind: GraphKind, outputs: Sequence[Tensor]) -> Drafted:
    """Return the outputs of a graph of this kind, which leaves out laws and states that there are not."""
    drawn, best, *others = outputs
    laws = others.pop(0) if kind.sampled else None
    return drawn, best, laws, others[0] if others else None


def traced_draft(network: Network, kind: GraphKind) -> Callable[..., Drafted]:
    def function(*graph_inputs: Any) -> Drafted:
        equate(sizes_of_draft(graph_inputs))
        return draft(lambda inputs: _step(network, kind, inputs), kind.size, graph_inputs)

    return function


Step = Callable[[Inputs], Drafted]  # A function that drafts one token for each text


def draft(step: Step, size: int, inputs: Inputs) -> Drafted:
    """Draft `size` tokens for each text, each by a step that is fed the one before."""
    tokens, states, last, start, places, stores, cross, temperatures, chances = inputs
    parts: list[tuple[Tensor, Tensor, Tensor | None]] = []
    for place in range(size):
        # A copy, since torch would make another graph for another layout, or for a view into a table.
        chance = chances[:, place].clone(memory_format=torch.contiguous_format)[:, None]
        drawn, best, laws, states = step((tokens, states, last, start, places, stores, cross, temperatures, chance))
        parts.append((drawn, best, laws))
        tokens, start, last = drawn, start + last + 1, torch.zeros_like(last)
    every_drawn, every_best, every_law = zip(*parts, strict=True)
    laws = None if every_law[0] is None else torch.cat(every_law, 1)
    return torch.cat(every_drawn, 1), torch.cat(every_best), laws, states


def _step(network: Network, kind: GraphKind, inputs: Inputs) -> Drafted:
    tokens, states, last, start, places, stores, cross, temperatures, chances = inputs
    logits, states = network(tokens, states, Seat(last, start, places, stores, cross))
    known = network.known
    logits = logits if known is not None else pad_vocabulary(logits, kind.vocab)
    best, token = (each[:, 0] for each in greatest(logits[:, None]))
    law = None
    if kind.sampled:
        # (rows, vocab) at each text's temperature. Where logits are not finite, all of it is NaN and becomes uniform,
        # since such a draft may be verified before anybody looks at its logits.
        greedy = temperatures == 0
        law = (wide(logits) / torch.where(greedy, 1, temperatures)).softmax(-1)
        law = torch.where(law[:, :1].isnan(), 1 / law.shape[-1], law)
        token = torch.where(greedy[:, 0], token, inverse(law, chances[:, 0]))
    if known is not None:
        token = known[token]
        law = law if law is None else law.new_zeros(len(law), kind.vocab).index_copy_(1, known, law)
    return token[:, None], best, law if law is None else law[:, None], states


@runtime_checkable
class DraftsInGraphs(Protocol):
    """A Scorer that can draft whole chains by graphs, after `make_draft_graphs` was called."""

    @property
    def draft_graphs(self) -> DraftGraphs | None:
        """The graphs that draft; None before `make_draft_graphs` is called."""

    def make_draft_graphs(self, sizes: Sequence[int], progress: Callable[[str], object] | None = None) -> None:
        """Draft by graphs from now on, where possible: by one graph for chains of each of these sizes."""

    def chain(self, wish: Wish) -> tuple[Tensor, Law] | None:
        """Draft chains for the first rows of the cache, one per text of the wish -> tokens (rows, gamma), and their q.
        None if that is not possible by graphs."""


def describe(kind: GraphKind) -> str:
    how, served = "sampled" if kind.sampled else "greedy", "one text" if kind.single else "batches"
    return f"{how} chains of {kind.size} tokens" if kind.size > 1 else f"{how} drafts of {served}, {kind.width} fed"


def sizes_of_draft(inputs: Inputs) -> list[tuple[Tensor, dict[int, str]]]:
    """Return a graph's inputs with names of their varying dimensions."""
    tokens, states, last, start, places, stores, cross, temperatures, chances = inputs
    counted = (tokens, last, start, temperatures, chances, *([] if states is None else [states]))
    return [
        (places, {0: "end"}),
        *((tensor, {0: "rows"}) for tensor in counted),
        *sizes_of_stores(stores, "slots"),
        *(((cross[1], {0: "rows", 3: "source"}), *sizes_of_stores(cross[0], "source slots")) if cross else ()),
    ]
