"""Measures how far the ways of computing with a .gguf file are from its dequantized weights in float32, on a text.

python benchmarks/fidelity.py MODEL.gguf TEXT [--llama-cpp PYTHON] [--windows 8] [--length 256] [--json FILE]

The text is read in windows without context before them. For every token: the Kullback-Leibler divergence from the
dequantized model's distribution, the total variation between both, and whether both have the same likeliest token; and
the perplexity of the text. PYTHON is one that has llama-cpp-python, for llama.cpp's figures on the same file.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tables import markdown
from torch import Tensor

from slipstream.engine.load import load
from slipstream.measure.environment import environment
from slipstream.models.loading.load import load_model

WAYS: dict[str, dict[str, Any]] = {
    "inputs as they are": {"activations": "float"},
    "inputs of 8 bits (default)": {},
    "dequantized in bfloat16": {"dequantize": True, "dtype": "bfloat16"},
}
"""The ways of computing, with what `load` takes for them."""
PEER = Path(__file__).parent / "peers" / "llama_cpp_logits.py"

Reader = Callable[[int], Tensor]
"""The number of a window -> its logits (n, vocabulary)."""


@dataclass(frozen=True)
class Distance:
    """The means of a way of computing over all tokens."""

    way: str
    divergence: float
    variation: float
    same: float
    perplexity: float


def distance(way: str, read: Reader, base: Reader, windows: Tensor) -> Distance:
    """Return how far a way of computing is from the base."""
    sums = torch.zeros(4, dtype=torch.float64)
    for number, text in enumerate(windows):
        p, q = (each(number)[:-1].double().log_softmax(-1) for each in (base, read))
        divergence, variation = (p.exp() * (p - q)).sum(), (p.exp() - q.exp()).abs().sum() / 2
        same, loss = (p.argmax(-1) == q.argmax(-1)).sum(), -q.gather(1, text[1:, None]).sum()
        sums += torch.stack((divergence, variation, same.double(), loss))
    means = (sums / (windows.numel() - len(windows))).tolist()
    return Distance(way, *means[:3], math.exp(means[3]))


def ours(file: Path, windows: Tensor, **options: Any) -> Reader:
    """Return the reader of one of our ways."""
    model: Any = load_model(file, **options)

    @torch.inference_mode()
    def read(number: int) -> Tensor:
        logits: Tensor = model(windows[number : number + 1], use_cache=False).logits[0]
        return logits

    return read


def llama_cpp(python: str, file: Path, windows: Tensor, folder: str) -> Reader:
    """Return the reader of llama.cpp, which computes all windows at once."""
    tokens, logits = Path(folder) / "tokens.npy", Path(folder) / "logits.npy"
    np.save(tokens, windows.numpy())
    subprocess.run([python, str(PEER), str(file), str(tokens), str(logits)], check=True)
    found = np.load(logits, mmap_mode="r")
    return lambda number: torch.from_numpy(np.array(found[number]))


def measured(args: argparse.Namespace, windows: Tensor) -> Iterator[Distance]:
    """Yield the figures of all ways."""
    base = ours(args.model, windows, dequantize=True, dtype="float32")
    yield distance("dequantized in float32", base, base, windows)
    for way, options in WAYS.items():
        yield distance(way, ours(args.model, windows, **options), base, windows)
    if args.llama_cpp:
        with tempfile.TemporaryDirectory() as folder:
            read = llama_cpp(args.llama_cpp, args.model, windows, folder)
            yield distance("llama.cpp", read, base, windows)


def fidelity_table(record: dict[str, Any]) -> str:
    """Return the figures as a Markdown table."""
    head = ("weights in codes", "divergence (nats)", "total variation", "same likeliest token", "perplexity")
    rows = [
        (
            row["way"],
            f"{abs(row['divergence']):.5f}",
            f"{row['variation']:.3%}",
            f"{row['same']:.2%}",
            f"{row['perplexity']:.3f}",
        )
        for row in record["distances"]
    ]
    return markdown(head, rows)


def main() -> int:
    """Measure, print the table, and write the JSON file."""
    args = _arguments()
    engine = load(args.model, device="cpu")
    text = args.text.read_text(encoding="utf-8")[: args.windows * args.length * 8]
    ids = engine.tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    count = min(args.windows, len(ids) // args.length)
    windows = torch.tensor(ids[: count * args.length]).view(count, args.length)
    record = environment(engine) | {"text": args.text.name, "tokens": windows.numel()}
    record["distances"] = [asdict(each) for each in measured(args, windows)]
    print(fidelity_table(record))
    if args.json:
        args.json.write_text(json.dumps(record, indent=2) + "\n")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path, metavar="MODEL.gguf")
    parser.add_argument("text", type=Path, metavar="TEXT")
    parser.add_argument("--llama-cpp", metavar="PYTHON", help="a Python that has llama-cpp-python")
    parser.add_argument("--windows", type=int, default=8, metavar="N")
    parser.add_argument("--length", type=int, default=256, metavar="N", help="tokens of a window")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
