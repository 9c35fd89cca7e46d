"""benchmarks/kernel.py measures layers as the package makes them."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.kernels.cpu import kernel_missing

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "kernel.py"


@pytest.mark.skipif(kernel_missing() is not None, reason="the kernels cannot be built here")
def test_every_part_gives_figures() -> None:
    spec = spec_from_file_location("kernel_benchmark", SCRIPT)
    assert spec and spec.loader
    kernel: Any = sys.modules.setdefault(spec.name, module_from_spec(spec))
    spec.loader.exec_module(kernel)
    shapes = [(64, 96), (32, 64)]
    with torch.inference_mode():
        rows = kernel.quantized(shapes, repetitions=1)
        seconds = (*kernel.products(shapes, 2, 1), *kernel.attentions(4, 2, 3, 20, 32, 1))
    assert [set(row["times"]) for row in rows] == [{"bfloat16", "int8", "int4"}] * len(rows)
    assert all(each["seconds"] > 0 and each["bytes"] for row in rows for each in row["times"].values())
    assert len(seconds) == 4 and all(each > 0 for each in seconds)
