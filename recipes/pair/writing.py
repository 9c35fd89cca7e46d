"""Makes the target write texts for its drafts to learn from."""

from __future__ import annotations

from pathlib import Path

from tqdm import tqdm

import slipstream
from slipstream.training.material import WrittenTexts

from . import ranks
from .budget import DEVICE

WRITTEN = 320  # the most tokens of a text, with its prompt
AT_ONCE = 128  # texts that are written in one batch


def written_texts(target: Path, prompts: list[list[int]], tokens: int, file: Path) -> list[list[int]]:
    """Let the target in a folder continue prompts until the texts in `file` have this number of tokens -> the texts.

    Among several processes, each one has its own file and writes different texts.
    """
    texts = WrittenTexts(file, {"process": f"{ranks.number()} of {ranks.count()}"})
    engine = slipstream.load(target, dtype="bfloat16", device=str(DEVICE), batch_size=AT_ONCE)
    with tqdm(total=tokens, initial=texts.tokens, desc="written", disable=not ranks.first()) as bar:

        def more(texts: WrittenTexts) -> bool:
            bar.update(texts.tokens - bar.n)
            return texts.tokens < tokens

        texts.write(engine, prompts, more, WRITTEN, rows=AT_ONCE, seed=ranks.number())
    return texts.texts
