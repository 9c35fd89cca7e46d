"""benchmarks/kernel.py measures layers as the package makes them."""

import pytest
import torch

from scripts import script
from slipstream.kernels.packing import has_blocked
from toys.kernels import needs_kernel


@needs_kernel
@pytest.mark.parametrize("blocked", [True, False])
def test_every_part_gives_figures(blocked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on processors that have no layout of oneDNN for bfloat16."""
    kernel = script("benchmarks/kernel.py")
    monkeypatch.setattr(kernel, "has_blocked", lambda dtype: blocked and has_blocked(dtype))
    shapes = [(64, 96), (32, 64)]
    with torch.inference_mode():
        rows = kernel.quantized(shapes, repetitions=1)
        ours, onednn = kernel.products(shapes, 2, 1)
        seconds = (ours, *kernel.attentions(4, 2, 3, 20, 32, 1))
    assert [set(row["times"]) for row in rows] == [{"bfloat16", "int8", "int4"}] * len(rows)
    assert all(each["seconds"] > 0 and each["bytes"] for row in rows for each in row["times"].values())
    assert len(seconds) == 3 and all(each > 0 for each in seconds)
    assert (onednn is not None) == (blocked and has_blocked(torch.bfloat16))
    product = {"model": "toy", "rows": 2, "ours": ours, "onednn": onednn}
    found = {"products": [product], "quantized": [], "attentions": []}
    assert ("| - |" in kernel.table(found)) == (onednn is None)
