"""Runs the tests of bits and accuracy on an emulated arm64 processor, with kernels that cross compilers build here.

python benchmarks/arm64.py [--level armv8-a ...] [--compiler g++ ...] [--contract attention ...]      # or: make arm64

Python, torch and transformers for arm64 go to build/arm64 (3 GB to download, 5 GB of disk), so that the same tests run
through the same code as on a real machine, where `benchmarks/levels.py` is all that is needed. At last the control
runs: kernels that sum several rows in another order have to fail. A level takes some 10 minutes with each compiler.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

import levels

ROOT = Path(__file__).parents[1]
HOME = ROOT / "build" / "arm64"
SYSTEM, BIN = HOME / "system", HOME / "bin"
PYTHON, DEBIAN = "3.11", "bookworm"  # its python3
SITE = HOME / "lib" / f"python{PYTHON}" / "site-packages"
PROCESSOR = "neoverse-n1"  # as QEMU calls the least one of today's clouds
COMPILERS = {name: f"aarch64-linux-gnu-{name}" for name in levels.COMPILERS}
NEEDS = {"mmdebstrap": "mmdebstrap", "qemu-aarch64": "qemu-user", COMPILERS["g++"]: "g++-aarch64-linux-gnu"}
"""Commands, and the packages of Debian that have them."""

PACKAGES = ("torch", "transformers", "safetensors", "numpy", "typer", "rich", "gguf")
PACKAGES += ("pytest", "pytest-timeout", "hypothesis")
FEATURES = "fp asimd aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp"
CPUS = "sys/devices/system/cpu"
FACTS = {
    "proc/cpuinfo": "processor\t: 0\nmodel name\t: Arm Neoverse N1, emulated by QEMU\n"
    f"Features\t: {FEATURES}\nCPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x3\n"
    "CPU part\t: 0xd0c\nCPU revision\t: 1\n\n",
    f"{CPUS}/cpu0/regs/identification/midr_el1": "0x00000000413fd0c1\n",
    **{f"{CPUS}/{name}": "0\n" for name in ("possible", "present", "online")},
}
"""What Linux says of the processor. Programs would see the files of the machine that emulates, and torch not start."""

CONTROL = "tests/kernels/test_library.py::test_a_path_that_sums_in_another_order_is_noticed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--level", nargs="+", default=["armv8-a", "armv8.2-a-dotprod"])
    parser.add_argument("--compiler", nargs="+", choices=COMPILERS, default=list(filter(shutil.which, COMPILERS)))
    parser.add_argument("--contract", nargs="+", default=list(levels.CONTRACTS))
    args = parser.parse_args()
    if missing := [package for name, package in NEEDS.items() if not shutil.which(name)]:
        raise SystemExit(f"commands are missing; on Debian: apt install {' '.join(missing)} (and clang, if you like)")
    prepare()
    compilers = [COMPILERS[name] for name in args.compiler]
    options = ("--level", *args.level, "--compiler", *compilers, "--contract", *args.contract, "--fast")
    kept = emulate(ROOT / "benchmarks" / "levels.py", *options)
    choice = {"SLIPSTREAM_MARCH": args.level[0], "CXX": compilers[0]}
    noticed = emulate("-m", "pytest", "-q", "-m", "slow", CONTROL, **choice)
    for what, status in (("the contract was kept", kept), ("the control was noticed", noticed)):
        print(f"{what}: {'no, exit status ' + str(status) if status else 'yes'}")
    sys.exit(bool(kept or noticed))


def prepare() -> None:
    """Make the folder of the emulated machine, unless it stands."""
    if not SYSTEM.exists():
        part = HOME / "part"
        shutil.rmtree(part, ignore_errors=True)
        HOME.mkdir(parents=True, exist_ok=True)
        include = f"--include=python{PYTHON},libgomp1,libstdc++6"
        subprocess.run(["mmdebstrap", "--arch=arm64", "--variant=extract", include, DEBIAN, part], check=True)
        for name, text in FACTS.items():
            (part / name).parent.mkdir(parents=True, exist_ok=True)
            (part / name).write_text(text)
        part.rename(SYSTEM)
    if not SITE.exists():
        part = HOME / "packages"
        systems = [f"--platform=manylinux{name}_aarch64" for name in (*(f"_2_{i}" for i in range(28, 16, -1)), "2014")]
        python = (f"--python-version={PYTHON}", "--abi=cp311", "--abi=abi3", "--abi=none", "--only-binary=:all:")
        where = ("--upgrade", "--no-warn-conflicts", "--constraint", ROOT / "constraints.txt", "--target", part)
        command = (sys.executable, "-m", "pip", "install", *systems, *python, *where, *PACKAGES)
        subprocess.run(command, check=True)
        SITE.parent.mkdir(parents=True)
        part.rename(SITE)
    BIN.mkdir(exist_ok=True)
    (HOME / "pyvenv.cfg").write_text(f"home = {SYSTEM / 'usr' / 'bin'}\n")  # an environment like any other
    started = f'-L "{SYSTEM}" -0 "$0" "{SYSTEM}/usr/bin/python{PYTHON}" "$@"'
    (BIN / "python").write_text(f"#!/bin/sh\nexec qemu-aarch64 {started}\n")
    (BIN / "python").chmod(0o755)
    if (clang := shutil.which("clang++")) and not (BIN / COMPILERS["clang++"]).exists():
        (BIN / COMPILERS["clang++"]).symlink_to(clang)  # it compiles for what its name says


def emulate(*command: object, **choice: str) -> int:
    """Run the emulated Python -> its exit status. Compilers that it calls run as they are."""
    settings = {
        "QEMU_CPU": PROCESSOR,
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "TORCH_EXTENSIONS_DIR": str(HOME / "kernels"),
        "OMP_NUM_THREADS": "1",
        "PYTEST_ADDOPTS": "--timeout=3600",
    }
    return subprocess.run([BIN / "python", *command], cwd=ROOT, env=os.environ | settings | choice).returncode


if __name__ == "__main__":
    main()
