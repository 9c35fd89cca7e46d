"""Slipstream for `benchmarks/race.py`: an engine for each draft, all of the same target."""

from functools import reduce
from operator import add
from typing import Any

import worker

import slipstream
from slipstream.core.stats import Stats
from slipstream.decoding.sampling import Sampling
from slipstream.engine.engine import Engine
from slipstream.kernels import library
from slipstream.plan.planner import PlanSettings, make

LOAD = slipstream.load  # which imports what loading needs

ENGINES: dict[str, Engine] = {}
HOW: dict[str, Any] = {}


def load(asked: worker.Asked) -> worker.Asked:
    """Load the target with its first draft; the others follow when they are asked for."""
    HOW.update(asked)
    engine(asked["ways"][0])
    return {"about": f"slipstream {slipstream.__version__}, kernels of the level {library.level().name}"}


def engine(way: str) -> Engine:
    """Return the engine for a way of decoding: "draft" is the race's draft model, other names are of drafts."""
    name = way.partition("@")[0]
    if name not in ENGINES:
        draft = {"plain": "plain", "draft": HOW["draft"]}.get(name, name)
        options = {"threads": HOW["threads"], "batch_size": HOW["rows"], "gamma": 5}
        ENGINES[name] = LOAD(HOW["model"], draft, **options, **HOW.get("options", {}))
    return ENGINES[name]


def run(asked: worker.Asked) -> worker.Asked:
    """Continue the prompts, `batch` at a time; or plan for them."""
    if asked["do"] == "plan":
        return plan(asked)
    gamma = asked["way"].partition("@")[2]
    settings = {"gamma": int(gamma) if gamma.isdigit() else gamma} if gamma else {"plain": True}
    settings |= {"max_new_tokens": asked["count"], "temperature": asked["temperature"], "seed": asked["seed"]}
    batch, done = asked["batch"], []
    for start in range(0, len(asked["prompts"]), batch):
        texts = asked["prompts"][start : start + batch]
        done += engine(asked["way"]).generate(texts, ignore_eos=True, **settings)
    stats = reduce(add, (each.stats for each in done), Stats())
    figures = {"alpha": stats.alpha, "length": stats.mean_acceptance_length, "seconds": stats.seconds}
    return {"tokens": [list(each.tokens) for each in done], **figures}


def plan(asked: worker.Asked) -> worker.Asked:
    """Return the speed-up over plain decoding that a plan predicts for a way, the target's prefill left out."""
    made, sampling = engine(asked["way"]), Sampling(temperature=asked["temperature"])
    gammas, rows = (int(asked["way"].partition("@")[2]),), (asked["batch"],)
    settings = PlanSettings(
        gammas=gammas, batches=rows, max_new_tokens=asked["count"], repetitions=1, sampling=sampling
    )
    report = make(made, {"draft": made.decoder.drafter}, asked["prompts"], settings)
    best = report.outlooks[asked["batch"]]["draft"].best
    return {"predicted": best.factor, "low": best.low, "high": best.high, "verified": report.verifications[0].factor}


if __name__ == "__main__":
    worker.serve(load, run)
