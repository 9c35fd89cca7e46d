"""Speculative execution of any stochastic process: a cheap f' drafts, and the trajectories have the law of f."""

from slipstream.processes.costs import Costs, measure
from slipstream.processes.laws import Discrete, Gaussian, Laws, Mixture, reject_until
from slipstream.processes.numbers import Numbers
from slipstream.processes.runs import Kernel, Pooled, ProcessRound, Run, Speculation, simulate

__all__ = [
    "Costs",
    "Discrete",
    "Gaussian",
    "Kernel",
    "Laws",
    "Mixture",
    "Numbers",
    "Pooled",
    "ProcessRound",
    "Run",
    "Speculation",
    "measure",
    "reject_until",
    "simulate",
]
