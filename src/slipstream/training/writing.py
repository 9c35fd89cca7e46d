"""Texts that a target writes, to distil on: continuations at several temperatures, stored in a file.

A draft has to predict the target's texts, not people's, so it learns most from the target's own texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import torch

from slipstream.engine.engine import Engine
from slipstream.files import TensorFileKind, load_tensors, save_tensors
from slipstream.training.lessons import Tokens

KIND = TensorFileKind(
    "collection of written texts", "slipstream written texts", "1", "delete it to let the target write again"
)

TEMPERATURES, SHARES = (0.0, 0.6, 1.0), (0.3, 0.1, 0.6)
"""The temperatures at which texts are written, with their shares, since drafts are used at any temperature."""

OPENINGS = (4, 8, 16, 32, 64, 96)
"""The lengths, in tokens, of prompts that are taken from documents for the target to continue."""

LONGEST = 0.75  # the greatest share of a text's length that its prompt may take


class WrittenTexts:
    """Texts (prompt and continuation, as token ids) in a file, which grows batch by batch."""

    def __init__(self, file: Path, settings: dict[str, str]) -> None:
        self.file, self.settings = file, settings
        self.texts: list[list[int]] = []
        if file.exists():
            tensors, about = load_tensors(file, KIND)
            differ = [name for name, value in settings.items() if about.get(name) != value]
            if differ:
                raise ValueError(f"{file} holds texts of another {', '.join(differ)}: {KIND.remedy}.")
            parts = tensors["tokens"].long().split(tensors["lengths"].tolist())
            self.texts = [part.tolist() for part in parts]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.texts))

    def write(
        self,
        engine: Engine,
        prompts: Sequence[Sequence[int]],
        more: Callable[[WrittenTexts], bool],
        length: int,
        rows: int = 64,
        seed: int = 0,
    ) -> None:
        """Let an engine continue prompts (token ids) to texts of up to `length` tokens, while `more` returns true.

        It writes `rows` texts at a time. If it is stopped and resumed, it writes the same texts as without a stop.
        Raises ValueError if no prompt is short enough.
        """
        usable = sorted((list(prompt) for prompt in prompts if 0 < len(prompt) <= LONGEST * length), key=len)
        if not usable:
            raise ValueError(f"no prompt has {int(LONGEST * length)} tokens or fewer: the target has nothing to write.")
        while more(self):
            rng = np.random.default_rng([seed, len(self.texts)])
            start = int(rng.integers(0, max(1, len(usable) - rows + 1)))
            some = usable[start : start + rows]  # prompts of about the same length
            temperature = float(rng.choice(TEMPERATURES, p=SHARES))
            new = length - len(some[-1])
            done = engine.generate(
                some, temperature=temperature, max_new_tokens=new, seed=int(rng.integers(2**31)), plain=True
            )
            self.texts += [[*prompt, *one.tokens] for prompt, one in zip(some, done, strict=True)]
            self.file.parent.mkdir(parents=True, exist_ok=True)
            flat = torch.tensor([token for text in self.texts for token in text], dtype=torch.int32)
            lengths = torch.tensor(list(map(len, self.texts)), dtype=torch.int32)
            save_tensors(self.file, KIND, {"tokens": flat, "lengths": lengths}, self.settings)


def openings(documents: Iterable[Tokens], count: int, seed: int = 0) -> list[list[int]]:
    """Return at most `count` prompts (token ids): beginnings of documents, and pieces from anywhere in them."""
    rng, prompts = np.random.default_rng([seed, 7]), list[list[int]]()
    known = [document for document in documents if len(document)]
    for place in range(count if known else 0):
        document = known[place % len(known)]
        length = int(rng.choice(OPENINGS))
        anywhere = rng.random() < 0.5 and len(document) > 2 * length
        start = int(rng.integers(0, len(document) - length)) if anywhere else 0
        prompts.append([int(token) for token in document[start : start + length]])
    return [list(prompt) for prompt in dict.fromkeys(map(tuple, prompts))]
