"""The hidden states of a model, recorded for every token of its rows, for drafts that read them.

They are stored in the rows' cache like the keys and values of one more layer. So they are rolled back, freed, forked,
moved together after a tree, and stored in the prefix cache as keys and values are, and cannot get out of step.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from slipstream.cache.rows import INDEXER
from slipstream.models.layers import find_layers
from slipstream.models.memory import Memory

LAST = -1  # the place after the final norm: the input of the model's head
_numbers = count(2 * INDEXER)  # numbers after those of all layers and indexers that a model has


class HiddenStates:
    """The hidden states at some places of a model, side by side, of every token that its rows hold.

    Places are counted as in transformers' `hidden_states`: 0 is the input of the first layer, i the output of the i-th,
    before any norm; `LAST` is the output of the final norm. Only passes inside `watching` are seen.
    Raises ValueError for a place that the model does not have.
    """

    def __init__(self, model: Any, name: str, places: Sequence[int], memory: Memory) -> None:
        self.places, self.memory, self._number = tuple(places), memory, next(_numbers)
        self.passed: list[Tensor] = []  # states of passes whose tokens are not in the memory yet
        self._layers = find_layers(model, name)[1]
        self.last_layer = len(self._layers)
        wrong = [place for place in places if not LAST <= place <= len(self._layers)]
        if wrong:
            raise ValueError(
                f"{name} has {len(self._layers)} layers, so there are no hidden states {wrong}: the draft was made for "
                "another target."
            )
        self._width = len(self.places) * int(model.config.get_text_config().hidden_size)
        self._model = model
        memory.forget_prefixes()

    @contextmanager
    def watching(self) -> Iterator[dict[int, Tensor]]:
        """Yield a dictionary that a pass in the block fills with the states at every place.
        The hooks for it are removed afterwards, since graphs may be made of the model."""
        seen: dict[int, Tensor] = {}
        hooks = [self._hook(place, seen) for place in set(self.places)]
        try:
            yield seen
        finally:
            for hook in hooks:
                hook.remove()

    def _hook(self, place: int, seen: dict[int, Tensor]) -> Any:
        def into(module: nn.Module, args: Any, kwargs: Any) -> None:
            seen[place] = args[0] if args else kwargs["hidden_states"]

        def out(module: nn.Module, args: Any, output: Any) -> None:
            states = getattr(output, "last_hidden_state", output)
            seen[place] = states if isinstance(states, Tensor) else states[0]

        if place == 0:
            return self._layers[0].register_forward_pre_hook(into, with_kwargs=True)
        module = self._model.get_decoder() if place == LAST else self._layers[place - 1]
        return module.register_forward_hook(out)

    def joined(self, seen: Mapping[int, Tensor]) -> Tensor:
        """Join the states of a pass, given by place, side by side: (rows, n, width)."""
        by_place = [seen[place] for place in self.places]
        return torch.cat([states.to(by_place[0].device) for states in by_place], -1)

    def store(self, states: Tensor | Mapping[int, Tensor]) -> None:
        """Store states (rows, n, width), or those by place, for the tokens of the memory's present pass."""
        states = states if isinstance(states, Tensor) else self.joined(states)
        self.memory.texts.update(self._number, *states.unsqueeze(1).tensor_split(2, -1))

    @property
    def lengths(self) -> list[int]:
        return self.memory.texts.lengths

    def of(self, tokens: Tensor) -> Tensor:
        """Return the states (rows, n, width) of tokens (rows, n), counted from 0, of the first rows.
        States of tokens that a row does not hold are meaningless."""
        lengths = torch.tensor(self.lengths[: len(tokens)], device=tokens.device)[:, None]
        states = self.memory.texts.look(self._number, tokens.minimum(lengths - 1).clamp(min=0))
        return torch.zeros(*tokens.shape, self._width, device=tokens.device) if states is None else states


class Records:
    """The recorded hidden states of a model without a `RowCache`, in caches of their own with the model's rows."""

    def __init__(self) -> None:
        self._kept: WeakSet[HiddenStates] = WeakSet()

    @property
    def memories(self) -> list[Memory]:
        return [states.memory for states in self._kept]

    def begin(self, model: Any, name: str, places: Sequence[int], lengths: Sequence[int]) -> HiddenStates:
        """Record the states at some places from now on; there are none for tokens that rows hold already."""
        states = HiddenStates(model, name, places, Memory())
        states.memory.add(len(lengths))
        for row, length in enumerate(lengths):
            states.memory.texts.fill(row, {}, length)
        self._kept.add(states)
        return states

    def forget(self) -> None:
        """Drop the states of all passes so far: some of them may have read again tokens whose states are stored."""
        for states in self._kept:
            states.passed.clear()

    @contextmanager
    def collecting(self) -> Iterator[None]:
        with ExitStack() as watched:
            seen = [(states, watched.enter_context(states.watching())) for states in self._kept]
            yield
        for states, by_place in seen:
            states.passed.append(states.joined(by_place))

    def store(self, rows: Sequence[int]) -> None:
        """Store the states of the passes since `forget`, one after the other, for the tokens of these rows."""
        for states in self._kept:
            texts = states.memory.texts
            for row, new in zip(rows, torch.cat(states.passed, 1).split(1), strict=True):
                texts.reserve(new.shape[1], row, row + 1)
                states.store(new)
                texts.advance([new.shape[1]])
