"""Models whose weights are divided among ranks, by transformers' plans for tensor parallelism."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from slipstream.core.values import first_sentence
from slipstream.models.families import allowed_gap
from slipstream.models.loading.load import load_model
from slipstream.models.loading.origin import Origin
from slipstream.models.loading.twins import logits_gap
from slipstream.models.tiny import tiny_config, tiny_model

Plan = str | dict[str, str]
"""The `tp_plan` of transformers: "auto" is the model's own, a dictionary changes some of its rules."""


def load_sharded(
    source: str | Path, dtype: str | torch.dtype, plan: Plan, size: int, **options: Any
) -> PreTrainedModel:
    """Load this rank's part of a model, by hub name or folder; all `size` ranks call this together.

    With accelerate every rank reads its own part of the checkpoint; without, or with an adapter, each reads all of it
    on the CPU and keeps its part. Raises ValueError in one sentence for a model that cannot be divided.
    """
    try:
        if find_spec("accelerate") and not Origin.of(source, adapter=options.get("adapter")).adapter:
            model = load_model(source, dtype, distributed_config=_settings(plan), **options)
        else:
            model = shard(load_model(source, dtype, "cpu", **options), plan)
    except ValueError as error:
        if "has no `tp_plan`" not in str(error):
            raise
        raise ValueError(
            f"{source} has no plan for tensor parallelism in transformers, as most encoder-decoders and GPT-2 have "
            "none: spread its layers by device_map instead, or give a plan of your own as tp_plan={...}."
        ) from error
    # A number of key-value heads that is no multiple of the ranks would cut heads apart.
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None)
    if isinstance(heads, int) and heads % size:
        fitting = [str(count) for count in range(2, heads + 1) if not heads % count]
        several = f"start {' or '.join(fitting)} processes" if fitting else "spread its layers by device_map instead"
        raise ValueError(
            f"{model.config.name_or_path} has {heads} heads of keys and values, which {size} ranks cannot divide: "
            f"{several}."
        )
    _try_plan(model, plan, size)
    return model


@torch.no_grad()
def shard(model: PreTrainedModel, plan: Plan) -> PreTrainedModel:
    """Return this rank's part, on its own device, of a model that every rank has loaded whole."""
    settings, _, mesh = type(model).prepare_distribute_model(_settings(plan))
    # Give tied weights a parameter each, since a plan names every layer's own.
    for name in getattr(model, "all_tied_weights_keys", None) or {}:
        owner, _, own = name.rpartition(".")
        layer = model.get_submodule(owner)
        weight = getattr(layer, own)
        setattr(layer, own, nn.Parameter(weight.detach(), requires_grad=weight.requires_grad))
    model = type(model).maybe_distribute_model(model, settings, mesh)
    model.tie_weights()
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    return model.to(device)


def _settings(plan: Plan) -> Any:
    """Return a tensor-parallel plan in the form that `from_pretrained` takes. Raises ValueError if impossible."""
    try:
        from transformers.distributed import DistributedConfig
    except ImportError as error:
        raise ValueError("tensor parallelism needs transformers 5.20 or newer: pip install -U transformers.") from error
    try:
        return DistributedConfig(tp_plan=plan)
    except (TypeError, ValueError) as error:
        raise ValueError(f"tp_plan={plan!r} is not possible: {first_sentence(error)}") from error


def _try_plan(model: PreTrainedModel, plan: Plan, size: int) -> None:
    """Divide a tiny random model of the same class, and compare its logits with those of the whole model.

    Nothing else would show that a plan computes something else. Raises ValueError if the logits differ. A class without
    a tiny model that runs is not tried.
    """
    heads = {} if size == 2 else dict.fromkeys(("num_attention_heads", "num_key_value_heads"), max(4, size))
    with torch.random.fork_rng():
        try:
            whole, other = (tiny_model(type(model), tiny_config(type(model.config), **heads)) for _ in range(2))
            difference = logits_gap(whole, shard(other, plan))
        except Exception:  # sizes that do not fit each other, in a way specific to the family
            return
    if not difference <= allowed_gap(torch.float32):
        raise ValueError(
            f"{model.config.name_or_path} ({type(model).__name__}) gives other logits when its weights are divided by "
            f"transformers' plan (difference {difference:.2g} standard deviations): spread its layers by device_map "
            "instead, or give a plan of your own as tp_plan={...}."
        )
