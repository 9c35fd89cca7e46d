"""Our kernel for linear layers: right products, the same bits for any number of rows, on any processor, or a reason."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from slipstream.kernels import cpu as kernel
from slipstream.kernels import library, packing
from slipstream.kernels.cpu import kernel_missing, panel_attention, panel_linear
from slipstream.kernels.packing import BlockedLinear, PackedLinear, PanelLinear, can_pack, packed
from slipstream.kernels.quantization import fits_panels, into_panels
from slipstream.models.causal import CausalScorer
from toys import FAMILIES, HF_VOCAB, tiny
from toys.kernels import needs_kernel, noise

SHAPES = [(1, 2), (7, 10), (32, 64), (33, 64), (1000, 288), (40, 1024)]
TYPES = [torch.float32, torch.bfloat16]


@pytest.fixture
def uncarried(forgotten: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nor does a wheel carry one."""
    monkeypatch.setattr(library, "CARRIED", tmp_path / "empty")


@needs_kernel
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("features", "inputs"), SHAPES)
@pytest.mark.parametrize("biased", [False, True])
def test_products_are_those_of_float64(dtype: torch.dtype, features: int, inputs: int, biased: bool) -> None:
    """Bias added before the one rounding; rows that fill a tile, and more of them."""
    weight, bias = noise(features, inputs, dtype=dtype), noise(features, dtype=dtype, seed=1) if biased else None
    for rows in (1, 2, 3, 6, 7, 8, 12, 13, 15, 16, 25, 100):
        activations = noise(2, rows, inputs, dtype=dtype, seed=rows)
        exact = functional.linear(
            activations.double(), weight.double(), bias.double() if biased and bias is not None else None
        )
        found = panel_linear(activations, into_panels(weight), bias, features)
        assert found.shape == exact.shape and found.dtype == dtype
        torch.testing.assert_close(found.double(), exact, rtol=2**-8 if dtype == torch.bfloat16 else 1e-5, atol=1e-4)


@needs_kernel
@pytest.mark.parametrize("dtype", TYPES)
def test_a_row_has_the_same_bits_whatever_stands_beside_it(dtype: torch.dtype) -> None:
    """What oneDNN does not promise: a token's logits do not depend on how many are scored together."""
    weight, inputs = into_panels(noise(100, 512, dtype=dtype)), noise(600, 512, dtype=dtype, seed=1)
    alone = torch.cat([panel_linear(row[None], weight, None, 100) for row in inputs])
    for rows in (2, 5, 6, 13, 15, 16, 17, 30, 33, 70, 600):
        assert torch.equal(panel_linear(inputs[:rows], weight, None, 100), alone[:rows])


@needs_kernel
def test_rounding_to_bfloat16_is_torchs() -> None:
    """Ties, overflow, infinities and what is not a number, through a weight of one and a bias that makes the ties."""
    ones = torch.eye(32, dtype=torch.bfloat16)
    inputs = noise(64, 32, dtype=torch.bfloat16)
    inputs[0, :4] = torch.tensor([float("inf"), -float("inf"), 3.3e38, 1e-40])
    inputs[1, 0] = float("nan")
    bias = noise(32, dtype=torch.bfloat16, seed=1)
    found = panel_linear(inputs[2:], into_panels(ones), bias, 32)
    assert torch.equal(found, (inputs[2:].float() + bias.float()).to(torch.bfloat16))
    unusual = panel_linear(inputs[:2], into_panels(ones), None, 32)
    assert unusual[1].isnan().all()  # nothing times NaN is nothing
    assert unusual[0, 0].isnan() and not unusual[0, :2].isfinite().any()


@needs_kernel
def test_no_rows_and_strided_inputs_are_fine() -> None:
    weight = noise(40, 8, dtype=torch.float32)
    assert panel_linear(torch.empty(0, 3, 8), into_panels(weight), None, 40).shape == (0, 3, 40)
    inputs = noise(8, 5, dtype=torch.float32).T
    torch.testing.assert_close(panel_linear(inputs, into_panels(weight), None, 40), inputs @ weight.T)


