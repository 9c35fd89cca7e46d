"""One thread, one hypothesis profile: the same run everywhere."""

import gc
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["SLIPSTREAM_CODES"] = "off"  # and those of calibrated rounding see codes chosen

from collections import defaultdict
from typing import Any

import pytest
from hypothesis import settings

# Derandomized: the examples depend on the test, and on the modules that are imported beside it, whose constants are
# tried; no deadline: machines differ.
settings.register_profile("house", derandomize=True, deadline=None, max_examples=40, database=None)
settings.load_profile("house")


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    """Look for no garbage until all is imported, which stays."""
    gc.disable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow the combinations of parameters that bring no new value of any parameter, and keep files together.

    The fast tests try every value of every parameter at least once, the slow ones all combinations. One process runs a
    whole file, so that what its tests share is made once, and all tests of the one server.
    """
    tried: defaultdict[str, set[tuple[str, int]]] = defaultdict(set)
    for item in items:
        served = {"server", "replicas", "conforming"} & set(getattr(item, "fixturenames", ()))
        item.add_marker(pytest.mark.xdist_group("server" if served else item.nodeid.split("::")[0]))
        case = getattr(item, "callspec", None)
        if case is None or item.get_closest_marker("slow"):
            continue
        seen, values = tried[item.nodeid.split("[")[0]], {(name, id(value)) for name, value in case.params.items()}
        if values <= seen:
            item.add_marker(pytest.mark.slow)
        seen |= values


def pytest_collection_finish() -> None:
    """Leave all that was imported out of collections of garbage, each of which would look at it for half a second."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def begin_anew() -> None:
    """Leave what earlier modules imported and made out of collections of garbage, and their threads to them."""
    import torch

    gc.freeze()
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def engine() -> Any:
    """One engine of the embedded pair for all tests that leave it as it is."""
    import slipstream

    return slipstream.load()
