"""One thread, one hypothesis profile: the same run everywhere."""

from __future__ import annotations

import gc
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["SLIPSTREAM_GRAPHS"] = "off"  # tests of graphs see them made

import torch
from hypothesis import settings

torch.set_num_threads(1)

# Derandomized: the examples depend on the test alone, so a run can be repeated; no deadline: machines differ.
settings.register_profile("house", derandomize=True, deadline=None, max_examples=60, database=None)
settings.load_profile("house")


def pytest_collection_finish() -> None:
    """Leave all that was imported out of later collections of garbage, each of which would look at it for half a
    second."""
    gc.collect()
    gc.freeze()
