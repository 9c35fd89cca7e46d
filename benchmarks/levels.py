"""Runs the tests of bits and accuracy at every level of instructions that this processor has, with every compiler here.

python benchmarks/levels.py [--level x86-64-v3 ...] [--compiler g++ ...] [--contract attention ...] [--json FILE]

Every run is a process of its own, in which torch too uses no newer instructions than the level has. Where a processor
has AVX-512 but not Intel's tiles (AMX), these are emulated. The table for docs/exactness.md is printed, or written with
`--write`.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from slipstream.kernels import library

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "exactness.md"
MARKED = re.compile(r"(?<=<!-- table: levels -->\n).*?(?=<!-- end -->)", re.S)
COMPILERS = ("g++", "clang++")
FAST = "not slow and not gpu and not network"
CONTRACTS = {
    "products": "tests/kernels/test_cpu.py",
    "quantized": "tests/kernels/test_quantization.py",
    "attention": "tests/kernels/test_attention.py",
    "laws": "tests/kernels/test_laws.py",
    "recurrences": "tests/kernels/test_recurrences.py",
    "blocks": "tests/models/loading/test_gguf.py",
    "programs": "tests/execution/test_programs.py",
    "engine": "tests/engine/test_bits.py",
}
OLDER = {
    "x86-64": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
    "x86-64-v3": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
}
"""What keeps torch and its libraries from using newer instructions than a level has."""

EMULATED = "native, AMX emulated"
TILES = Path(__file__).with_name("emulated_tiles.h")
WITH_TILES = f"""#!/bin/sh
case " $* " in
*" -c "*) exec {{compiler}} -D__AMX_TILE__ -D__AMX_BF16__ -D__AMX_INT8__ -include {TILES} "$@" ;;
esac
exec {{compiler}} "$@"
"""
"""A compiler for which a processor with AVX-512 has Intel's tiles as well, computed by plain C++."""


def main() -> None:
    levels = [level.name for level in (*library.PORTABLE, library.NATIVE) if level.fits]
    flags = library.processor_flags()
    if "avx512_bf16" in flags and "amx_tile" not in flags:
        levels.append(EMULATED)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--level", nargs="+", choices=levels, default=levels)
    parser.add_argument("--compiler", nargs="+", default=[name for name in COMPILERS if shutil.which(name)])
    parser.add_argument("--contract", nargs="+", choices=CONTRACTS, default=list(CONTRACTS))
    parser.add_argument("--fast", action="store_true", help="leave out the slow tests")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", action="store_true", help=f"write the table into {DOCUMENT.name}")
    args = parser.parse_args()
    runs = []
    for name in args.level:
        for compiler in args.compiler:
            found = contract(name, compiler, args.contract, FAST if args.fast else "")
            runs.append({"level": name, "compiler": version(compiler), **found})
            print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
            if args.json:
                args.json.write_text(json.dumps({"processor": processor(), "runs": runs}, indent=1) + "\n")
    if args.write:
        DOCUMENT.write_text(MARKED.sub(table(processor(), runs), DOCUMENT.read_text()))
    else:
        print(table(processor(), runs))
    sys.exit(any(run["faults"] for run in runs))


def contract(level: str, compiler: str, contracts: Sequence[str] = tuple(CONTRACTS), mark: str = "") -> dict[str, Any]:
    """Run the tests of some contracts -> how many of each passed, failed and were skipped, and what failed."""
    environment = os.environ | {"CXX": compiler, library.CHOICE: level} | OLDER.get(level, {})
    counts = {name: dict.fromkeys(("passed", "failed", "skipped"), 0) for name in contracts}
    modules, faults = {Path(CONTRACTS[name]).stem: name for name in contracts}, []
    with tempfile.TemporaryDirectory() as folder:
        report, wrapper = Path(folder) / "report.xml", Path(folder) / "c++"
        if level == EMULATED:
            wrapper.write_text(WITH_TILES.format(compiler=compiler))
            wrapper.chmod(0o755)
            environment |= {"CXX": str(wrapper), library.CHOICE: library.NATIVE.name, "TORCH_EXTENSIONS_DIR": folder}
        files = [CONTRACTS[name] for name in contracts]
        command = (sys.executable, "-m", "pytest", "-q", "-m", mark, f"--junitxml={report}", *files)
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            raise SystemExit(f"{' '.join(command)} failed: {done.stdout}{done.stderr}")
        for case in ElementTree.parse(report).iter("testcase"):
            failed = case.find("failure") is not None or case.find("error") is not None
            verdict = "failed" if failed else "skipped" if case.find("skipped") is not None else "passed"
            counts[modules[case.attrib["classname"].rsplit(".", 1)[-1]]][verdict] += 1
            faults += [case.attrib["name"]] if failed else []
    return {"counts": counts, "faults": faults}


def version(compiler: str) -> str:
    """Return the name and the version of a compiler."""
    said = subprocess.run([compiler, "-dumpfullversion"], capture_output=True, text=True)
    found = said if said.returncode == 0 else subprocess.run([compiler, "-dumpversion"], capture_output=True, text=True)
    return f"{compiler} {found.stdout.strip()}"


def processor() -> str:
    """Return the maker and the name of this processor."""
    return re.sub(r"\s+", " ", " ".join(library.described(name) for name in ("vendor_id", "model name"))).strip()


def table(of: str, runs: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table of tests passed by level, compiler and contract."""
    names = [name for name in CONTRACTS if name in runs[0]["counts"]]
    lines = [f"| {' | '.join(('level', 'compiler', *names))} |", f"|{'---|' * (2 + len(names))}"]
    found: dict[tuple[str, ...], list[str]] = {}  # compilers by level and cells
    for run in runs:
        found.setdefault((run["level"], *(cell(run["counts"][name]) for name in names)), []).append(run["compiler"])
    lines += [f"| {' | '.join((level, ', '.join(by), *cells))} |" for (level, *cells), by in found.items()]
    return "\n".join([*lines, "", f"*Tests passed on {of}: `python benchmarks/levels.py`.*", ""])


def cell(counts: dict[str, int]) -> str:
    """Return a count of passed tests, with the failed ones if there are any."""
    return f"{counts['passed']}, **{counts['failed']} failed**" if counts["failed"] else str(counts["passed"])


if __name__ == "__main__":
    main()
