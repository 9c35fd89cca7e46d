"""Measures what a draft model costs beside its target; an untrained one costs as much as a trained one."""

import copy
from collections.abc import Sequence
from typing import Any

from slipstream.decoding.sampling import Sampling
from slipstream.drafters.model import ModelDrafter
from slipstream.engine.engine import Engine
from slipstream.execution.passes import Mode
from slipstream.measure.replay import request_for
from slipstream.models.loading.load import load_scorer
from slipstream.plan.measure import PlanTask, sweep
from slipstream.training.distill import DraftCosts
from slipstream.training.material import target_of

NEW_TOKENS = 24  # the number of tokens generated behind each text while costs are measured, or more for large gammas


def measure_costs(engine: Engine, student: Any, texts: Sequence[tuple[int, ...]], gamma: int, mode: Mode) -> DraftCosts:
    """Measure the costs of a model as a draft for an engine's target.

    It drafts up to `gamma` tokens a round behind texts (token ids), one at a time, run in `mode`.
    """
    target = target_of(engine)
    scorer = load_scorer(copy.deepcopy(student).eval().to(target.model.dtype), mode=mode)
    task = PlanTask(tuple(request_for(text, Sampling(), max(NEW_TOKENS, 2 * gamma + 2)) for text in texts), 1)
    plain, [record] = sweep(engine.decoder, [ModelDrafter(scorer, target.vocab)], task, gamma, lambda what: None)
    costs = record.costs(plain)
    verify = [1.0, *((costs.round(n) - costs.draft(n)) / costs.step for n in range(1, gamma + 1))]
    return DraftCosts(costs.draft(gamma) / gamma / costs.step, tuple(max(1.0, cost) for cost in _rising(verify)))


def _rising(measured: Sequence[float]) -> list[float]:
    """Return the non-decreasing values nearest to measured ones, by pooling adjacent violators.
    Verifying more tokens never costs less, so this keeps a gamma from looking cheap by chance."""
    pools: list[tuple[float, int]] = []
    for value in measured:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (first, many), (second, more) = pools[-2:]
            pools[-2:] = [((first * many + second * more) / (many + more), many + more)]
    return [value for value, count in pools for _ in range(count)]
