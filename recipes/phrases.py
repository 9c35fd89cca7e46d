"""Make the table of phrases of SmolLM2-135M-Instruct that ships with the package, for `--draft phrases:smollm2`.

    python recipes/phrases.py --out build/smollm2

The target writes chats with itself, and what it often says there is counted. An interrupted run continues where it
stopped: each batch of chats is a file. The default ones take an hour of two cores.
"""

from __future__ import annotations

import argparse
from itertools import groupby
from pathlib import Path
from typing import Any

from chat.writing import ChatWriter
from safetensors.torch import load_file

from slipstream.drafters.phrases import ORDER, Phrases
from slipstream.models.loading.load import load_scorer, load_tokenizer
from slipstream.models.loading.pairings import located


def main() -> None:
    """Run the recipe, or resume it."""
    args = _arguments()
    source = located("smollm2")
    scorer: Any = load_scorer(source)
    writer = ChatWriter(scorer, load_tokenizer(source), args.out / "chats", args.rows, args.length)
    files = writer.write(args.batches, lambda line: print(line, flush=True))
    texts = [text for file in files for text in _answers(file)]
    phrases = Phrases.fit(texts, scorer.vocab)
    phrases.save(args.out / "smollm2.phrases")
    print(f"{phrases.facts}, of {len(texts):,} answers with {sum(map(len, texts)):,} tokens")


def _answers(file: Path) -> list[list[int]]:
    """Return the answers of a batch of chats, each after the last tokens before it."""
    batch, texts = load_file(file), list[list[int]]()
    for tokens, answer in zip(batch["tokens"].tolist(), (batch["answer"] > 0).tolist(), strict=True):
        for answers, places in groupby(range(len(tokens)), answer.__getitem__):
            here = list(places)
            texts += [tokens[max(0, here[0] - ORDER) : here[-1] + 1]] if answers else []
    return texts


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="where the chats and the table go")
    parser.add_argument("--batches", type=int, default=46, help="batches of chats that the target writes")
    parser.add_argument("--rows", type=int, default=48, help="chats in a batch")
    parser.add_argument("--length", type=int, default=416, help="tokens of a chat")
    return parser.parse_args()


if __name__ == "__main__":
    main()
