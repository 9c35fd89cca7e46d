"""Chooses the size of a new draft, by the measured costs of untrained models and the acceptance predicted from sizes.

An untrained draft costs as much time as a trained one. Its acceptance has to be estimated: Table 3 of the paper
(arXiv 2211.17192) has drafts of 0.07 % to 7 % of their targets' parameters, whose 1 - alpha falls as a power of that
share. The exponent below is the mean over its targets and tasks, the level that of drafts of a fourteenth of their
target. So the order of the sizes is more reliable than the speed-ups: easier or harder texts change all of them.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slipstream.decoding.sampling import Sampling
from slipstream.drafters.model import ModelDrafter
from slipstream.engine.engine import Engine
from slipstream.execution.passes import Mode
from slipstream.files import atomic_write
from slipstream.measure.environment import parameters
from slipstream.models.loading.load import load_scorer
from slipstream.plan.measure import PlanTask, sweep
from slipstream.text.jsontext import json_text
from slipstream.training.distill import DraftCosts
from slipstream.training.material import target_of

SHARES = (0.02, 0.05, 0.1, 0.2, 0.35)  # the shares of the target's parameters that are tried if no size is given
EXPONENT = 0.105
SHARE = 0.07
REFUSED = {0.0: 0.22, 1.0: 0.30}
"""The value of 1 - alpha of a draft with the SHARE of its target's parameters, by temperature."""


def promised_alpha(share: float, temperature: float) -> float:
    """Return the predicted alpha of a draft with a share of its target's parameters, at temperature 0 or 1."""
    return max(0.0, 1.0 - REFUSED[temperature] * (share / SHARE) ** -EXPONENT)


@dataclass(frozen=True)
class Candidate:
    """A size that was measured: its `share` of the target's parameters, its costs, and its predicted speed-up.
    `alpha`, `gammas` and `gains` (speed-ups over plain decoding) are predictions at temperature 0 and 1."""

    name: str
    share: float
    costs: DraftCosts
    alpha: tuple[float, ...]
    gammas: tuple[int, ...]
    gains: tuple[float, ...]

    @property
    def gain(self) -> float:
        return sum(self.gains) / len(self.gains)

    @staticmethod
    def of(name: str, share: float, costs: DraftCosts) -> Candidate:
        """Predict alpha, gamma and speed-up of a size from its costs (Theorem 3.8)."""
        alpha = tuple(promised_alpha(share, temperature) for temperature in REFUSED)
        most = len(costs.verify) - 1
        pairs = [costs.gain([one**position for position in range(1, most + 1)]) for one in alpha]
        gammas, gains = zip(*pairs, strict=True)
        return Candidate(name, share, costs, alpha, gammas, gains)


def best(candidates: Sequence[Candidate]) -> Candidate:
    return max(candidates, key=lambda one: (one.gain, -one.share))


def measure_candidates(
    engine: Engine,
    models: Mapping[str, Any],
    texts: Sequence[tuple[int, ...]],
    gamma: int,
    mode: Mode,
) -> list[Candidate]:
    """Measure the costs of models, given by name, as drafts for an engine's target -> a candidate for each.

    They draft up to `gamma` tokens a round behind texts (token ids), one at a time, run in `mode`, and need not be
    trained.
    """
    target, candidates = target_of(engine), list[Candidate]()
    scorers = [load_scorer(copy.deepcopy(each).eval().to(target.model.dtype), mode=mode) for each in models.values()]
    drafters = [ModelDrafter(scorer, target.vocab) for scorer in scorers]
    task = PlanTask(tuple(texts), 1, max(NEW_TOKENS, 2 * gamma + 2), Sampling())
    plain, records = sweep(engine.decoder, drafters, task, gamma, lambda what: None)
    for (name, model), record in zip(models.items(), records, strict=True):
        costs = record.costs(plain)
        verify = [1.0, *((costs.round(n) - costs.draft(n)) / costs.step for n in range(1, gamma + 1))]
        rising = tuple(max(1.0, cost) for cost in _rising(verify))
        share = parameters(model) / parameters(target.model)
        candidates.append(Candidate.of(name, share, DraftCosts(costs.draft(gamma) / gamma / costs.step, rising)))
    return candidates


NEW_TOKENS = 24  # the number of tokens generated behind each text while costs are measured, or more for large gammas


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


CHOICE = "size.json"  # the file in a training's folder that stores the chosen size, so that a resumed training keeps it


def save_choice(folder: Path, candidates: Sequence[Candidate], chosen: Candidate) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_write(folder / CHOICE) as part:
        record = {"chosen": chosen.name, "candidates": [asdict(one) for one in candidates]}
        part.write_text(json_text(record), encoding="utf-8")


def read_choice(folder: Path) -> tuple[list[Candidate], Candidate] | None:
    """Read the candidates and the chosen one; None if none is stored yet. Raises ValueError for a damaged file."""
    file = folder / CHOICE
    if not file.exists():
        return None
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        candidates = list[Candidate]()
        for each in record["candidates"]:
            costs = DraftCosts(each["costs"]["c"], tuple(each["costs"]["verify"]))
            candidates.append(Candidate.of(each["name"], each["share"], costs))
        return candidates, next(one for one in candidates if one.name == record["chosen"])
    except (ValueError, TypeError, LookupError, StopIteration) as error:
        raise ValueError(f"{file} is damaged ({error}): delete it, or give another folder.") from error
