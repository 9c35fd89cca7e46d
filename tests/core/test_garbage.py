"""The pause in the search for garbage ends as it began."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from slipstream.core.garbage import uncollected


@pytest.fixture(params=[True, False])
def collects(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether the process collects garbage by itself."""
    (gc.enable if request.param else gc.disable)()
    yield request.param
    gc.enable()


def test_nothing_is_collected_in_the_block_and_what_was_set_holds_behind_it(collects: bool) -> None:
    with pytest.raises(ValueError, match="in the block"), uncollected():
        assert not gc.isenabled()
        raise ValueError("in the block")
    assert gc.isenabled() is collects
