"""Runs the contract of the kernels and the engine with those that an installed wheel carries, where none can be built.

python packaging/try_wheel.py        # or: make test-wheel PYTHON=python3.13
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import torch
import transformers

from slipstream.kernels import library

ROOT = Path(__file__).parents[1]
KERNELS = ("cpu", "quantization", "attention", "laws", "recurrences", "library")
TESTS = (
    *(f"tests/kernels/test_{name}.py" for name in KERNELS),
    "tests/models/loading/test_gguf.py",
    "tests/execution/test_programs.py",
    "tests/engine/test_bits.py",
)


def main() -> None:
    if library.HERE.is_relative_to(ROOT / "src"):
        raise SystemExit(f"this is the checkout, not a wheel: {library.HERE}")
    level = library.level()
    if not library.carried(level).exists():
        raise SystemExit(f"the wheel carries no kernels for this processor, which would build {level.name}")
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"== {versions}: {library.carried(level).name} of {library.HERE}", flush=True)
    environment = {name: value for name, value in os.environ.items() if name != "CXX"}
    environment["PATH"] = str(Path(sys.executable).parent)  # where no compiler is
    command = (sys.executable, "-m", "pytest", "-q", "-o", "pythonpath=tests", *TESTS)
    sys.exit(subprocess.run(command, cwd=ROOT, env=environment).returncode)


if __name__ == "__main__":
    main()
