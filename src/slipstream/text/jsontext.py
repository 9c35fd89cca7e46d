"""Conversion to valid JSON, used for every JSON text that Slipstream writes, and from it, line by line."""

import json
import math
from typing import Any


def json_text(value: Any, **how: Any) -> str:
    """Convert a value to JSON, with the settings of `json.dumps`; NaN and infinities, which JSON lacks, become null."""
    try:
        return json.dumps(value, allow_nan=False, **how)
    except ValueError:  # a number is not finite, which is rare: looking for it first would take most of the time
        return json.dumps(_finite(value), allow_nan=False, **how)


def read_json(line: bytes) -> Any:
    """Read JSON in UTF-8. Raises ValueError, in one sentence, for what is none, also for NaN and infinities."""

    def refuse(name: str) -> None:
        raise ValueError(f"this is not JSON ({name} is no number there).")

    try:
        return json.loads(line.decode(), parse_constant=refuse)
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start + 1} is not UTF-8.") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"this is not JSON ({error.msg}, column {error.colno}).") from error
    except RecursionError as error:
        raise ValueError("this JSON is nested too deeply.") from error


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
