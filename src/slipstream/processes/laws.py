"""`Laws`, the protocol of laws of the next states, with the residual that replaces a refused draft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor

from slipstream.processes.numbers import Numbers

L = TypeVar("L", bound="Laws")

ATTEMPTS = 2**22
"""The number of attempts at one residual after which `reject_until` gives up."""
BLOCK = 2**16
"""The greatest number of attempts, of all rows together, that are made at once."""


class Laws(Protocol):
    """A law of the next state for every row. p, the target's, and q, the draft's, are of one class."""

    @property
    def rows(self) -> int:
        """The number of laws."""
        ...

    def select(self, rows: Tensor) -> Self:
        """Return the laws of these rows, in this order; a row may come more than once."""
        ...

    def join(self, others: Sequence[Self]) -> Self:
        """Return these laws, then those of others."""
        ...

    def sample(self, numbers: Numbers) -> Tensor:
        """Draw a state from each law -> (rows, *state)."""
        ...

    def log_density(self, states: Tensor) -> Tensor:
        """Return the logarithm of probability or density at `states` (rows, *state) -> (rows,). It must be normalized,
        or lack the same factor in p and q."""
        ...

    def residual(self, q: Self, refused: Tensor, numbers: Numbers) -> Tensor:
        """Replace refused states that were drawn from q: draw (rows, *state) from norm(max(0, p - q))."""
        ...


def reject_until(p: L, q: L, numbers: Numbers) -> Tensor:
    """Draw states (rows, *state) of norm(max(0, p - q)) by rejection: keep y ~ p with chance max(0, 1 - q(y)/p(y)).

    Exact for any densities. An attempt succeeds with chance 1 - beta, and a draft is refused with the same chance, so a
    tested state costs one attempt on average for any p and q. Raises FloatingPointError after `ATTEMPTS` at
    one state: density and sampler then do not belong together (if they do, its chance is below 1e-7 per tested state).
    """
    left, made, drawn = torch.arange(p.rows), 0, p.sample(numbers)
    size = 1
    while len(left):
        if made >= ATTEMPTS:
            raise FloatingPointError(
                f"no state in {ATTEMPTS} where the target's density is above the draft's, although the draft was "
                "refused: log_density must be normalized and belong to sample, in both laws."
            )
        size = max(1, min(2 * size, BLOCK // len(left)))
        states, stays = _attempts(p.select(left), q.select(left), numbers.select(left), range(made, made + size))
        some = stays.any(1)
        first = stays.long().argmax(1)
        drawn[left[some]] = states[torch.arange(len(left)), first][some]
        left, made = left[~some], made + size
    return drawn


def _attempts(p: L, q: L, numbers: Numbers, attempts: range) -> tuple[Tensor, Tensor]:
    """Draw states (rows, attempts, *state) from p -> them, and which of them are kept."""
    rows = torch.arange(p.rows).repeat_interleave(len(attempts))
    places, drawn = torch.tensor(attempts).repeat(p.rows), numbers.select(rows)
    wide = p.select(rows)
    states = wide.sample(drawn.again(2 * places))
    ratio = q.select(rows).log_density(states) - wide.log_density(states)
    coins = drawn.again(2 * places + 1).uniforms(1)[:, 0].to(ratio.device)
    stays = (coins < -torch.expm1(ratio)).reshape(p.rows, len(attempts))
    return states.reshape(p.rows, len(attempts), *states.shape[1:]), stays