@needs_kernel
def test_what_does_not_fit_is_refused() -> None:
    weight = into_panels(noise(40, 8, dtype=torch.float32))
    for inputs, features, said in (
        (torch.zeros(1, 6), 40, "inputs of 6 for a weight of 8"),
        (torch.zeros(1, 8).bfloat16(), 40, "one type"),
        (torch.zeros(1, 8), 65, "65 features for a weight of 2 panels"),
    ):
        with pytest.raises(RuntimeError, match=said):
            panel_linear(inputs, weight, None, features)
    odd = torch.zeros(4, 3, dtype=torch.bfloat16)
    assert not fits_panels(odd) and not fits_panels(torch.zeros(4, 4).double())
    with pytest.raises(ValueError, match=r"4 x 3 in torch\.bfloat16 has no packed form"):
        into_panels(odd)


def test_without_a_compiler_onednn_multiplies_and_nobody_is_warned(
    uncarried: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert kernel_missing() == "there is no C++ compiler (CXX, c++, g++, clang++)"
    model = tiny(FAMILIES["llama"])
    if can_pack(model):
        parts = {type(part) for part in packed(model).modules() if isinstance(part, PackedLinear)}
        assert parts == {BlockedLinear}


def test_a_compiler_that_fails_gives_one_warning_with_its_words(
    uncarried: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho 'x.cpp:1: error: I am out of ideas' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    with pytest.warns(RuntimeWarning, match="slower than they can, their kernel: .*out of ideas") as caught:
        assert kernel_missing() == kernel_missing()
    assert len(caught) == 1
    assert [path.name for path in (tmp_path / "slipstream").iterdir()] == []  # nothing half done stays


def test_a_folder_that_cannot_be_written_gives_one_sentence_and_the_portable_path(
    uncarried: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file"))
    sentence = r"file/slipstream cannot be written \(Not a directory\); set TORCH_EXTENSIONS_DIR to a folder"
    with pytest.warns(RuntimeWarning, match=sentence) as caught:
        assert "Errno" not in str(kernel_missing())
    assert len(caught) == 1 and "\n" not in str(caught[0].message)
    model = tiny(FAMILIES["llama"])
    if can_pack(model):
        assert BlockedLinear in {type(part) for part in packed(model).modules()}


@needs_kernel
@pytest.mark.slow
def test_a_damaged_library_in_the_cache_is_built_again(tmp_path: Path) -> None:
    """With a compiler that copies what was built before, in processes that have not loaded it."""
    sound = next(path for path in torch.ops.loaded_libraries if "slipstream" in path)
    compiler = tmp_path / "c++"
    compiler.write_text(f'#!/bin/sh\nfor word; do [ "$last" = -o ] && cp "{sound}" "$word"; last=$word; done; :\n')
    compiler.chmod(0o755)
    environment = os.environ | {
        "CXX": str(compiler),
        "TORCH_EXTENSIONS_DIR": str(tmp_path),
        "PYTHONPATH": str(Path(kernel.__file__).parents[2]),
    }
    program = "from slipstream.kernels.cpu import kernel_missing; assert kernel_missing() is None"
    for _ in range(2):
        command = [sys.executable, "-W", "error", "-c", program]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        (library,) = (tmp_path / "slipstream").iterdir()
        assert library.read_bytes() == Path(sound).read_bytes()
        library.write_bytes(b"this is no library")


@needs_kernel
@pytest.mark.parametrize(
    ("part", "wrong"),
    [
        ("into_panels", lambda weight: into_panels(weight.flip(0))),
        ("panel_attention", lambda q, k, v, added, scale: panel_attention(q, k, v, added, 2 * scale)),
    ],
)
def test_a_kernel_that_computes_wrongly_is_not_used(
    forgotten: None, part: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, part, wrong)
    with pytest.warns(RuntimeWarning, match="computes something else on this processor"):
        assert kernel_missing() is not None


@needs_kernel
def test_a_layer_that_does_not_fit_stays_as_it_is_or_goes_to_onednn() -> None:
    """An odd number of inputs in bfloat16."""
    model = tiny(FAMILIES["llama"], dtype=torch.bfloat16)
    model.model.layers[0].mlp.down_proj = torch.nn.Linear(3, 4, dtype=torch.bfloat16)
    parts = packed(model).model.layers[0].mlp
    assert type(parts.gate_proj) is PanelLinear
    assert type(parts.down_proj) in {BlockedLinear, torch.nn.Linear}


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_lie_one_behind_the_other(dtype: torch.dtype) -> None:
    model = tiny(FAMILIES["llama"], dtype=dtype)
    twin = packed(model)
    layers = {name: part for name, part in twin.named_modules() if isinstance(part, PanelLinear)}
    end = min(layer.weight.data_ptr() for layer in layers.values())
    assert end % packing.HUGE_PAGE == 0
    for name, layer in layers.items():
        assert layer.weight.data_ptr() == end
        assert torch.equal(layer.weight, into_panels(model.get_submodule(name).weight))
        end += layer.weight.nbytes


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="nobody says here what memory a process has")
def test_a_model_that_goes_takes_its_memory_along() -> None:
    count = 1 << 24
    stretch = packing.Stretch(4 * count)
    held = stretch.hold(torch.ones(count))
    middle = held.data_ptr() + held.nbytes // 2  # the ends of what is free again may soon be in use
    assert _is_mapped(middle)
    del stretch, held
    assert not _is_mapped(middle)


def _is_mapped(address: int) -> bool:
    """Whether this process has memory at an address."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    ends = (line.split()[0].split("-") for line in lines)
    return any(int(first, 16) <= address < int(last, 16) for first, last in ends)


@needs_kernel
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2", "gemma3", "opt"])
def test_plain_and_speculative_passes_give_the_same_bits(dtype: torch.dtype, name: str) -> None:
    """Tokens one by one, and as many at once as a round has, alone and beside another text: equal logits, not close
    ones. Hidden sizes are multiples of 32, as models have them: torch computes what is left over from its vectors by
    another function."""
    assert all(torch.equal(*both) for both in _passes(CausalScorer(packed(_wide(name, dtype))), TEXTS))


@needs_kernel
@pytest.mark.parametrize("dtype", TYPES)
def test_other_sums_for_many_rows_are_noticed(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above: products of many rows whose last bits are others."""
    multiply = PanelLinear.forward

    def careless(self: PanelLinear, inputs: Tensor) -> Tensor:
        found = multiply(self, inputs)
        return found if inputs.shape[:-1].numel() == 1 else torch.nextafter(found, torch.full_like(found, torch.inf))

    monkeypatch.setattr(PanelLinear, "forward", careless)
    assert not all(torch.equal(*both) for both in _passes(CausalScorer(packed(_wide("llama", dtype))), TEXTS))


TEXTS = [[(7 * i + row) % HF_VOCAB for i in range(30 + 11 * row)] for row in range(2)]


def _wide(name: str, dtype: torch.dtype) -> Any:
    """A tiny model of a family whose sizes are multiples of 32."""
    wide = {"intermediate_size": 64} if "intermediate_size" in FAMILIES[name].base else {}
    return tiny(FAMILIES[name], dtype=dtype, **wide)


def _passes(scorer: CausalScorer, texts: list[list[int]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Of both texts, the logits of their last six tokens: one by one alone, and at once beside the other."""
    scorer.add(2)
    scorer.prefill([text[:-6] for text in texts])
    together = scorer.extend(torch.tensor([text[-6:] for text in texts]), [6, 6])
    scorer.free([0, 1])
    for row, text in enumerate(texts):
        scorer.add(1)
        scorer.prefill([text[:-6]])
        alone = [scorer.extend(torch.tensor([[token]]), [1])[0, 0] for token in text[-6:]]
        scorer.free([0])
        yield torch.stack(alone), together[row]
