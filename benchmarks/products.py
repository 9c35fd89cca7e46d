"""Measures our products by the bandwidth of one core, at each level of instructions: format x matrix x rows.

python benchmarks/products.py [--level x86-64-v3 native] [--format int4 ...] [--matrix 576x576 ...] [--json FILE]

Copies of a matrix take turns, so that the caches do not hold them. Times are processor time of one thread, the least of
alternating laps. The bandwidth is that of memchr over as many bytes; "six" is the time of six rows against one. The
peak is what vector instructions multiply in registers (peak.cpp), of which six and 64 rows reach a share: where six
rows miss their bar (1.4 in float32 and bfloat16, else 1.6), it says what could be had.
"""

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from levels import OLDER, processor
from torch import Tensor

from slipstream.kernels import library
from slipstream.kernels.cpu import kernel_missing, panel_linear, quantized_linear
from slipstream.kernels.packing import Stretch
from slipstream.kernels.quantization import Codes, Precision, QuantizedPanels, into_panels, quantize

MATRICES = ("576x576", "1536x576", "576x1536", "49152x576", "2048x2048", "5632x2048", "2048x5632")
"""Features x inputs, of SmolLM2-135M and of a model of 1.1 B."""
CODES = {"int8": (8, 64), "int4": (4, 32), "Q8_0": (8, 32), "Q4_1": (4, 32), "Q6_K": (8, 16), "Q4_K": (4, 32)}
"""The bits of codes and the inputs that share a scale; the last four are like llama.cpp's formats of these names."""
FORMATS = ("float32", "bfloat16", *CODES)
ROWS = (1, 2, 6, 16, 64)
BYTES = 96 << 20  # of all copies of a matrix
LAPS = 9
BARS = {"float32": 1.4, "bfloat16": 1.4}  # of six rows against one; 1.6 for codes
TIMES = 20_000  # for which the peak multiplies
PEAK = Path(__file__).with_name("peak.cpp")


