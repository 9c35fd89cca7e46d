"""States as transformers keeps them, and going back within a pass, to those after the first of its tokens."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from slipstream.models.recurrent.recurrences import Recurrence, recording


def copied(state: Any) -> Any:
    """Return a copy of a state with tensors of its own, which a pass may write to."""
    return _rebuilt([state], lambda same: same[0].clone())


def joined(states: Sequence[Any]) -> Any:
    """Join the states of single rows, which have read equally many tokens, into one state of a batch."""
    return _rebuilt(states, lambda same: torch.cat(list(same))) if len(states) > 1 else copied(states[0])


def shared(state: Any) -> Any:
    """Return a copy of a state's objects that shares its tensors, for passes that write to no tensor."""
    return _rebuilt([state], lambda same: same[0])


def row_of(state: Any, row: int) -> Any:
    """Return the state of one row of a batch, as views of the batch's tensors."""
    return _rebuilt([state], lambda same: same[0][row : row + 1])


def apart(state: Any, rows: int) -> list[Any]:
    """Split the state of a batch into one state per row, with tensors of their own if there are several rows."""
    return [state] if rows == 1 else [copied(row_of(state, row)) for row in range(rows)]


def _rebuilt(same: Sequence[Any], tensors: Callable[[Sequence[Tensor]], Tensor]) -> Any:
    """Return an object like the first, with each tensor made by `tensors` from those at its place in all objects."""
    first = same[0]
    if isinstance(first, Tensor):
        return tensors(same) if first.dim() else first
    if isinstance(first, dict):
        return type(first)((name, _rebuilt([each[name] for each in same], tensors)) for name in first)
    if isinstance(first, list | tuple):
        return type(first)([_rebuilt(parts, tensors) for parts in zip(*same, strict=True)])
    if not _has_parts(first):
        return first
    new = copy.copy(first)
    for name in vars(first):
        vars(new)[name] = _rebuilt([vars(each)[name] for each in same], tensors)
    return new


def _has_parts(thing: Any) -> bool:
    """Whether this is an object of a transformers cache, not of a model, a configuration or Python itself."""
    excluded = isinstance(thing, nn.Module | PreTrainedConfig | type) or callable(thing)
    return not excluded and hasattr(thing, "__dict__") and type(thing).__module__.startswith("transformers")


def size(state: Any) -> int:
    return sum(tensor.nbytes for tensor in _tensors(state))


def _tensors(thing: Any) -> Iterator[Tensor]:
    """Yield all tensors inside a state: in dictionaries, lists, tuples and objects of transformers."""
    parts: Iterable[Any] = ()
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, dict):
        parts = thing.values()
    elif isinstance(thing, list | tuple):
        parts = thing
    elif _has_parts(thing):
        parts = vars(thing).values()
    for part in parts:
        yield from _tensors(part)


Place = tuple[int, int]  # a recurrent state's place: the number of its layer, and its own number within that layer


@dataclass(frozen=True)
class Rewind:
    """A pass over `count` tokens of some rows, from which the state after any number of them can be computed.

    `state` is transformers' cache after the pass, which still has the inputs that its convolutions and windows would
    have dropped, and the recurrent states from before the pass. `ends` are the recurrent states after the pass, as far
    as they were computed.
    """

    state: Any
    count: int
    recurrences: dict[Place, Recurrence]
    ends: dict[Place, Tensor]

    def state_after(self, row: int, count: int) -> Any:
        """Return the state of a row after the first `count` tokens (at least 1); it shares tensors with others."""
        state = row_of(self.state, row)
        for layer in state.layers:
            layer.crop(count - self.count)
            if hasattr(layer, "record_past"):
                layer.record_past = False
        for place, recurrence in self.recurrences.items():
            number, each = place
            if count == self.count and place in self.ends:
                new = self.ends[place][row : row + 1]
            else:
                new = recurrence.state_after(row, count)
            state.layers[number].recurrent_states[each] = new.to(recurrence.start.dtype)
        return state


@dataclass(frozen=True)
class Settled:
    """A state that cannot be shortened."""

    state: Any

    def shortened(self, tokens: int) -> None:
        """Return None: the state without its last tokens is not known."""


@dataclass(frozen=True)
class Within:
    """The state after the first `count` tokens of a pass that can be rolled back within, in the pass's row `row`.

    It is computed when it is first read, since most rounds accept only some of their tokens, and the count is not known
    before.
    """

    rewind: Rewind
    row: int
    count: int

    @cached_property
    def state(self) -> Any:
        with torch.inference_mode():
            return self.rewind.state_after(self.row, self.count)

    def shortened(self, tokens: int) -> Within | None:
        return Within(self.rewind, self.row, self.count - tokens) if tokens < self.count else None


RowState = Settled | Within  # the state of one row after a pass


def rewindable(states: Sequence[Any], count: int, run: Callable[[Any], Any]) -> tuple[Any, Rewind]:
    """Run a pass over `count` tokens after the states of some rows -> what `run` returns, and the `Rewind` of the pass.

    The states are not written to. Raises ValueError if the model's cache drops what a rollback needs, or if a
    recurrence is of no known kind.
    """
    state = joined(states) if len(states) > 1 else shared(states[0])
    if not hasattr(state, "activate_past_recording"):
        raise ValueError(f"{type(state).__name__} does not keep what a rollback needs.")
    state.activate_past_recording()
    ends = dict[Place, Tensor]()

    def keep(new: Tensor | None, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor | None:
        if new is not None:
            ends[layer_idx, state_idx] = new
        return new

    def extend(new: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """Append inputs (rows, channels, n) of a convolution to those before, with a token's channels contiguous."""
        convolved = state.layers[layer_idx].conv_states
        convolved[state_idx] = torch.cat([convolved[state_idx].mT, new.mT], 1).mT
        return convolved[state_idx]

    state.update_recurrent_state, state.update_conv_state = keep, extend
    try:
        with recording() as recurrences:
            returned = run(state)
    finally:
        del state.update_recurrent_state, state.update_conv_state
    return returned, Rewind(state, count, _placed(state, recurrences), ends)


def _placed(state: Any, recurrences: Sequence[Recurrence]) -> dict[Place, Recurrence]:
    """Return the recurrences by the places of their start states. Raises ValueError for a state without one."""
    by_start = {id(recurrence.start): recurrence for recurrence in recurrences}
    places = {
        (number, each): start
        for number, layer in enumerate(state.layers)
        for each, start in getattr(layer, "recurrent_states", {}).items()
        if start is not None
    }
    if missing := [number for (number, _), start in places.items() if id(start) not in by_start]:
        raise ValueError(f"the recurrence of layer {missing[0]} is of no kind that can be replayed.")
    return {place: by_start[id(start)] for place, start in places.items()}
