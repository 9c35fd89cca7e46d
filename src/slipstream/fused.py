"""Drafting a whole chain in one graph: passes of a draft, their laws and their draws, with no Python between them.

A pass of a small draft costs less than what surrounds it: masks, positions, laws, draws, and entering the graph. Here
all of that is inside. It serves one text whose law is made by its temperature alone; all else is drafted token by
token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from slipstream.execution import Cross, Parts, Pass, Stores, forward
from slipstream.laws import Law, fit, wide
from slipstream.sampling import inverse
from slipstream.sight import Sight
from slipstream.tracing import Frozen, vary, warn

FED = 2  # tokens that a draft's cache lacks at most when a round begins

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Stores, Parts, Tensor, Tensor]
"""The tokens fed (1, FED), which of them is the last real one (1,), how many stand before them (), the numbers of the
slots (end,), the cache, the source, the temperature (), and numbers in [0, 1) to draw by (gamma,)."""


@dataclass(frozen=True)
class Wish:
    """What to draft: `gamma` tokens behind `fed`, one or two tokens, at a temperature (0: the likeliest tokens), among
    the first `vocab` ids. `chances` (gamma,) are the numbers in [0, 1) to draw by."""

    fed: tuple[int, ...]
    gamma: int
    temperature: float
    vocab: int
    chances: tuple[float, ...] = ()


@dataclass(frozen=True)
class Room:
    """Where a chain goes: behind `length` tokens of the stores, looking at `end` slots, and at a source, if any."""

    length: int
    end: int
    stores: Stores
    cross: Cross | None


@dataclass
class Fused:
    """Graphs that draft as many tokens as one of the `sizes`; a wish in between is served by the next size and cut.

    There is one for greedy and one for sampled chains of each size, made when it is first needed (it takes
    minutes; `progress` is told). Where that fails, one warning says why, and chains are drafted token by token.
    """

    model: Any  # called as `execution.forward` calls it
    name: str
    sizes: tuple[int, ...]
    kinds: dict[str, tuple[int | None, int | None]]  # see `sight.mask_kinds`
    relative: bool = False  # whether the model asks how far back everything lies
    progress: Callable[[str], object] | None = None
    _graphs: dict[tuple[int, bool, int], Any] = field(default_factory=dict)
    _slots: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    _failed: bool = False

    def run(self, wish: Wish, room: Room) -> tuple[Tensor, Law] | None:
        """Tokens (1, gamma) and the law each was drawn from; None if that has to be done token by token."""
        size = self.size(wish.gamma)
        if self._failed or not size or not room.stores:
            return None
        inputs = self._inputs(wish, room, size)
        key = (size, wish.temperature > 0, wish.vocab)
        try:
            if key not in self._graphs:
                self._graphs[key] = self._make(key, inputs)
            tokens, best, probs = self._graphs[key](*inputs)
        except Exception as error:  # whatever dynamo, inductor or the machine's C++ compiler object to
            self._failed = True
            warn(self.name, "drafts token by token, its chains", error)
            return None
        if not bool(torch.isfinite(best).all()):
            return None  # drafting token by token says where
        tokens = tokens[:, : wish.gamma]
        return tokens, Law(tokens=tokens) if probs is None else Law(probs=probs[:, : wish.gamma])

    def size(self, gamma: int) -> int:
        """How many tokens the graph for `gamma` drafts; 0 if there is none."""
        return min((size for size in self.sizes if size >= gamma), default=0)

    def _inputs(self, wish: Wish, room: Room, size: int) -> Inputs:
        if len(self._slots) < room.end:
            self._slots = torch.arange(2 * room.end)
        return (
            torch.tensor([[*wish.fed, *[0] * (FED - len(wish.fed))]]),
            torch.tensor([len(wish.fed) - 1]),
            torch.tensor(room.length),
            self._slots[: room.end],
            room.stores,
            (room.cross.stores, room.cross.mask, None) if room.cross else None,
            torch.tensor(wish.temperature),
            torch.tensor([*wish.chances, *[0.0] * (size - len(wish.chances))], dtype=torch.float64),
        )

    def _make(self, key: tuple[int, bool, int], inputs: Inputs) -> Frozen:
        if self.progress:
            self.progress(f"compiling {self.name} for {'sampled' if key[1] else 'greedy'} chains of {key[0]} tokens")
        _, _, _, places, stores, cross, _, _ = inputs
        vary(places, (0,))
        for store in (store for pair in (*stores, *(cross[0] if cross else ())) for store in pair):
            vary(store, (2,))
        if cross:
            vary(cross[1], (3,))

        def function(*given: Any) -> tuple[Tensor, Tensor, Tensor | None]:
            return self._draft(*key, given)

        return Frozen(function, ["given"])

    def _draft(self, size: int, sampled: bool, vocab: int, given: Inputs) -> tuple[Tensor, Tensor, Tensor | None]:
        """The chain (1, gamma), the greatest logits (gamma,), and the laws (1, gamma, vocab) of a sampled one."""
        tokens, last, start, places, stores, cross, temperature, chances = given
        drawn: list[Tensor] = []
        greatest: list[Tensor] = []
        laws: list[Tensor] = []
        for place in range(size):
            logits = forward(self.model, self._pass(tokens, start, places, cross), stores)[0]
            logits = fit(wide(logits.index_select(0, last)), vocab)
            best, token = logits.max(-1)
            if sampled:
                laws.append((logits / temperature).softmax(-1))
                token = inverse(laws[-1], chances[place : place + 1])
            drawn, greatest = [*drawn, token], [*greatest, best]
            tokens, start, last = token[None], start + last[0] + 1, torch.zeros_like(last)
        return torch.stack(drawn, 1), torch.cat(greatest), torch.stack(laws, 1) if sampled else None

    def _pass(self, tokens: Tensor, start: Tensor, places: Tensor, cross: Parts) -> Pass:
        slots = (start + torch.arange(tokens.shape[1]))[None]
        sight = Sight.chain(slots, places.shape[0])
        masks = {kind: sight.mask(*rule, self.model.dtype) for kind, rule in self.kinds.items()}
        beside = Cross(cross[0], cross[1], sight.back if self.relative else None) if cross else None
        return Pass(tokens, slots, slots, masks, beside)
