"""JSON that every reader takes."""

import json
import math

from hypothesis import given
from hypothesis import strategies as st

from slipstream.text.jsontext import json_text

SINGLES = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
VALUES = st.recursive(SINGLES, lambda inner: st.lists(inner) | st.tuples(inner) | st.dictionaries(st.text(), inner))


def refuse(name: str) -> None:
    raise AssertionError(f"bare {name}")


@given(VALUES)
def test_there_is_no_bare_nan_and_what_is_finite_is_as_usual(value: object) -> None:
    found = json.loads(json_text(value), parse_constant=refuse)
    usual = json.dumps(value)
    if "NaN" not in usual and "Infinity" not in usual:
        assert found == json.loads(usual)


def test_what_is_no_finite_number_is_null() -> None:
    assert json_text({"a": [math.nan, (math.inf, 1.5)], "b": -math.inf}) == '{"a": [null, [null, 1.5]], "b": null}'
    assert json_text({"\u00e4": 1}, ensure_ascii=False, indent=1) == '{\n "\u00e4": 1\n}'
