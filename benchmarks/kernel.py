"""Compares our kernels with oneDNN's packed products and torch's attention.

Products are all matrices of a model one after the other, in bfloat16 and quantized; attentions are single calls.

python benchmarks/kernel.py [--threads 2] [--repetitions 15] [--json]
"""

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from slipstream.kernels.cpu import kernel_missing, panel_attention, panel_linear
from slipstream.kernels.packing import QuantizedLinear, Stretch, has_blocked
from slipstream.kernels.quantization import Precision, into_panels, panel_bytes, quantize

# The matrices of a model as (output features, input features).
TARGET = [(768, 768), (384, 768), (384, 768), (768, 768), (2304, 768), (2304, 768), (768, 2304)] * 12 + [(32000, 768)]
DRAFT = [(256, 288), (128, 288), (128, 288), (288, 256), (896, 288), (896, 288), (288, 896)] * 6 + [(32000, 288)]
LARGE = [(2048, 2048), (256, 2048), (256, 2048), (2048, 2048), (5632, 2048), (5632, 2048), (2048, 5632)] * 22 + [
    (32000, 2048)
]
PRECISIONS = (Precision.named("int8"), Precision.named("int4"))
ATTENTIONS = [(4, 2, 1, 150, 64), (12, 6, 6, 150, 64), (12, 6, 6, 1000, 64), (32, 8, 512, 512, 128)]
"""Query heads, key-value heads, new tokens, slots of the KV cache, and head size of each case."""


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if reason := kernel_missing():
        raise SystemExit(f"nothing to measure: {reason}.")
    found: dict[str, list[dict[str, Any]]] = {"products": [], "quantized": [], "attentions": []}
    for name, shapes in (("134 M target", TARGET), ("24 M draft", DRAFT)):
        for rows in (1, 2, 6, 12, 48):
            ours, onednn_seconds = products(shapes, rows, args.repetitions)
            found["products"].append({"model": name, "rows": rows, "ours": ours, "onednn": onednn_seconds})
    for name, shapes in (("134 M", TARGET), ("1.1 B", LARGE)):
        found["quantized"] += [{"model": name, **row} for row in quantized(shapes, args.repetitions)]
    for case in ATTENTIONS:
        ours, torch_seconds = attentions(*case, args.repetitions)
        found["attentions"].append({"case": list(case), "ours": ours, "torch": torch_seconds})
    print(json.dumps(found) if args.json else table(found))


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    """Return Markdown tables of the products and the attentions."""
    lines = ["| bfloat16 | rows | ours, ms | oneDNN, ms |", "|---|---|---|---|"]
    for row in found["products"]:
        onednn = f"{1000 * row['onednn']:.2f}" if row["onednn"] else "-"
        lines.append(f"| {row['model']} | {row['rows']} | {1000 * row['ours']:.2f} | {onednn} |")
    lines += ["", "| model | rows | bfloat16, ms (GB/s) | int8 | int4 |", "|---|---|---|---|---|"]
    for row in found["quantized"]:
        cells = [
            f"{1000 * each['seconds']:.2f} ({each['bytes'] / each['seconds'] / 1e9:.0f})"
            for each in row["times"].values()
        ]
        lines.append(f"| {row['model']} | {row['rows']} | {' | '.join(cells)} |")
    lines += ["", "| heads, heads of keys, tokens, slots, width | ours, microseconds | torch |", "|---|---|---|"]
    for row in found["attentions"]:
        shape = ", ".join(map(str, row["case"]))
        lines.append(f"| {shape} | {1e6 * row['ours']:.0f} | {1e6 * row['torch']:.0f} |")
    return "\n".join(lines)


