"""Objectives of distillation: the distance of a draft's law q from the target's law p, at every position.

Laws are compared on some listed tokens, the target's likeliest ones; all others count as one. Each of these objectives
is smallest where both laws agree. The paper's acceptance is alpha = 1 - TV (Theorem 3.5).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

LEAST_REST = 1e-4  # the least probability of all unlisted tokens together, so that its logarithm stays finite

Objective = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A function of log p and log q on the listed tokens (..., n) and the used share of the budget () -> losses (...)."""


def forward_kl(log_p: Tensor, log_q: Tensor, used: Tensor) -> Tensor:
    """Compute KL(p || q), which teaches the draft to cover all likely tokens of the target."""
    p_rest, q_rest = _rest(log_p), _rest(log_q)
    return (log_p.exp() * (log_p - log_q)).sum(-1) + p_rest * (p_rest.log() - q_rest.log())


def reverse_kl(log_p: Tensor, log_q: Tensor, used: Tensor) -> Tensor:
    """Compute KL(q || p), which teaches the draft to avoid tokens that are unlikely in the target."""
    return forward_kl(log_q, log_p, used)


def total_variation(log_p: Tensor, log_q: Tensor, used: Tensor) -> Tensor:
    """Compute TV(p, q) = 1 - sum_x min(p(x), q(x)), the chance that a drafted token is rejected.

    Its gradient teaches little while the laws are far apart.
    """
    return 0.5 * ((log_p.exp() - log_q.exp()).abs().sum(-1) + (_rest(log_p) - _rest(log_q)).abs())


def kl_then_tv(log_p: Tensor, log_q: Tensor, used: Tensor) -> Tensor:
    """Blend forward KL, which teaches fast at first, into total variation, the final aim, over the budget."""
    tilt = 0.9 * used
    return (1 - tilt) * forward_kl(log_p, log_q, used) + 2 * tilt * total_variation(log_p, log_q, used)


OBJECTIVES: Mapping[str, Objective] = {  # the objectives, by the names that users give
    "kl": forward_kl,
    "reverse-kl": reverse_kl,
    "tv": total_variation,
    "kl-tv": kl_then_tv,
}


def objective_of(name: str) -> Objective:
    if name not in OBJECTIVES:
        raise ValueError(f"objective {name!r} is not known: use {', '.join(OBJECTIVES)}.")
    return OBJECTIVES[name]


def _rest(log_law: Tensor) -> Tensor:
    return (1.0 - log_law.exp().sum(-1)).clamp(min=LEAST_REST)
