"""Checks of numbers and switches that users give: the value, or an error that says what is allowed."""

import math
import re
from numbers import Integral, Real
from typing import Any


class OptionError(ValueError):
    """A value that one option of a call cannot have; `option` is its name, by default the message's first word."""

    def __init__(self, message: str, option: str = "") -> None:
        super().__init__(message)
        self.option = option or re.split(r"\W", message, maxsplit=1)[0]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.option)


class PromptTooLong(ValueError):
    """A prompt that the model, or the memory for its caches, cannot hold."""


def is_whole(value: Any) -> bool:
    """Return whether a value is a whole number; True and False are not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_real(value: Any) -> bool:
    """Return whether a value is a number that a float can hold, infinities and NaN included; True and False are not."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


def is_finite(value: Any) -> bool:
    """Return whether a value is a number that a float can hold, neither infinite nor NaN."""
    return is_real(value) and math.isfinite(value)


def true_or_false(name: str, value: Any) -> bool:
    """Return the value as a bool. Raises ValueError if it is neither True nor False, of Python or numpy."""
    if type(value).__name__ not in {"bool", "bool_"}:  # numpy's type is recognised by its name, without importing numpy
        raise OptionError(f"{name}={value!r} is not possible: it is True or False.")
    return bool(value)


def whole_number(name: str, value: Any, least: int, most: float = math.inf) -> int:
    """Return the value as an int. Raises ValueError if it is not a whole number, below `least`, or above `most`."""
    if not is_whole(value):
        raise OptionError(f"{name}={value!r} is not possible: it must be a whole number, at least {least}.")
    if not least <= value <= most:
        bound = f"at least {least}" if value < least else f"at most {most}"
        raise OptionError(f"{name}={value} is not possible: it must be {bound}.")
    return int(value)


def check_least(settings: object, **least: float) -> None:
    """Raises ValueError if a field of some settings, or one of several values in it, is below its least value, infinite
    or NaN, or if it holds none. None, for what is not given, is not checked."""
    for name, bound in least.items():
        value = getattr(settings, name)
        several = value if isinstance(value, tuple) else (value,)
        if not several or not all(one is None or bound <= one < math.inf for one in several):
            raise ValueError(f"{name}={value} is not possible: it must be {bound} or more.")


def switch(text: str) -> bool:
    """Parse "true" or "false", in any usual spelling (yes, on, 1, ...). Raises ValueError for anything else."""
    words = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
    if text.lower() not in words:
        raise ValueError(text)
    return words[text.lower()]


def first_sentence(error: Exception) -> str:
    """Return the first line of an error's message, and the next if it only introduces that; its type without one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[: 1 + lines[0].endswith(":")])