def products(shapes: list[tuple[int, int]], rows: int, repetitions: int) -> tuple[float, float | None]:
    """Return the seconds of multiplying `rows` inputs by all matrices one after another, ours and oneDNN's.

    Some processors have no layout of oneDNN for bfloat16.
    """
    inputs = {width: torch.randn(rows, width).bfloat16() for _, width in shapes}
    weights = [torch.randn(shape).bfloat16() for shape in shapes]
    stretch = Stretch(sum(map(panel_bytes, weights)))
    panels = [stretch.hold(into_panels(weight)) for weight in weights]

    def ours() -> None:
        for (features, width), panel in zip(shapes, panels, strict=True):
            panel_linear(inputs[width], panel, None, features)

    if not has_blocked(torch.bfloat16):
        return timed([ours], repetitions)[0], None
    blocks = [torch.ops.mkldnn._reorder_linear_weight(weight, 8) for weight in weights]

    def by_onednn() -> None:
        for (_, width), block in zip(shapes, blocks, strict=True):
            torch.ops.mkldnn._linear_pointwise(inputs[width], block, None, "none", [], "")

    seconds, of_onednn = timed([ours, by_onednn], repetitions)
    return seconds, of_onednn


def quantized(shapes: list[tuple[int, int]], repetitions: int) -> list[dict[str, Any]]:
    """Return the seconds for all matrices in bfloat16 and quantized, by number of rows, and the bytes read."""
    weights = [torch.randn(shape).bfloat16() for shape in shapes]
    plain = Stretch(sum(map(panel_bytes, weights)))
    layers: dict[str, list[Callable[[Tensor], Tensor]]] = {"bfloat16": []}
    sizes = {"bfloat16": sum(map(panel_bytes, weights))}
    for weight in weights:
        layers["bfloat16"].append(
            partial(panel_linear, weight=plain.hold(into_panels(weight)), bias=None, features=len(weight))
        )
    for precision in PRECISIONS:
        name, sizes[str(precision)] = str(precision), sum(precision.bytes_of(*shape) for shape in shapes)
        room = Stretch(sizes[name])
        layers[name] = [
            QuantizedLinear(precision, quantize(weight, precision).into_panels().map(room.hold), linear_of(weight))
            for weight in weights
        ]

    def through(name: str, inputs: dict[int, Tensor]) -> None:
        for (_, width), layer in zip(shapes, layers[name], strict=True):
            layer(inputs[width])

    found = []
    for rows in (1, 2, 6, 8, 16, 48):
        inputs = {width: torch.randn(rows, width).bfloat16() for _, width in shapes}
        times = timed([partial(through, name, inputs) for name in layers], repetitions)
        each = {name: {"seconds": one, "bytes": sizes[name]} for name, one in zip(layers, times, strict=True)}
        found.append({"rows": rows, "times": each})
    return found


def linear_of(weight: Tensor) -> torch.nn.Linear:
    """Return a layer of a weight's shape and dtype on the meta device, which holds no values."""
    features, width = weight.shape
    return torch.nn.Linear(width, features, bias=False, device="meta", dtype=weight.dtype)


def attentions(heads: int, groups: int, tokens: int, slots: int, width: int, repetitions: int) -> tuple[float, ...]:
    """Return the seconds of one causal attention, ours and torch's, for which keys and values are repeated per head."""
    queries = torch.randn(1, tokens, heads, width).bfloat16().transpose(1, 2)
    keys, values = torch.randn(2, 1, groups, slots + 13, width).bfloat16()[..., :slots, :]
    hidden = (
        torch.full((tokens, slots), torch.finfo(torch.bfloat16).min).triu(1 + slots - tokens).bfloat16()[None, None]
    )

    def by_torch() -> None:
        wide = (store.repeat_interleave(heads // groups, 1) for store in (keys, values))
        functional.scaled_dot_product_attention(queries, *wide, attn_mask=hidden)

    return timed([lambda: panel_attention(queries, keys, values, hidden, width**-0.5), by_torch], repetitions)


def timed(runs: Sequence[Callable[[], object]], repetitions: int) -> tuple[float, ...]:
    """Return the median seconds of alternating runs; the first of each is a warm-up."""
    laps: list[list[float]] = [[] for _ in runs]
    for _ in range(repetitions + 1):
        for seconds, run in zip(laps, runs, strict=True):
            start = perf_counter()
            run()
            seconds.append(perf_counter() - start)
    return tuple(median(seconds[1:]) for seconds in laps)


if __name__ == "__main__":
    main()
