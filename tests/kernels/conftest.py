"""What several tests of kernels need."""

from collections.abc import Iterator

import pytest

from slipstream.kernels.cpu import kernel_missing


@pytest.fixture
def forgotten() -> Iterator[None]:
    """Nobody knows yet whether there is a kernel; afterwards nobody remembers what was found."""
    kernel_missing.cache_clear()
    yield
    kernel_missing.cache_clear()
