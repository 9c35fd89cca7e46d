"""Levels of instructions: which one is taken, that all keep the contract of bits, and that a broken one is noticed."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from scripts import script
from slipstream.kernels import library
from slipstream.kernels.cpu import kernel_missing

ROOT = Path(__file__).parents[2]
V3, NEWEST = library.V3, library.AMX
builds = pytest.mark.skipif(not any(map(shutil.which, library.COMPILERS)), reason="no compiler here")


@pytest.fixture
def carried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A wheel's folder of libraries, empty; no level is asked for."""
    monkeypatch.delenv(library.CHOICE, raising=False)
    monkeypatch.setattr(library, "CARRIED", tmp_path)
    return tmp_path


def has(monkeypatch: pytest.MonkeyPatch, flags: frozenset[str], brand: str = "any") -> None:
    """From now on the processor has these instructions."""
    monkeypatch.setattr(library, "processor_flags", lambda: flags)
    monkeypatch.setattr(library, "brand", lambda: brand)


def test_the_best_level_that_a_wheel_carries_is_taken(carried: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, NEWEST)
    assert library.level() is library.NATIVE  # nothing is carried
    for level in library.PORTABLE[1:4]:
        library.carried(level).touch()
        assert library.level() is level
    has(monkeypatch, V3)
    assert library.level().name == "x86-64-v3"
    has(monkeypatch, V3 - {"fma"})  # less than the least that is carried
    assert library.level() is library.NATIVE
    has(monkeypatch, V3, "amd")  # a library for other processors is no good for AMD's
    assert library.level() is library.NATIVE


def test_users_choose_a_level(carried: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, library.V4)
    library.carried(library.PORTABLE[2]).touch()
    for name in ("x86-64", "x86-64-v3", "native"):
        monkeypatch.setenv(library.CHOICE, name)
        assert library.level().name == name


@pytest.mark.parametrize("asked", ["x86-64-v4", "haswell"])
def test_a_level_that_the_processor_lacks_is_refused(
    asked: str, carried: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has(monkeypatch, V3)
    monkeypatch.setenv(library.CHOICE, asked)
    sentence = f"SLIPSTREAM_MARCH={asked} is no level .* that this processor has: x86-64, x86-64-v3, native"
    with pytest.raises(ValueError, match=sentence):
        library.level()


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (library.X86, ["x86-64"]),
        (library.V4, ["x86-64", "x86-64-v3", "x86-64-v4"]),
        (library.ARM, ["armv8-a"]),
        (library.ARM | {"asimddp"}, ["armv8-a", "armv8.2-a-dotprod"]),
    ],
)
def test_levels_fit_one_kind_of_processor(
    flags: frozenset[str], names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    has(monkeypatch, flags)
    assert [level.name for level in library.PORTABLE if level.fits] == names


@builds
@pytest.mark.slow  # a build for each
@pytest.mark.parametrize("level", ["x86-64", "x86-64-v3", "x86-64-v4", "x86-64-v4-bf16", "x86-64-v4-amx"])
def test_every_level_keeps_the_contract(level: str) -> None:
    """In a process of its own, whose torch uses no newer instructions either."""
    if level not in {each.name for each in library.PORTABLE if each.fits}:
        pytest.skip(f"the processor has less than {level}")
    module, names = script("benchmarks/levels.py"), ("products", "quantized", "attention", "recurrences", "programs")
    found = module.contract(level, library.compiler(), names, module.FAST)
    assert not found["faults"] and all(each["passed"] > 5 for each in found["counts"].values())


@pytest.mark.skipif(not shutil.which("objdump") or kernel_missing() is not None, reason="needs objdump and the kernels")
def test_a_wheel_needs_nothing_of_a_newer_glibc_than_its_platform_has() -> None:
    """What is newer, it has or asks for in its older form; the control is a platform with less."""
    wheel = script("packaging/wheel.py")
    built = [name for name in torch.ops.loaded_libraries if Path(name).name.startswith("kernel-")]
    symbols = subprocess.run(["objdump", "-T", *built], capture_output=True, text=True, check=True).stdout
    needed = {name: int(minor) for minor, name in re.findall(r"GLIBC_2\.(\d+)(?:\.\d+)?\)? +(\w+)$", symbols, re.M)}
    known = {*wheel.OLDER_FUNCTIONS, "__libc_single_threaded"}
    least = int(wheel.PLATFORM.split("_")[2])
    assert {name for name, minor in needed.items() if minor > least} <= known
    assert not {name for name, minor in needed.items() if minor > 1} <= known


@builds
@pytest.mark.slow
def test_a_path_that_sums_in_another_order_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The control: kernels in which the sums of several rows begin at another number than those of one."""
    begin, end = "rows * PANEL, 0.0f);", "for (int64_t r = 0; r < rows; ++r) write_panel<Type>("
    other = "rows * PANEL, rows > 1 ? 64.0f : 0.0f);"
    took = "for (int64_t i = 0; i < rows * PANEL; ++i) sums[0][i] -= rows > 1 ? 64.0f : 0.0f;\n    " + end
    for path in (*library.HEADERS, *library.SOURCES):
        text = path.read_text()
        if path.stem == "cpu":
            assert text.count(begin) == 1 and text.count(end) == 1
            text = text.replace(begin, other).replace(end, took)
        (tmp_path / path.name).write_text(text)
    monkeypatch.setattr(library, "SOURCES", tuple(tmp_path / path.name for path in library.SOURCES))
    monkeypatch.setattr(library, "CARRIED", tmp_path)
    level = library.level()
    library.build(level, library.brand(), library.carried(level), ["-O1"])
    program = (
        "import sys, pytest\nfrom pathlib import Path\nfrom slipstream.kernels import library\n"
        "library.CARRIED = Path(sys.argv[1])\nsys.exit(pytest.main(sys.argv[2:]))"
    )
    tests = f"{Path(__file__).with_name('test_cpu.py')}::test_a_row_has_the_same_bits_whatever_stands_beside_it"
    command = (sys.executable, "-c", program, str(tmp_path), "-q", "-k", "dtype0", tests)
    environment = os.environ | {library.CHOICE: level.name, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert "1 failed" in done.stdout, done.stdout + done.stderr
