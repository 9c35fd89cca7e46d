"""Objectives of distillation: how far a draft's law q is from the target's law p, at every position.

Laws are compared on some listed tokens, those that the target likes best; all others count as one. Any of these
objectives is smallest where both laws agree. The paper's acceptance is alpha = 1 - TV (Theorem 3.5).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

LEAST_REST = 1e-4
"""What the unlisted tokens have at least, so that its logarithm stays finite."""

Objective = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(log p, log q of the listed tokens (..., n), share of the budget used ()) -> the loss of every position (...)."""


def forward_kl(log_p: Tensor, log_q: Tensor, used: Tensor) -> Tensor:
    """KL(p || q): the draft learns all that the target might say."""
    p_rest, q_rest = _rest(log_p), _rest(log_q)
    return (log_p.exp() * (log_p - log_q)).sum(-1) + p_rest * (p_rest.log() - q_rest.log())


def reverse_kl(log_p: Tensor, log_q: Tensor, used: Tensor) -> Tensor:
    """KL(q || p): the draft learns to say nothing that the target would not."""
    return forward_kl(log_q, log_p, used)


def total_variation(log_p: Tensor, log_q: Tensor, used: Tensor) -> Tensor:
    """TV(p, q): the chance that a drafted token is refused, 1 - sum_x min(p(x), q(x)). It teaches little while the laws
    are far apart."""
    return 0.5 * ((log_p.exp() - log_q.exp()).abs().sum(-1) + (_rest(log_p) - _rest(log_q)).abs())


def kl_then_tv(log_p: Tensor, log_q: Tensor, used: Tensor) -> Tensor:
    """Forward KL, which teaches fast at first, turning into total variation, which is what counts, over the budget."""
    tilt = 0.9 * used
    return (1 - tilt) * forward_kl(log_p, log_q, used) + 2 * tilt * total_variation(log_p, log_q, used)


OBJECTIVES: Mapping[str, Objective] = {
    "kl": forward_kl,
    "reverse-kl": reverse_kl,
    "tv": total_variation,
    "kl-tv": kl_then_tv,
}
"""The objectives by the names that users write."""


def objective_of(name: str) -> Objective:
    """The objective of a name. Raises ValueError for an unknown one."""
    if name not in OBJECTIVES:
        raise ValueError(f"objective {name!r} is not known: use {', '.join(OBJECTIVES)}.")
    return OBJECTIVES[name]


def _rest(log_law: Tensor) -> Tensor:
    """What all tokens that are not listed have together."""
    return (1.0 - log_law.exp().sum(-1)).clamp(min=LEAST_REST)
