"""Pictures of digits, written pixel by pixel by a transformer; drafts are by a smaller one or copy the row above.

python recipes/digits.py --out build/digits
python examples/images.py build/digits --plot build/digits.png
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from transformers import LlamaForCausalLM

import slipstream
from slipstream.core.draft import Draft
from slipstream.core.round import Context, Round
from slipstream.drafters.copying import sure

WIDTH, SIZE = 8, 64  # pixels of a row and of a picture


class RowAbove:
    """Drafts the pixels of the row above, and nothing for the first row."""

    def propose(self, context: Context, gammas: Sequence[int]) -> Draft:
        rows = zip(context.rows, gammas, strict=True)
        return sure([list(row.output[-WIDTH:])[:gamma] if len(row.output) >= WIDTH else [] for row, gamma in rows])

    def observe(self, round: Round) -> None: ...


def draw(target, draft, digits: Sequence[int], seed: int = 0, **options):
    """Let the target draw digits -> pictures of 64 levels each, which of their pixels were drafted, and statistics."""
    drafted = [[False] * SIZE for _ in digits]

    def watch(round: Round) -> None:
        for row, new, kept in zip(round.rows, round.tokens, round.verdict.accepted.tolist(), strict=True):
            start = len(row.output) - len(new)
            drafted[row.index][start : start + kept] = [True] * len(drafted[row.index][start : start + kept])

    engine = slipstream.load(target, draft, gamma=None if draft is None else 5)
    options = {"max_new_tokens": SIZE, "temperature": 1.0, "seed": seed, "on_round": watch, **options}
    done = engine.generate([[16 + digit] for digit in digits], **options)
    return [list(each.tokens) for each in done], drafted, [each.stats for each in done]


def _color(shade: float, drafted: bool) -> tuple[float, float, float]:
    return (1 - shade, 1 - shade, 1 - 0.2 * shade) if drafted else (1 - 0.2 * shade, 1 - shade, 1 - shade)


def plot(file: Path, pictures: dict) -> None:
    """Plot a line of pictures per draft; drafted pixels are blue, those that the target chose itself are red."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1.3 * len(pictures)), layout="constrained")
    for line, (name, (levels, drafted, _)) in zip(figure.subplots(len(pictures), 10), pictures.items(), strict=True):
        line[0].set_ylabel(name)
        for axes, pixels, marks in zip(line, levels, drafted, strict=True):
            shades = [_color(min(p / 15, 1), m) for p, m in zip(pixels, marks, strict=True)]
            axes.imshow([shades[i : i + WIDTH] for i in range(0, SIZE, WIDTH)])
            axes.set(xticks=[], yticks=[])
    figure.savefig(file)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="the folder that recipes/digits.py wrote")
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    if not (args.folder / "target").is_dir() or not (args.folder / "draft").is_dir():
        parser.error(f"{args.folder} holds no pair: run python recipes/digits.py --out {args.folder}")
    target, small = (LlamaForCausalLM.from_pretrained(args.folder / name) for name in ("target", "draft"))
    drafts = {"model": small, "row above": RowAbove()}
    pictures = {name: draw(target, draft, range(10)) for name, draft in drafts.items()}
    for name, (_, _, stats) in pictures.items():
        total = sum(stats[1:], stats[0])
        print(f"{name}: alpha {total.alpha:.3f}, {total.mean_acceptance_length:.2f} pixels per call of the target")
    if args.plot:
        plot(args.plot, pictures)
