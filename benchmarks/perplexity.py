"""Measures what quantization costs a target: its perplexity on texts, and how often its quantized copy agrees with it.

python benchmarks/perplexity.py TEXT... [--target MODEL] [--precision int4?group=64] [--json FILE]

Texts are files that the model was not trained on (for the embedded one: Python). Each is read by the unquantized target
and in each precision, in separate windows without context before them. `perplexity` is exp of the mean negative
log-likelihood of a token; `alpha` is the chance that a token drafted by the quantized copy is accepted, over all
positions of these texts: the mean of sum_x min(p(x), q(x)) at temperature 1, one minus the total variation, and the
share of positions where both have the same likeliest token at temperature 0. `kl` is the mean divergence of q from p.
`--precision kv_dtype=int8` is the target with its cache in 8 bits instead of its weights.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.engine.load import load
from slipstream.kernels.quantization import Precision
from slipstream.measure.environment import environment
from slipstream.models.causal import CausalScorer
from slipstream.models.loading.pairings import EMBEDDED
from slipstream.models.loading.twins import quantized_twin

CACHE = "kv_dtype="
GROUPS = (32, 64, 128)
PRECISIONS = ("int8", *(f"int4?group={each}{rest}" for rest in ("", "&rounding=gptq") for each in GROUPS))


@dataclass(frozen=True)
class Cost:
    """The figures of one precision: `change` is its perplexity over that of the unquantized weights, minus one."""

    precision: str
    perplexity: float
    change: float
    alpha_greedy: float
    alpha: float
    kl: float


@dataclass
class Sums:
    """Sums over the tokens of all texts."""

    tokens: int = 0
    loss: float = 0.0  # negative log-likelihood, in nats
    same: float = 0.0  # positions where both have the same likeliest token
    overlap: float = 0.0  # sum_x min(p(x), q(x))
    divergence: float = 0.0  # sum_x p(x) log(p(x) / q(x))

    def add(self, p: Tensor, q: Tensor, text: Tensor) -> None:
        """Add a window: its tokens (n,), of which all but the first are predicted by laws p and q (n - 1, vocab)."""
        self.tokens += len(text) - 1
        self.loss -= float(q.gather(1, text[1:, None]).log().sum())
        self.same += float((p.argmax(1) == q.argmax(1)).sum())
        self.overlap += float(torch.minimum(p, q).sum())
        self.divergence += float(torch.nn.functional.kl_div(q.double().log(), p.double(), reduction="sum"))

    def cost(self, precision: str, base: float) -> Cost:
        """Return the figures; `base` is the perplexity of the unquantized weights."""
        perplexity = math.exp(self.loss / self.tokens)
        means = [total / self.tokens for total in (self.same, self.overlap, self.divergence)]
        return Cost(precision, perplexity, perplexity / base - 1, *means)


def windows(files: Sequence[Path], tokenizer: Any, length: int) -> Iterator[Tensor]:
    """Yield the tokens of every file, in windows (n,) of `length` tokens or fewer."""
    for file in files:
        ids = tokenizer(file.read_text(encoding="utf-8"), add_special_tokens=False, verbose=False)["input_ids"]
        yield from (part for part in torch.tensor(ids).split(length) if len(part) > 1)


@torch.inference_mode()
def law(model: Any, text: Tensor) -> Tensor:
    """Return the model's laws (n - 1, vocab) of all tokens of a text (n,) but the first."""
    laws: Tensor = model(text[None], use_cache=False).logits[0, :-1].float().softmax(-1)
    return laws


def law_of(model: Any, name: str, precision: str) -> Callable[[Tensor], Tensor]:
    """Return a function from a text (n,) to the laws (n - 1, vocab) of the model, or of its cache, in a precision."""
    if not precision.startswith(CACHE):
        return partial(law, quantized_twin(model, name, Precision.read(precision)))
    scorer = CausalScorer(model, name, kv_dtype=precision.removeprefix(CACHE))
    scorer.add(1)

    def found(text: Tensor) -> Tensor:
        logits = scorer.extend(text[None], [len(text)])[0, :-1]
        scorer.rollback([0])
        return logits.float().softmax(-1)

    return found


def measure(model: Any, name: str, texts: Sequence[Tensor], precisions: Sequence[str]) -> list[Cost]:
    """Return the figures of the unquantized weights, and of each precision."""
    laws = {each: law_of(model, name, each) for each in precisions}
    sums = {each: Sums() for each in ("as it is", *precisions)}
    for text in texts:
        p = law(model, text)
        sums["as it is"].add(p, p, text)
        for each, found in laws.items():
            sums[each].add(p, found(text), text)
    base = math.exp(sums["as it is"].loss / sums["as it is"].tokens)
    return [total.cost(each, base) for each, total in sums.items()]


def table(costs: Sequence[Cost]) -> str:
    """Return the figures as a Markdown table."""
    head = "| weights | perplexity | change | alpha, T = 0 | alpha, T = 1 | KL |\n|---|---|---|---|---|---|"
    rows = [
        (
            each.precision,
            f"{each.perplexity:.3f}",
            f"{each.change:+.2%}",
            f"{each.alpha_greedy:.3f}",
            f"{each.alpha:.4f}",
            f"{each.kl:.1e}",
        )
        for each in costs
    ]
    return "\n".join([head, *(f"| {' | '.join(row)} |" for row in rows)])


def main() -> int:
    """Measure, print the table, and write the JSON file."""
    args = _arguments()
    engine = load(args.target or EMBEDDED / "target", dtype=args.dtype, device="cpu")
    scorer = engine.decoder.target
    texts = list(windows(args.texts, engine.tokenizer, args.window))
    costs = measure(scorer.model, scorer.name, texts, args.precision or PRECISIONS)
    print(table(costs))
    if args.json:
        about = {"texts": len(args.texts), "tokens": sum(map(len, texts)), "window": args.window}
        report = {**environment(engine), **about, "costs": [asdict(each) for each in costs]}
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("texts", nargs="+", type=Path, metavar="TEXT")
    parser.add_argument("--target", help="a hub name or folder; without: the embedded target")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--precision", action="append", metavar="NAME", help="repeatable; without: int8, int4 in groups"
    )
    parser.add_argument("--window", type=int, default=512, metavar="N", help="tokens that are read together")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