@torch.inference_mode()
def main() -> None:
    levels = [level.name for level in (*library.PORTABLE, library.NATIVE) if level.fits]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--level", nargs="+", choices=levels, default=["x86-64-v3", "native"])
    parser.add_argument("--format", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--matrix", nargs="+", default=list(MATRICES))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if os.environ.get(library.CHOICE) != args.level[0] or len(args.level) > 1:
        cases = ("--format", *args.format, "--matrix", *args.matrix)
        found = {"processor": processor(), "cases": [each for level in args.level for each in at_level(level, cases)]}
        if args.json:
            args.json.write_text(json.dumps(found, indent=1) + "\n")
        print(table(found))
        return
    torch.set_num_threads(1)
    if reason := kernel_missing():
        raise SystemExit(f"nothing to measure: {reason}.")
    peaks = Peaks(library.level())
    found_here = []
    for matrix in args.matrix:
        for name in args.format:
            found_here.append(
                {"level": args.level[0], "format": name, "matrix": matrix, **measured(name, matrix, peaks)}
            )
    print(json.dumps(found_here))


def at_level(level: str, cases: tuple[str, ...]) -> list[dict[str, Any]]:
    """Measure in a process of its own, in which all uses the instructions of a level."""
    environment = os.environ | {library.CHOICE: level} | OLDER.get(level, {})
    command = [sys.executable, __file__, "--level", level, *cases]
    return list(json.loads(subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout))


class Peaks:
    """The most that one thread multiplies at a level of instructions: `peak.cpp`, compiled for it."""

    def __init__(self, level: library.Level) -> None:
        with tempfile.TemporaryDirectory() as folder:
            made = f"{folder}/peak.so"
            command = (library.compiler(), "-std=c++20", "-O3", "-shared", "-fPIC", *level.options, PEAK, "-o", made)
            subprocess.run(command, check=True)
            self._library = ctypes.CDLL(made)

    def products(self, name: str, times: int) -> int:
        """Multiply a number of times as in a format -> the products that were added; 0 if the level has none."""
        kind = name if name in BARS else f"int{CODES[name][0]}"
        function = getattr(self._library, kind)
        function.argtypes, function.restype = (ctypes.c_int64,), ctypes.c_int64
        return int(function(times))


def measured(name: str, matrix: str, peaks: Peaks) -> dict[str, Any]:
    """Return the bytes of a matrix in a format, bandwidth and peak by the nanosecond, and nanoseconds by rows."""
    features, width = map(int, matrix.split("x"))
    weight = torch.randn(features, width)
    multiply, tensors = product_of(name, weight)
    size = sum(tensor.nbytes for tensor in tensors)
    count = -(-BYTES // size)
    room = Stretch(count * (size + 256))
    copies = [[room.hold(tensor) for tensor in tensors] for _ in range(count)]
    given = torch.bfloat16 if name == "bfloat16" else torch.float32
    inputs = {rows: torch.randn(rows, width).to(given) for rows in ROWS}
    whole = torch.ones(count * size, dtype=torch.uint8)

    def lap(rows: int) -> None:
        for copy in copies:
            multiply(inputs[rows], *copy)

    laps: dict[int, Callable[[], object]] = {rows: partial(lap, rows) for rows in ROWS}
    limits = {0: lambda: LIBC.memchr(whole.data_ptr(), 0, whole.nbytes), -1: partial(peaks.products, name, TIMES)}
    times = least(limits | laps)
    bandwidth, peak = whole.nbytes / times.pop(0), peaks.products(name, TIMES) / times.pop(-1)
    return {
        "bytes": size,
        "bandwidth": bandwidth,
        "peak": peak,
        "times": {rows: each / count for rows, each in times.items()},
    }


def product_of(name: str, weight: Tensor) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """Return a product of inputs with a weight in a format, and the tensors of the weight that it takes."""
    features = len(weight)
    if name in ("float32", "bfloat16"):
        panels = into_panels(weight.to(getattr(torch, name)))
        return lambda inputs, copy: panel_linear(inputs, copy, None, features), [panels]
    bits, group = CODES[name]
    codes = quantize(weight, Precision(bits, group))
    if name.startswith("Q"):
        offsets = codes.scales.half() if name.startswith("Q4") else None
        codes = Codes(codes.precision, codes.codes, codes.scales.half(), offsets)
    whole = codes.into_panels()
    if name.endswith("K"):
        groups, shift = whole.scales.shape[1], {"Q6_K": 4, "Q4_K": 3}[name]
        shift = next(each for each in range(shift, -1, -1) if groups % (1 << each) == 0)
        steps = torch.randint(1, 64, (len(whole.scales), groups, 2 if name == "Q4_K" else 1, 32), dtype=torch.int8)
        scales, zeros = (None if each is None else each[:, :: 1 << shift].contiguous() for each in whole[1:3])
        assert scales is not None
        whole = QuantizedPanels(whole.codes, scales, zeros, steps)
    given = [each is not None for each in whole]

    def multiply(inputs: Tensor, *copy: Tensor) -> Tensor:
        parts = iter(copy)
        panels = QuantizedPanels(*(next(parts) if there else None for there in given))  # type: ignore[arg-type]
        return quantized_linear(inputs, panels, None, features, bits)

    return multiply, [each for each in whole if each is not None]


LIBC = ctypes.CDLL(None)
LIBC.memchr.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)


def least(runs: dict[int, Callable[[], object]]) -> dict[int, float]:
    """Return the least nanoseconds of processor time of each run, after alternating laps."""
    found = dict.fromkeys(runs, float("inf"))
    for _ in range(LAPS):
        for name, run in runs.items():
            start = time.thread_time_ns()
            run()
            found[name] = min(found[name], time.thread_time_ns() - start)
    return found


def table(found: dict[str, Any]) -> str:
    """Return a Markdown table of all cases: beside the bandwidth the share of it that one row takes, beside the peak
    those of it that six and 64 rows reach."""
    lines = [
        "| level | format | matrix | GB/s | 1 row, µs | share | 6 rows | six | bar | G/s | share | 16 | 64 | share |"
    ]
    lines.append(f"|{'---|' * 14}")
    for case in found["cases"]:
        features, width = map(int, case["matrix"].split("x"))
        times = {int(rows): each for rows, each in case["times"].items()}
        share, six, bar = (
            case["bytes"] / times[1] / case["bandwidth"],
            times[6] / times[1],
            BARS.get(case["format"], 1.6),
        )
        reached = {rows: rows * features * width / times[rows] / case["peak"] if case["peak"] else 0 for rows in times}
        cells = [case["level"], case["format"], case["matrix"], f"{case['bandwidth']:.1f}", f"{times[1] / 1e3:.1f}"]
        cells += [f"{share:.2f}", f"{times[6] / 1e3:.1f}", f"{six:.2f}", f"{bar}{'' if six <= bar else ' missed'}"]
        cells += [f"{case['peak']:.0f}", f"{reached[6]:.2f}", f"{times[16] / 1e3:.0f}", f"{times[64] / 1e3:.0f}"]
        lines.append(f"| {' | '.join([*cells, f'{reached[64]:.2f}'])} |")
    return "\n".join([*lines, "", f"*One thread of {found['processor']}.*"])


if __name__ == "__main__":
    main()
