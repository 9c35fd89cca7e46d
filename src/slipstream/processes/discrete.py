"""`Discrete`: laws over finitely many states, with the same acceptance mathematics as tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.core.draws import inverse
from slipstream.core.law import Law
from slipstream.decoding import acceptance
from slipstream.processes.numbers import Numbers
from slipstream.theory import SUM_TOLERANCE


@dataclass(frozen=True, slots=True)
class Discrete:
    """A probability per state: `probs` (rows, states), float32 or wider; states are whole numbers from 0 up.

    Raises ValueError if a row is not a law.
    """

    probs: Tensor

    def __post_init__(self) -> None:
        if self.probs.ndim != 2 or self.probs.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"probs of shape {tuple(self.probs.shape)} and {self.probs.dtype} are not possible: give "
                "(rows, states) in float32 or float64."
            )
        total = self.probs.sum(-1)
        if not bool((self.probs >= 0).all()) or not bool(((total - 1).abs() <= SUM_TOLERANCE).all()):
            raise ValueError("probs are no laws: every row must be >= 0 and sum to 1.")

    @property
    def rows(self) -> int:
        return self.probs.shape[0]

    def select(self, rows: Tensor) -> Discrete:
        return Discrete(self.probs[rows])

    def join(self, others: Sequence[Discrete]) -> Discrete:
        return Discrete(torch.cat([self.probs, *(law.probs for law in others)]))

    def sample(self, numbers: Numbers) -> Tensor:
        """Draw states (rows,) by inverting the cumulative weights."""
        return inverse(self.probs.unsqueeze(1), numbers.uniforms(1).to(self.probs.device))[:, 0]

    def log_density(self, states: Tensor) -> Tensor:
        """Return the logarithm of the probability of states (rows,) -> (rows,)."""
        return self._law.of(states.unsqueeze(1))[:, 0].log()

    def residual(self, q: Discrete, refused: Tensor, numbers: Numbers) -> Tensor:
        """Draw states (rows,) from norm(max(0, p - q)) (section 2.3 of arXiv 2211.17192)."""
        return Discrete(acceptance.residual(self._law, q._law).dense[:, 0]).sample(numbers)

    def beta(self, q: Discrete) -> Tensor:
        """Return the chance that a state drawn from q is kept, sum_x min(p(x), q(x)) (Theorem 3.5) -> (rows,)."""
        return acceptance.beta(self._law, q._law)[:, 0]

    @property
    def _law(self) -> Law:
        return Law(probs=self.probs.unsqueeze(1))
