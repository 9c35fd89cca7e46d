"""Copying the states of transformers' models, of any contents, joining them into a batch and splitting a batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig


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
    if rows == 1:
        return [state]
    return [_rebuilt([state], _of_row(row)) for row in range(rows)]


def _of_row(row: int) -> Callable[[Sequence[Tensor]], Tensor]:
    return lambda same: same[0][row : row + 1].clone()


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
    """Return the number of bytes of a state's tensors."""
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
