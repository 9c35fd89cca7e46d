"""The default number of threads follows affinity and quota, and loops are shared by threads only while that pays."""

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import slipstream
from slipstream.kernels import library
from slipstream.kernels.threads import cores_for_us
from terminal import run

CORES = 8
V1 = "40 30 0:29 {within} /sys/fs/cgroup/cpu rw shared:9 - cgroup cgroup rw,{controllers}\n"
V2 = "29 23 0:26 {within} /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that may run on eight cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(CORES)), raising=False)


def system(root: Path, mounts: str, groups: str, **quotas: str) -> Path:
    """A file tree as Linux shows it: mounts, this process's control groups, and files by path, as in the shell."""
    own = root / "proc/self"
    own.mkdir(parents=True)
    (own / "mountinfo").write_text("22 1 0:21 / /proc rw - proc proc rw\n" + mounts)
    (own / "cgroup").write_text(groups)
    for folder, text in quotas.items():
        version2 = "cgroup2" in mounts
        place = root / ("sys/fs/cgroup" if version2 else "sys/fs/cgroup/cpu") / folder.strip("_").replace("_", "/")
        place.mkdir(parents=True, exist_ok=True)
        names = ("cpu.max",) if version2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        for name, part in zip(names, [text] if version2 else text.split(), strict=True):
            (place / name).write_text(f"{part}\n")
    return root


@pytest.mark.parametrize(
    ("quota", "threads"),
    [("max", 8), ("50000", 1), ("100000", 1), ("140000", 1), ("150000", 2), ("300000", 3), ("6400000", 8), ("1000", 1)],
)
def test_a_quota_limits_the_threads(tmp_path: Path, quota: str, threads: int) -> None:
    two = system(tmp_path / "two", V2.format(within="/"), "0::/a\n", a=f"{quota} 100000")
    assert cores_for_us(two) == threads
    one = V1.format(within="/", controllers="cpu,cpuacct")
    text = f"{'-1' if quota == 'max' else quota} 100000"
    assert cores_for_us(system(tmp_path / "one", one, "4:memory:/b\n3:cpu,cpuacct:/a\n", a=text)) == threads


@pytest.mark.parametrize("mount", [V1.format(within="/", controllers="cpu"), V2.format(within="/")])
def test_the_smallest_quota_of_nested_groups_counts_and_no_others(tmp_path: Path, mount: str) -> None:
    names = "cpu" if " cgroup " in mount else ""
    quotas = {"a": "200000 100000", "a_b": "400000 100000", "a_b_c": "700000 100000", "a_other": "100000 100000"}
    assert cores_for_us(system(tmp_path / "1", mount, f"1:{names}:/a/b/c\n", **quotas)) == 2
    assert cores_for_us(system(tmp_path / "2", mount, f"1:{names}:/a/other\n", **quotas)) == 1
    assert cores_for_us(system(tmp_path / "3", mount, f"1:{names}:/d\n", **quotas)) == CORES


def test_a_container_sees_its_own_group_at_the_root(tmp_path: Path) -> None:
    within = system(tmp_path / "1", V2.format(within="/docker/x"), "0::/docker/x\n", _="300000 100000")
    assert cores_for_us(within) == 3
    inside = system(tmp_path / "2", V2.format(within="/docker/x"), "0::/docker/x/in\n", _="max 100000", _in="5000 1000")
    assert cores_for_us(inside) == 5
    elsewhere = system(tmp_path / "3", V2.format(within="/docker/x"), "0::/docker/xy\n", _="4000 1000", y="1000 1000")
    assert cores_for_us(elsewhere) == 4


def test_without_control_groups_affinity_alone_counts(tmp_path: Path) -> None:
    assert cores_for_us(tmp_path) == CORES
    other = V1.format(within="/", controllers="cpuset")  # the files of another controller
    assert cores_for_us(system(tmp_path / "1", other, "2:cpuset:/a\n1:cpu:/a\n", a="50000 100000")) == CORES


ONE_CORE = """
import os, torch
torch.set_num_threads(2)
os.sched_getaffinity = lambda _: {0}
from slipstream.kernels.threads import use_threads
use_threads()
assert torch.get_num_threads() == FIRST, torch.get_num_threads()
torch.set_num_threads(3)
use_threads()
assert torch.get_num_threads() == 3, "the user's number was changed"
use_threads(2)
assert torch.get_num_threads() == 2
"""


