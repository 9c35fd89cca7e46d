"""Going back within a pass: states of hybrid models behind the first tokens of those that a pass has read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from slipstream.models.recurrences import Recurrence, recording
from slipstream.models.states import joined, row_of, shared

Place = tuple[int, int]
"""A recurrent state: the number of its layer, and its own within that."""


@dataclass(frozen=True)
class Rewind:
    """A pass over `count` tokens of some rows, from which the state behind any number of them can be had.

    `state` is transformers' cache behind the pass, which keeps what its convolutions and windows would have dropped.
    """

    state: Any
    count: int
    recurrences: dict[Place, Recurrence]
    ends: dict[Place, Tensor]

    def state_after(self, row: int, count: int) -> Any:
        """The state of a row behind the first `count` tokens, at least one; it shares tensors with others."""
        state = row_of(self.state, row)
        for layer in state.layers:
            layer.crop(count - self.count)
            if hasattr(layer, "record_past"):
                layer.record_past = False
        for (number, each), end in self.ends.items():
            whole = count == self.count
            found = end[row : row + 1] if whole else self.recurrences[number, each].state_after(row, count)
            state.layers[number].recurrent_states[each] = found.to(end.dtype)
        return state


@dataclass(frozen=True)
class RowState:
    """The state of one row, and the pass that has made it, if one can go back within that; `row` is its place there."""

    state: Any
    rewind: Rewind | None = None
    row: int = 0

    def shortened(self, tokens: int) -> RowState | None:
        """The state before the last so many tokens; None if it cannot be had from what was kept."""
        if self.rewind is None or tokens >= self.rewind.count:
            return None
        return RowState(self.rewind.state_after(self.row, self.rewind.count - tokens))


def rewindable(states: Sequence[Any], count: int, run: Callable[[Any], Any]) -> tuple[Any, Rewind]:
    """Run a pass over `count` tokens behind the states of some rows, which are not written to -> what it returns, and
    the way back.

    Raises ValueError if the model's cache drops what would be needed, or if a recurrence is of no known kind.
    """
    state = joined(states) if len(states) > 1 else shared(states[0])
    if not hasattr(state, "activate_past_recording"):
        raise ValueError(f"{type(state).__name__} does not keep what a rollback needs.")
    state.activate_past_recording()
    recurrences, ends = dict[Place, Recurrence](), dict[Place, Tensor]()
    with recording() as found:

        def keep(new: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
            """In place of copying the new state into the old one, which has to stay."""
            if len(found) != len(recurrences) + 1:
                raise ValueError(f"the recurrence of layer {layer_idx} is of no kind that can be replayed.")
            recurrences[layer_idx, state_idx], ends[layer_idx, state_idx] = found[-1], new
            return new

        state.update_recurrent_state = keep
        try:
            returned = run(state)
        finally:
            del state.update_recurrent_state
    return returned, Rewind(state, count, recurrences, ends)
