"""Our kernel for linear layers: right products, the same bits for any number of rows, on any processor, or a reason."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from slipstream import kernel
from slipstream.kernel import fits_panels, into_panels, kernel_missing, panel_linear
from slipstream.packing import BlockedLinear, PackedLinear, PanelLinear, can_pack, packed
from toys import FAMILIES, tiny

built = pytest.mark.skipif(kernel_missing() is not None, reason=f"no kernel here: {kernel_missing()}")
SHAPES = [(1, 2), (7, 10), (32, 64), (33, 64), (1000, 288)]
TYPES = [torch.float32, torch.bfloat16]


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture
def forgotten() -> Iterator[None]:
    """Nobody knows yet whether there is a kernel; afterwards nobody remembers what was found."""
    kernel_missing.cache_clear()
    yield
    kernel_missing.cache_clear()


# ---- products ---------------------------------------------------------------------------------------------------


@built
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("features", "inputs"), SHAPES)
@pytest.mark.parametrize("biased", [False, True])
def test_products_are_those_of_float64(dtype: torch.dtype, features: int, inputs: int, biased: bool) -> None:
    """Bias added before the one rounding; rows that fill a tile, and more of them."""
    weight, bias = random(features, inputs, dtype=dtype), random(features, dtype=dtype, seed=1) if biased else None
    for rows in (1, 2, 3, 6, 12, 13, 25, 100):
        given = random(2, rows, inputs, dtype=dtype, seed=rows)
        exact = functional.linear(
            given.double(), weight.double(), bias.double() if biased and bias is not None else None
        )
        found = panel_linear(given, into_panels(weight), bias, features)
        assert found.shape == exact.shape and found.dtype == dtype
        torch.testing.assert_close(found.double(), exact, rtol=2**-8 if dtype == torch.bfloat16 else 1e-5, atol=1e-4)


@built
@pytest.mark.parametrize("dtype", TYPES)
def test_a_row_has_the_same_bits_whatever_stands_beside_it(dtype: torch.dtype) -> None:
    """What oneDNN does not promise: a token's logits do not depend on how many are scored together."""
    weight, given = into_panels(random(100, 512, dtype=dtype)), random(30, 512, dtype=dtype, seed=1)
    alone = torch.cat([panel_linear(row[None], weight, None, 100) for row in given])
    for rows in (2, 5, 6, 13, 30):
        assert torch.equal(panel_linear(given[:rows], weight, None, 100), alone[:rows])


@built
def test_rounding_to_bfloat16_is_torchs() -> None:
    """Ties, overflow, infinities and what is not a number, through a weight of one and a bias that makes the ties."""
    ones = torch.eye(32, dtype=torch.bfloat16)
    given = random(64, 32, dtype=torch.bfloat16)
    given[0, :4] = torch.tensor([float("inf"), -float("inf"), 3.3e38, 1e-40])
    given[1, 0] = float("nan")
    bias = random(32, dtype=torch.bfloat16, seed=1)
    found = panel_linear(given[2:], into_panels(ones), bias, 32)
    assert torch.equal(found, (given[2:].float() + bias.float()).to(torch.bfloat16))
    unusual = panel_linear(given[:2], into_panels(ones), None, 32)
    assert unusual[1].isnan().all()  # nothing times NaN is nothing
    assert unusual[0, 0].isnan() and not unusual[0, :2].isfinite().any()


@built
def test_no_rows_and_strided_inputs_are_fine() -> None:
    weight = random(40, 8, dtype=torch.float32)
    assert panel_linear(torch.empty(0, 3, 8), into_panels(weight), None, 40).shape == (0, 3, 40)
    given = random(8, 5, dtype=torch.float32).T
    torch.testing.assert_close(panel_linear(given, into_panels(weight), None, 40), given @ weight.T)


@built
def test_what_does_not_fit_is_refused() -> None:
    weight = into_panels(random(40, 8, dtype=torch.float32))
    for given, features, said in (
        (torch.zeros(1, 6), 40, "inputs of 6 for a weight of 8"),
        (torch.zeros(1, 8).bfloat16(), 40, "one type"),
        (torch.zeros(1, 8), 65, "65 features for a weight of 2 panels"),
    ):
        with pytest.raises(RuntimeError, match=said):
            panel_linear(given, weight, None, features)
    odd = torch.zeros(4, 3, dtype=torch.bfloat16)
    assert not fits_panels(odd) and not fits_panels(torch.zeros(4, 4).double())
    with pytest.raises(ValueError, match=r"4 x 3 in torch\.bfloat16 has no packed form"):
        into_panels(odd)


@built
@pytest.mark.parametrize("lacking", ["-mno-avx512bf16", "-mno-avx512f"])
@pytest.mark.skipif(
    not Path("/proc/cpuinfo").exists() or "avx512" not in Path("/proc/cpuinfo").read_text(), reason="x86"
)
def test_older_processors_get_right_products_too(lacking: str, tmp_path: Path) -> None:
    """The kernel's own check, in a process whose compiler may not use the newest instructions."""
    program = (
        "from slipstream import kernel\n"
        f"kernel.OPTIONS = (*kernel.OPTIONS, {lacking!r})\n"
        "assert kernel.kernel_missing() is None\n"
        "import torch\n"
        "from slipstream.kernel import into_panels, panel_linear\n"
        "for dtype in (torch.float32, torch.bfloat16):\n"
        "    given, weight = torch.randn(14, 96).to(dtype), torch.randn(70, 96).to(dtype)\n"
        "    found, exact = panel_linear(given, into_panels(weight), None, 70), given.double() @ weight.double().T\n"
        "    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-4)\n"
    )
    environment = os.environ | {
        "TORCH_EXTENSIONS_DIR": str(tmp_path),
        "PYTHONPATH": str(Path(kernel.__file__).parents[1]),
    }
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ---- where there is none ----------------------------------------------------------------------------------------


def test_without_a_compiler_onednn_multiplies_and_nobody_is_warned(
    forgotten: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert kernel_missing() == "there is no C++ compiler (CXX, c++, g++, clang++)"
    model = tiny(FAMILIES["llama"])
    if can_pack(model):
        parts = {type(part) for part in packed(model).modules() if isinstance(part, PackedLinear)}
        assert parts == {BlockedLinear}


def test_a_compiler_that_fails_gives_one_warning_with_its_words(
    forgotten: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho 'x.cpp:1: error: I am out of ideas' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    with pytest.warns(RuntimeWarning, match="slower than they could, their kernel: .*out of ideas") as caught:
        assert kernel_missing() == kernel_missing()
    assert len(caught) == 1
    assert [path.name for path in (tmp_path / "slipstream").iterdir()] == []  # nothing half done stays


@built
def test_a_kernel_that_multiplies_wrongly_is_not_used(forgotten: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "into_panels", lambda weight: into_panels(weight.flip(0)))
    with pytest.warns(RuntimeWarning, match=r"gives wrong products on this processor"):
        assert kernel_missing() is not None


@built
def test_a_layer_that_does_not_fit_stays_as_it_is_or_goes_to_onednn() -> None:
    """An odd number of inputs in bfloat16."""
    model = tiny(FAMILIES["llama"], dtype=torch.bfloat16)
    model.model.layers[0].mlp.down_proj = torch.nn.Linear(3, 4, dtype=torch.bfloat16)
    parts = packed(model).model.layers[0].mlp
    assert type(parts.gate_proj) is PanelLinear
    assert type(parts.down_proj) in {BlockedLinear, torch.nn.Linear}