@pytest.mark.parametrize(
    ("variable", "first"),
    [
        ({"OMP_NUM_THREADS": "2"}, 2),
        pytest.param({}, 1, marks=pytest.mark.slow),
        pytest.param({"MKL_NUM_THREADS": "2"}, 2, marks=pytest.mark.slow),
    ],
)
def test_torch_is_lowered_once_and_users_have_the_last_word(variable: dict[str, str], first: int) -> None:
    clean = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    environment = {**clean, **variable}
    program = ONE_CORE.replace("FIRST", str(first))
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)


def test_load_and_commands_take_a_number() -> None:
    before = torch.get_num_threads()
    try:
        slipstream.load(dtype="float32", threads=2)
        assert torch.get_num_threads() == 2
        slipstream.load(dtype="float32")
        assert torch.get_num_threads() == 2
        assert run("draft", "list", "lookup", "--threads", "1").exit_code == 0
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
    for number, bound in ((0, "least 1"), (100_000, "most ")):
        with pytest.raises(ValueError, match=f"threads={number} is not possible: it must be at {bound}"):
            slipstream.load(threads=number)
    assert "--threads" in run("generate", "x", "--threads", "0").stderr


TORCH = """
#include <cstdint>
namespace torch::stable {
inline int shared = 0;
inline uint32_t get_num_threads() { return 2; }
template <class Body> void parallel_for(int64_t begin, int64_t end, int64_t, const Body& body) {
  ++shared, body(begin, (begin + end) / 2), body((begin + end) / 2, end);
}
}
"""
PROGRAM = """
#include "parallel.h"
using namespace slipstream;
extern "C" {
#pragma GCC visibility push(default)
int64_t closed_after(int64_t lasted, int64_t share) {  // how long loops are not shared after one such loop, in ms
  judge(0, lasted * MILLISECOND, share * MILLISECOND, 2);
  return shared_again.exchange(0) / MILLISECOND - lasted;
}
int covered(bool closed, int64_t count, int64_t grain) {  // the sum of a range, and whether it was shared
  shared_again = closed ? std::numeric_limits<int64_t>::max() : 0, torch::stable::shared = 0;
  int sum = 0;
  slipstream::parallel_for(1, count + 1, grain, [&](int64_t from, int64_t to) {
    for (; from < to; ++from) sum += from;
  });
  return 1000 * torch::stable::shared + sum;
}
}
"""


@pytest.fixture(scope="module")
def header(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """parallel.h around a torch that divides a range in two."""
    if not any(shutil.which(name) for name in library.COMPILERS):
        pytest.skip("there is no C++ compiler")
    folder = tmp_path_factory.mktemp("parallel")
    (folder / "torch/csrc/stable").mkdir(parents=True)
    (folder / "torch/csrc/stable/ops.h").write_text(TORCH)
    (folder / "test.cpp").write_text(PROGRAM)
    # Hidden: the kernels of this process have such variables too.
    options = (
        "-std=c++20",
        "-fvisibility=hidden",
        "-shared",
        "-fPIC",
        f"-I{folder}",
        f"-I{library.HERE}",
        "-o",
        str(folder / "test.so"),
    )
    subprocess.run([library.compiler(), *options, str(folder / "test.cpp")], check=True)
    made = ctypes.CDLL(str(folder / "test.so"))
    made.closed_after.argtypes, made.closed_after.restype = (ctypes.c_int64, ctypes.c_int64), ctypes.c_int64
    made.covered.argtypes = (ctypes.c_bool, ctypes.c_int64, ctypes.c_int64)
    return made


def test_loops_that_wait_for_long_are_not_shared_for_a_while(header: ctypes.CDLL) -> None:
    late, well = (40, 1), (40, 30)
    pauses = [header.closed_after(*late) for _ in range(10)]
    assert pauses == [4, 8, 16, 32, 64, 128, 256, 512, 1024, 1024]
    assert header.closed_after(*well) < 0  # the control: shared in two fair halves, it goes on, and is trusted again
    assert header.closed_after(*late) == 512
    assert header.closed_after(2, 0) < 0  # a single short wait decides nothing
    assert header.closed_after(2, 0) < 0
    assert header.closed_after(2, 0) > 0  # several do


def test_a_loop_covers_its_range_shared_or_not(header: ctypes.CDLL) -> None:
    assert header.covered(False, 10, 1) == 1055
    assert header.covered(True, 10, 1) == 55
    assert header.covered(False, 10, 10) == 55  # too small to be shared
    assert header.covered(False, 0, 1) == 0
