"""Knows what the installed transformers, and each model, call the cache that passes take and return.

Transformers 5.24 renamed the caches of all its models; models with code of their own keep their names.
"""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any

from transformers.modeling_outputs import BaseModelOutputWithPast

STATE_NAMES = ("cache", "past_key_values", "cache_params", "state", "mems")
"""The names under which models take and return what is passed from one pass to the next, the newest first."""


def state_name(names: Iterable[str], default: str = STATE_NAMES[0]) -> str:
    """Return which of the `names` of arguments or results is that of the state; the default if none is."""
    given = set(names)
    return next((name for name in STATE_NAMES if name in given), default)


CACHE = state_name(field.name for field in fields(BaseModelOutputWithPast))
"""What transformers' own layers and `generate` call the cache."""


def with_cache(model: Any) -> Callable[..., Any]:
    """Return a function that calls a model, and hands on its argument `cache` under the model's name for it."""
    name = state_name(inspect.signature(model.forward).parameters, CACHE)

    def call(cache: Any, **inputs: Any) -> Any:
        return model(**inputs, **{name: cache})

    return call


def state_in(out: Any) -> Any:
    """Return the state in an output of a model; None if it has none."""
    return vars(out).get(state_name(vars(out)))
