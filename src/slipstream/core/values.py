"""Numbers and switches that users give: what they are, or one sentence about what is allowed."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any


def is_whole(value: Any) -> bool:
    """Whether it is a whole number; True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_real(value: Any) -> bool:
    """Whether it is a number that a float can hold, infinities and NaN included; True and False are none."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


def is_finite(value: Any) -> bool:
    """Whether it is a number that a float can hold, and neither infinite nor NaN."""
    return is_real(value) and math.isfinite(value)


def true_or_false(name: str, value: Any) -> bool:
    """The value as a bool. Raises ValueError if it is neither True nor False, of Python or numpy."""
    if type(value).__name__ not in {"bool", "bool_"}:  # numpy's own are known by name, without importing it
        raise ValueError(f"{name}={value!r} is not possible: it is True or False.")
    return bool(value)


def whole_number(name: str, value: Any, least: int) -> int:
    """The value as an int. Raises ValueError if it is no whole number, or below `least`."""
    if not is_whole(value):
        raise ValueError(f"{name}={value!r} is not possible: it must be a whole number, at least {least}.")
    if value < least:
        raise ValueError(f"{name}={value} is not possible: it must be at least {least}.")
    return int(value)
