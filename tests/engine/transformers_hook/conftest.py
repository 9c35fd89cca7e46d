"""Tests of the hook draw from the global generator."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """The same numbers in any order of tests."""
    torch.manual_seed(0)
    yield
