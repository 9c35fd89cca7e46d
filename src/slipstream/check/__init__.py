"""The exactness certificate: a verdict on whether the user's models, rule and settings give the target's law.

`check` decodes speculatively and compares the result with plain decoding by the same target: greedy tokens one by one,
sampled ones by the exact law of the rule and by chi-squared. The same tests have to notice broken rules.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from importlib.metadata import distributions
from time import perf_counter
from typing import Any

import torch

from slipstream.check import questions as parts
from slipstream.check.questions import BATCH, Case, CheckSettings, Listener
from slipstream.check.report import CheckHalf, CheckReport, Control, Difference, Finding
from slipstream.core.protocols import Shape
from slipstream.decoding.controllers import Fixed
from slipstream.decoding.decoder import NoDraft
from slipstream.decoding.sampling import Sampling
from slipstream.engine.engine import Engine
from slipstream.engine.requests import Prompt
from slipstream.kernels.packing import precision_of
from slipstream.models.loading.twins import encoder_dtype

__all__ = ["CheckHalf", "CheckReport", "CheckSettings", "Control", "Difference", "Finding", "check"]


@torch.inference_mode()
def check(
    engine: Engine, prompts: Sequence[Prompt], *, on_progress: Listener | None = None, **options: Any
) -> CheckReport:
    """Check whether the engine's output follows its target's law -> CheckReport.

    Options are the fields of `CheckSettings` and of `Sampling`. Without a `temperature` greedy decoding and temperature
    1 are checked, otherwise that temperature alone. `on_progress(what, done, of)` is called with the progress.

    Raises ValueError if there is no draft, no prompt or a setting is impossible, TypeError for unknown options.
    """
    start = perf_counter()
    ours = {field.name for field in fields(CheckSettings)}
    known = sorted(ours | {field.name for field in fields(Sampling) if field.init} - {"eos"})
    if unknown := sorted(options.keys() - set(known)):
        raise TypeError(f"unknown option {', '.join(unknown)}; known are {', '.join(known)}.")
    settings = CheckSettings(**{name: value for name, value in options.items() if name in ours})
    warpers = {name: value for name, value in options.items() if name not in ours}
    given = warpers.pop("temperature", None)
    temperatures = (0.0, 1.0) if given is None else (float(given),)
    case = _case(engine, prompts, settings, on_progress or (lambda *_: None))
    halves = {}
    for temperature in temperatures:
        sampler = Sampling(temperature=temperature, eos=engine.eos, **warpers)
        half = parts.greedy if sampler.greedy else parts.sampling
        halves[half.__name__] = half(case, sampler)
    about = _environment(case, {**warpers, "temperature": " and ".join(f"{each:g}" for each in temperatures)})
    return CheckReport(halves.get("greedy"), halves.get("sampling"), about, perf_counter() - start)


def _case(engine: Engine, prompts: Sequence[Prompt], settings: CheckSettings, listener: Listener) -> Case:
    if isinstance(engine.decoder.drafter, NoDraft):
        raise ValueError("there is no draft, so there is nothing to check: give a draft model.")
    texts = tuple(dict.fromkeys(engine.encode(prompt, whole=True) for prompt in prompts))
    if not texts:
        raise ValueError("there is no prompt: give at least one.")
    chosen = engine.choose(settings.verify)
    decoder = replace(engine.decoder, verifier=chosen.verify, rng=chosen.rng)
    if settings.gamma is not None:
        decoder = replace(decoder, controller=Fixed(settings.gamma))
    eos = frozenset[int]() if settings.ignore_eos else engine.eos
    batch = max(BATCH, decoder.batch_size)
    case = Case(decoder, chosen, texts, settings, eos, engine.decode, listener, batch, engine.frame)
    if not engine.exact_shape:
        return case
    # All passes run in one shape, as the engine's do: then no difference can be rounding.
    longest = max(map(len, texts)) + max(settings.max_new_tokens, case.gamma + 2) + case.gamma + 1
    decoder.target.fix_shape(Shape(decoder.batch_size, case.gamma + 1, 1 << longest.bit_length()))
    return replace(case, settings=replace(settings, gap=settings.gap or 0.0), batch=decoder.batch_size)


def _environment(case: Case, sampling: dict[str, Any]) -> dict[str, Any]:
    target, drafter = case.decoder.target, case.decoder.drafter
    draft = getattr(drafter, "scorer", None)
    models = {"target": getattr(target, "model", None), "draft": getattr(draft, "model", None)}
    quantized = {role: precision_of(model) for role, model in models.items() if model is not None}
    dtypes = {"dtype": getattr(models["target"], "dtype", None)}
    if dtypes["dtype"]:
        dtypes["encoder_dtype"] = encoder_dtype(models["target"])
    return {
        "target": target.name,
        "draft": getattr(draft, "name", type(drafter).__name__),
        **{f"{role}_weights": str(precision) for role, precision in quantized.items() if precision},
        **({"kv_dtype": held} if (held := getattr(target, "kv_dtype", None)) else {}),
        "rule": case.rule.name,
        "gamma": case.gamma,
        **sampling,
        "prompts": len(case.prompts),
        "seed": case.settings.seed,
        **{name: str(value).removeprefix("torch.") for name, value in dtypes.items() if value},
        "device": str(target.device),
        "torch": torch.__version__,
        **{name: package.version for name in ("slipstream", "transformers") for package in distributions(name=name)},
    }
