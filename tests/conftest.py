"""One thread, one hypothesis profile: the same run everywhere."""

import gc
import os
import signal

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["SLIPSTREAM_CODES"] = "off"  # and those of calibrated rounding see codes chosen

from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings

# Derandomized: the examples depend on the test, and on the modules that are imported beside it, whose constants are
# tried; no deadline: machines differ.
settings.register_profile("house", derandomize=True, deadline=None, max_examples=40, database=None)
settings.load_profile("house")
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets what it starts in the background ignore it


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


LOADED: dict[Any, Any] = {}


@pytest.fixture(autouse=True)
def quick_loads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where loading is not tested, scorers of the embedded pair have the weights of the first one and what was recorded
    of its passes. Nothing else is shared: each has a model, rows and programs of its own."""
    from slipstream.execution.passes import EAGER
    from slipstream.kernels.cpu import kernel_missing
    from slipstream.kernels.packing import twin_of
    from slipstream.models.causal import CausalScorer
    from slipstream.models.loading.faults import usable_device
    from slipstream.models.loading.load import load_scorer
    from slipstream.models.loading.pairings import EMBEDDED

    def quickly(source: Any, dtype: Any = "auto", device: Any = None, mode: Any = EAGER, *more: Any, **how: Any) -> Any:
        usual = (replace(mode, ahead=None, progress=None), how, more or (None,)) == (EAGER, {}, (None,))
        if not (usual and usable_device(device).type == "cpu" and getattr(source, "parent", None) == EMBEDDED):
            return load_scorer(source, dtype, device, mode, *more, **how)
        first = LOADED.get((source, dtype)) or LOADED.setdefault((source, dtype), load_scorer(source, dtype))
        model = twin_of(first.model)
        made = CausalScorer(model, first.name, replace(first.execution, model=model, _programs={}))
        if mode.ahead is not None:
            made.make_draft_graphs(mode.ahead, mode.progress)
        return made

    if {"kernels", "execution", "models", "test_engine.py"}.isdisjoint(request.path.parts) and not kernel_missing():
        for place in ("slipstream.engine.load", "slipstream.drafters.kinds"):
            monkeypatch.setattr(f"{place}.load_scorer", quickly)
